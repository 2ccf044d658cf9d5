"""layernorm batch: many files, their tree, bad ones, resuming, shards, workers, signals."""

import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import COMMAND, TIMEOUT, assert_refused, environment, files_in, sparse_npy, wait_until
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from layernorm_cli import layer_norm
from layernorm_cli.backends import choose_engine
from layernorm_cli.tensorfiles.journal import FOLDER, read_journals

KEYS = ["input", "output", "status", "rows", "bytes", "seconds", "error"]
SUMMARY = ["files", "done", "skipped", "failed", "rows", "bytes", "seconds"]
rng = np.random.default_rng(6)
GAMMA = rng.normal(1, 1, 8).astype("<f4")


def rows(*shape):
    return rng.normal(3, 2, shape).astype("<f4")


@pytest.fixture
def tree(here):
    """in/ with a.npy, b2.npy, b10.npy, sub/c.npy, sub/d.npz; gamma.npy."""
    (here / "in/sub").mkdir(parents=True)
    for name in ("a", "b10", "b2"):
        np.save(f"in/{name}.npy", rows(5, 8))
    np.save("in/sub/c.npy", np.asfortranarray(rows(2, 3, 8).astype("<f8")))
    np.savez("in/sub/d.npz", x=rows(3, 8))
    np.save("gamma.npy", GAMMA)
    return here


class Manifest:
    """The lines of a manifest, checked: strict JSON, the keys in their order, the summary last."""

    def __init__(self, text):
        assert text.endswith("\n")
        *lines, last = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
        self.summary = last["summary"]
        assert list(last) == ["summary"]
        assert list(self.summary) == SUMMARY
        for line in lines:
            assert list(line) == KEYS
            assert line["status"] in ("done", "skipped", "failed")
            assert (line["error"] is None) == (line["status"] != "failed")
            assert line["seconds"] >= 0
            assert "\n" not in (line["error"] or "")
        self.lines = {line["input"]: line for line in lines}
        assert len(self.lines) == len(lines)
        for status in ("done", "skipped", "failed"):
            assert self.summary[status] == len(self.having(status))
        for count in ("rows", "bytes"):
            assert self.summary[count] == sum(line[count] for line in lines)

    def having(self, status):
        return {name for name, line in self.lines.items() if line["status"] == status}


@pytest.fixture
def batch(main):
    """Runs a batch in this process, and returns its manifest; the exit code must be 0, or 5 for some."""

    def run(*arguments, failed=0, **variables):
        done = main("batch", *arguments, **variables)
        manifest = Manifest(done.out)
        assert manifest.summary["failed"] == failed, done.err
        assert done.code == (5 if failed else 0), done.err
        return manifest

    return run


def names(folder="out"):
    """The paths of all outputs below a folder, temporary files and strange ones too."""
    return {name for name in files_in(Path(folder)) if not name.startswith(FOLDER)}


def outputs(folder="out"):
    """Path -> bytes of them."""
    return {name: Path(folder, name).read_bytes() for name in names(folder)}


TREE = {"a.npy", "b2.npy", "b10.npy", "sub/c.npy", "sub/d.safetensors"}


def test_bytes_are_those_that_apply_writes(tree, batch, main):
    norm = ["--gamma", "gamma.npy", "--eps", "0.25"]
    manifest = batch("in", "--output-dir", "out", *norm)
    assert manifest.having("done") == {
        "in/a.npy", "in/b2.npy", "in/b10.npy", "in/sub/c.npy", "in/sub/d.npz"
    }  # fmt: skip
    made = outputs()
    assert set(made) == TREE
    for name, line in manifest.lines.items():
        suffix = Path(line["output"]).suffix
        assert main("apply", name, *norm, "-q", "-f", "-o", f"one{suffix}").code == 0
        assert Path(f"one{suffix}").read_bytes() == Path(line["output"]).read_bytes()
    assert manifest.lines["in/sub/c.npy"]["rows"] == 6
    assert manifest.lines["in/sub/c.npy"]["bytes"] == 6 * 8 * 8
    assert manifest.summary["rows"] == 15 + 6 + 3


def test_numbers(tree, batch):
    batch("in/a.npy", "-o", "out", "--gamma", "gamma.npy")
    truth = layer_norm(np.load("in/a.npy"), GAMMA).astype("f4")
    np.testing.assert_array_equal(np.load("out/a.npy"), truth)


@pytest.mark.parametrize(
    "options",
    [
        ["--kind", "rms"],
        ["--beta", "gamma.npy", "--gamma", "gamma.npy", "--gamma-offset", "1"],
        ["--dtype", "float64"],
        ["--dtype", "bfloat16"],
        ["--axis", "0"],
        ["--threads", "2", "--backend", "numpy", "--device", "cpu"],
        ["--params", "norms.safetensors", "--site", "ln"],
    ],
    ids=" ".join,
)
def test_options_of_apply(options, tree, batch, main):
    save_file({"ln.weight": GAMMA, "ln.bias": GAMMA, "ln_f.weight": GAMMA}, "norms.safetensors")
    if "--axis" in options:
        (tree / "in/b2.npy").unlink()
    batch("in/a.npy", "-o", "out", *options)
    (made,) = Path("out").glob("a.*")
    assert main("apply", "in/a.npy", *options, "-q", "-o", f"one{made.suffix}").code == 0
    assert made.read_bytes() == Path(f"one{made.suffix}").read_bytes()


def test_order_is_natural(tree, batch):
    manifest = batch("in", "-o", "out", "--jobs", "1")
    assert list(manifest.lines) == [
        "in/a.npy", "in/b2.npy", "in/b10.npy", "in/sub/c.npy", "in/sub/d.npz"
    ]  # fmt: skip


def test_include_and_exclude(tree, batch):
    np.save("in/x.npy", rows(2, 8))
    os.rename("in/x.npy", "in/x.bin")
    (tree / "in/.hidden").mkdir()
    np.save("in/.hidden/h.npy", rows(2, 8))
    assert batch("in", "-o", "o1", "--include", "*.bin").having("done") == {"in/x.bin"}
    assert names("o1") == {"x.bin.safetensors"}
    assert batch("in", "-o", "o2", "--exclude", "b*").having("done") == {
        "in/a.npy", "in/sub/c.npy", "in/sub/d.npz"
    }  # fmt: skip
    assert batch("in", "-o", "o3", "--exclude", "sub").having("done") == {
        "in/a.npy", "in/b2.npy", "in/b10.npy"
    }  # fmt: skip
    taken = batch("in", "-o", "o4", "--include", "sub/*", "--include", "a*", "--exclude", "*.npz")
    assert taken.having("done") == {"in/a.npy", "in/sub/c.npy"}


def test_links_are_followed_but_not_in_circles(tree, batch):
    (tree / "in/sub/up").symlink_to("..")
    (tree / "in/self").symlink_to(".")
    (tree / "elsewhere").mkdir()
    np.save("elsewhere/e.npy", rows(2, 8))
    (tree / "in/there").symlink_to("../elsewhere")
    (tree / "in/link.npy").symlink_to("../elsewhere/e.npy")
    (tree / "in/broken.npy").symlink_to("nowhere.npy")
    manifest = batch("in", "-o", "out", failed=1)
    assert manifest.having("failed") == {"in/broken.npy"}
    assert names() == TREE | {"there/e.npy", "link.npy"}


def test_pipes_in_directories_are_left_out(tree, batch):
    os.mkfifo("in/pipe.npy")
    assert len(batch("in", "-o", "out").lines) == 5


def test_no_files(here, main):
    (here / "empty").mkdir()
    done = main("batch", "empty", "-o", "out")
    assert (done.code, Manifest(done.out).lines) == (0, {})
    assert done.err == "layernorm: warning: no files found\n"
    done = main("batch", "--files-from", os.devnull, "-o", "out", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_names_of_any_characters(here, batch, main):
    listed = [
        b"two\nlines.npy",
        b"\xff\xfe.npy",
        b"a#b.npy",
        "ü [x] *.npy".encode(),
        b"-o.npy",
        b"'.npy",
    ]
    os.mkdir("in")
    for name in listed:
        np.save("t.npy", rows(2, 8))
        os.rename(b"t.npy", b"in/" + name)
    assert len(batch("in", "-o", "out").having("done")) == len(listed)
    assert {os.fsencode(name) for name in names()} == set(listed)
    Path("list").write_bytes(b"\0".join(b"in/" + name for name in listed) + b"\0")
    batch("-0", "--files-from", "list", "-o", "out2", "--base", "in")
    assert outputs("out2") == outputs()
    resumed = batch("in", "-o", "out", "--resume")
    assert len(resumed.having("skipped")) == len(listed)


@pytest.mark.parametrize(("null", "end"), [(["-0"], "\0"), (["--null"], "\0"), ([], "\n")])
def test_lists(null, end, tree, layernorm):
    """Outputs mirror the paths as listed, as tar's do."""
    paths = ["in/a.npy", "./in/sub/../b2.npy", str(tree / "in/sub"), "../" + tree.name + "/in/b10.npy"]
    listed = end.join(paths).encode()
    done = layernorm("batch", *null, "--files-from", "-", "-o", "out", stdin=listed)
    assert (done.code, done.err) == (0, "")
    below = str(tree / "in/sub")[1:]
    assert names() == {
        "in/a.npy", "in/b2.npy", f"{below}/c.npy", f"{below}/d.safetensors", f"{tree.name}/in/b10.npy"
    }  # fmt: skip


def test_base(tree, batch, main):
    manifest = batch("in/sub/c.npy", "in/a.npy", "-o", "out", "--base", ".")
    assert names() == {"in/sub/c.npy", "in/a.npy"} == set(manifest.lines)
    batch("in/sub", "-o", "out2", "--base", "in")
    assert names("out2") == {"sub/c.npy", "sub/d.safetensors"}
    assert_refused(main("batch", "in/a.npy", "-o", "o", "--base", "in/sub"), 2, "in/a.npy", "--base")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{stem}.ln{suffix}", {"c.ln.npy", "d.ln.safetensors"}),
        ("{name}.safetensors", {"c.npy.safetensors", "d.npz.safetensors"}),
        ("{parent}-{stem}{suffix}", {"sub-c.npy", "sub-d.safetensors"}),
        ("{parent}/{{{stem}}}{suffix}", {"sub/{c}.npy", "sub/{d}.safetensors"}),
    ],
)
def test_names_of_outputs(template, expected, tree, batch):
    batch("in/sub/c.npy", "in/sub/d.npz", "-o", "out", "--name", template)
    assert names() == expected


@pytest.mark.parametrize(
    "template",
    ["{nosuch}.npy", "{}", "{0}", "{stem", "}", "{stem!r}.npy", "{stem:>9}.npy", "{stem.x}", "fixed.npy",
     "../{name}", "/{name}", "{stem}.txt", "{stem}"],
)  # fmt: skip
def test_templates_that_cannot_be(template, tree, main):
    assert_refused(main("batch", "in/a.npy", "-o", "out", "--name", template), 2, "--name")


def test_types_that_npy_cannot_hold(here, batch):
    x = rows(3, 8)
    np.save("raw.npy", x.astype(ml_dtypes.bfloat16))
    save_file({"x": x.astype(ml_dtypes.float8_e4m3fn)}, "f8.safetensors")
    batch("raw.npy", "f8.safetensors", "-o", "out", "--assume-dtype", "bfloat16")
    assert names() == {"raw.safetensors", "f8.safetensors"}
    y = load_file("out/raw.safetensors")["y"]
    wide = x.astype(ml_dtypes.bfloat16).astype("f8")
    np.testing.assert_allclose(y.astype("f8"), layer_norm(wide), rtol=2**-8, atol=1e-30)
    assert load_file("out/f8.safetensors")["x"].dtype == ml_dtypes.bfloat16


@pytest.fixture
def several(here):
    """several.safetensors with two tensors to normalize, ids, one of a strange dtype, and metadata."""
    tensors = {"h.0.in": rows(3, 8), "h.1.in": rows(2, 2, 8).astype(ml_dtypes.bfloat16)}
    others = {"ids": np.arange(3, dtype="<i4"), "mask": np.ones((2, 0), "?"), "s": np.array(2.5, "<f8")}
    save_file(tensors | others, "several.safetensors", {"format": "pt"})
    return tensors, others


def test_globs_leave_other_tensors_out(several, batch):
    manifest = batch("several.safetensors#h.*.in", "-o", "out")
    assert manifest.lines["several.safetensors#h.*.in"]["rows"] == 7
    made = load_file("out/several.safetensors")
    assert set(made) == {"h.0.in", "h.1.in"}
    np.testing.assert_array_equal(made["h.0.in"], layer_norm(several[0]["h.0.in"]).astype("f4"))
    assert (made["h.1.in"].dtype, made["h.1.in"].shape) == ("bfloat16", (2, 2, 8))


def test_other_tensors_are_kept(several, batch):
    batch("several.safetensors#*.in", "-o", "out", "--keep-others")
    with safe_open("out/several.safetensors", "np") as file:
        assert set(file.keys()) == {*several[0], *several[1]}
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["eps"] == "1e-05"
        for name, array in several[1].items():
            kept = file.get_tensor(name)
            assert (kept.dtype, kept.shape, kept.tobytes()) == (
                array.dtype, array.shape, array.tobytes()
            )  # fmt: skip


def test_others_of_dtypes_without_a_norm_are_kept(here, batch):
    x, odd = rows(2, 8), bytes(range(9))
    header = {
        "x": {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
        "odd": {"dtype": "X_NEW", "shape": [3], "data_offsets": [64, 73]},
    }
    text = json.dumps(header).encode()
    Path("f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + x.tobytes() + odd)
    batch("f.safetensors#x", "-o", "out", "--keep-others")
    data = Path("out/f.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    made = json.loads(data[8 : 8 + size])
    start, stop = made["odd"]["data_offsets"]
    assert (made["odd"]["dtype"], made["odd"]["shape"]) == ("X_NEW", [3])
    assert data[8 + size + start : 8 + size + stop] == odd
    start, stop = made["x"]["data_offsets"]
    y = np.frombuffer(data[8 + size + start : 8 + size + stop], "<f4").reshape(2, 8)
    np.testing.assert_array_equal(y, layer_norm(x).astype("f4"))


def test_globs_of_other_files(here, batch):
    """* means the tensor of an npy file too, and members of an npz archive."""
    (here / "in").mkdir()
    x = {"a": rows(2, 8), "b": rows(3, 8)}
    np.save("in/one.npy", x["a"])
    np.savez("in/two.npz", **x)
    save_file(x, "in/two.safetensors")
    batch("in#*", "-o", "out", "--name", "{name}.safetensors")
    for name in ("two.npz", "two.safetensors"):
        made = load_file(f"out/{name}.safetensors")
        assert {name: array.shape for name, array in made.items()} == {"a": (2, 8), "b": (3, 8)}
    failing = batch("in#b", "-o", "out2", "--name", "{name}.safetensors", failed=1)
    assert failing.having("failed") == {"in/one.npy#b"}
    assert batch("in/two.npz#*", "-o", "o3", "--keep-others", failed=1).summary["done"] == 0


BAD = {
    "empty.npy": b"",
    "magic.npy": b"\x93NUMPY",
    "text.npy": b"hello",
    "lfs.safetensors": b"version https://git-lfs.github.com/spec/v1\nsize 3\n",
    "pickle.npz": b"\x80\x04.",
    "huge.safetensors": b"\xff" * 16,
}


def bad_files(here):
    """in/ with bad files of many kinds among three good ones."""
    (here / "in").mkdir()
    for name, data in BAD.items():
        Path("in", name).write_bytes(data)
    good = rows(4, 8)
    for name in ("a", "m", "z"):
        np.save(f"in/{name}.npy", good)
    whole = Path("in/a.npy").read_bytes()
    Path("in/short.npy").write_bytes(whole[:-1])
    np.save("in/width.npy", rows(4, 7))
    np.save("in/zero.npy", rows(4, 0))
    np.save("in/scalar.npy", np.array(1.0))
    np.save("in/text2.npy", np.array(["a"]))
    np.save("in/object.npy", np.array([{}], object), allow_pickle=True)
    np.save("in/nan.npy", np.full((2, 8), np.nan))
    np.savez("in/several.npz", a=good, b=good)
    Path("in/gone.npy").symlink_to("nowhere")
    (here / "in/folder.npy").mkdir()
    np.save("gamma.npy", GAMMA)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_bad_files_among_good_ones(jobs, here, layernorm):
    bad_files(here)
    done = layernorm("batch", "in", "-o", "out", "--gamma", "gamma.npy", "--jobs", jobs)
    manifest = Manifest(done.out)
    assert done.code == 5
    assert manifest.having("done") == {"in/a.npy", "in/m.npy", "in/z.npy", "in/nan.npy"}
    assert len(manifest.having("failed")) == len(BAD) + 8
    assert "in/width.npy" not in outputs()
    assert names() == {"a.npy", "m.npy", "z.npy", "nan.npy"}
    for line in manifest.lines.values():
        if line["status"] == "failed":
            assert (line["rows"], line["bytes"]) == (0, 0)
            assert line["error"].startswith((line["input"], "gamma gamma.npy"))
            assert "Traceback" not in line["error"]
    assert "shape (7,)" in manifest.lines["in/width.npy"]["error"]
    warning, *error = done.err.splitlines()
    assert "in/nan.npy: 2 rows with NaN" in warning
    assert error[0].startswith(f"layernorm: {len(BAD) + 8} of {len(BAD) + 12} files failed")
    assert len(error) <= 3


def test_what_is_wrong_for_all_is_found_once(tree, main):
    np.save("g2.npy", np.ones((2, 8)))
    np.save("b7.npy", np.ones(7))
    save_file({"ln.weight": GAMMA}, "unknown.safetensors")
    for options, code, mention in [
        (["--gamma", "no.npy"], 3, "no.npy"),
        (["--params", "no.safetensors"], 3, "no.safetensors"),
        (["--params", "unknown.safetensors"], 2, "kind"),
        (["--gamma", "gamma.npy", "--beta", "b7.npy"], 2, "b7.npy"),
        (["--gamma-offset", "1"], 2, "--gamma-offset"),
        (["--gamma", "gamma.npy", "--gamma-offset", "2"], 2, "offset"),
        (["--eps", "nan"], 2, "eps"),
        (["--backend", "nosuch"], 2, "nosuch"),
        (["--dtype", "int8"], 2, "int8"),
        (["--shard", "3/2"], 2, "3/2"),
        (["--jobs", "0"], 2, "jobs"),
        (["--files-from", "nolist"], 3, "nolist"),
        (["--manifest", "x.npy"], 2, "x.npy"),
        (["--manifest", "gamma.npy/x"], 3, "gamma.npy/x"),
        (["--manifest", "nosuch/x"], 3, "nosuch/x"),
    ]:
        done = main("batch", "in", "-o", "out", *options)
        left = {name for name in done.created if not name.startswith(f"out/{FOLDER}")}
        assert (done.code, left) == (code, set()), (options, done.err)
        assert mention in done.err
        assert len(done.err.splitlines()) <= 3
    assert_refused(main("batch", "-o", "out"), 2, "no inputs")
    assert_refused(main("batch", "-", "-o", "out"), 2, "--files-from -")
    assert_refused(main("batch", "in"), 2, "--output-dir")
    assert_refused(main("batch", "in/a.npy#", "-o", "out"), 2, "in/a.npy#")


def test_collisions(tree, main, batch):
    (tree / "in/more").mkdir()
    np.save("in/more/a.npy", rows(2, 8))
    assert_refused(main("batch", "in/a.npy", "in/more/a.npy", "-o", "out"), 2, "out/a.npy", "{parent}")
    assert_refused(main("batch", "in", "in/more", "-o", "out"), 2, "out/a.npy")
    assert_refused(main("batch", "in/a.npy#x", "in/a.npy#y", "-o", "out"), 2, "out/a.npy")
    shutil.copy("in/sub/d.npz", "in/sub/d.safetensors")
    assert_refused(main("batch", "in", "-o", "out"), 2, "out/sub/d.safetensors")
    assert_refused(main("batch", "in", "-o", "out", "--shard", "1/9"), 2, "out/sub/d.safetensors")
    assert_refused(main("batch", "in/a.npy", "-o", "in", "--force"), 2, "in/a.npy", "an input itself")
    (tree / "link").symlink_to("in")
    assert_refused(main("batch", "in/a.npy", "-o", "link", "--force"), 2, "link/a.npy", "an input")
    batch("in/a.npy", "in/./a.npy", str(tree / "in/a.npy"), "-o", "once")
    assert names("once") == {"a.npy"}


def test_outputs_that_are_there(tree, main, batch):
    (tree / "out").mkdir()
    Path("out/a.npy").write_text("mine")
    refused = main("batch", "in", "-o", "out")
    assert_refused(refused, 2, "out/a.npy", "exists already", "--force")
    assert outputs() == {"a.npy": b"mine"}
    assert batch("in/a.npy", "-o", "out", "--resume").summary["done"] == 1  # not what a batch made
    Path("out/a.npy").write_text("mine")
    assert batch("in/a.npy", "-o", "out", "--force").summary["done"] == 1
    Path("out/a.npy").unlink()
    Path("out/a.npy").mkdir()
    assert_refused(main("batch", "in/a.npy", "-o", "out", "--force"), 3, "out/a.npy", "directory")
    assert_refused(main("batch", "in/b2.npy", "-o", "gamma.npy"), 3, "gamma.npy")


def test_output_dir_in_the_input_dir(tree, batch):
    first = batch("in", "-o", "in/out")
    second = batch("in", "-o", "in/out", "--resume")
    assert first.having("done") == second.having("skipped")
    batch("in", "-o", "in", "--name", "{stem}.ln{suffix}", "--exclude", "out")
    third = batch("in", "-o", "in", "--name", "{stem}.ln{suffix}", "--exclude", "out", "--resume")
    assert third.having("skipped") == first.having("done")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_dir_that_cannot_be_written(tree, main):
    (tree / "out").mkdir(mode=0o555)
    assert_refused(main("batch", "in", "-o", "out"), 3, "out", "permission denied")


def test_read_only_file_system(tree, main):
    refused = main("batch", "in", "-o", "/proc/self/nosuch")
    assert_refused(refused, 3, "/proc/self/nosuch")


def test_full_disk(here, layernorm):
    """The files that have room are whole, the others fail, and nothing else is left."""
    (here / "in").mkdir()
    np.save("in/big.npy", rows(200, 1000))
    np.save("in/small.npy", rows(4, 8))

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [COMMAND, "batch", "in", "-o", "out", "--jobs", "2"],
        preexec_fn=limit,
        capture_output=True,
        env=environment(),
        check=False,
    )
    manifest = Manifest(done.stdout.decode())
    assert (done.returncode, manifest.having("done")) == (5, {"in/small.npy"})
    assert "file too large" in manifest.lines["in/big.npy"]["error"]
    assert names() == {"small.npy"}


def test_fail_fast(here, main):
    bad_files(here)
    done = main("batch", "in", "-o", "out", "--gamma", "gamma.npy", "--jobs", "1", "--fail-fast")
    manifest = Manifest(done.out)
    assert done.code == 5
    assert list(manifest.lines) == ["in/a.npy", "in/empty.npy"]
    assert manifest.summary["files"] > 2
    assert names() == {"a.npy"}


def test_manifest_file_and_table(tree, main):
    Path("in/bad.npy").write_bytes(b"bad")
    done = main("batch", "in", "-o", "out", "--manifest", "m.jsonl")
    manifest = Manifest(Path("m.jsonl").read_text())
    assert (done.code, manifest.summary["done"]) == (5, 5)
    lines = done.out.splitlines()
    assert lines[0].startswith("out: 6 files in ")
    assert lines[1].split() == ["status", "files", "rows", "MB"]
    assert lines[2].split()[:3] == ["done", "5", str(manifest.summary["rows"])]
    assert lines[3].split()[:2] == ["failed", "1"]
    assert lines[4].startswith("failed: in/bad.npy: ")
    assert_refused_again = main("batch", "in", "-o", "out", "--manifest", "m.jsonl")
    assert assert_refused_again.code == 2
    assert "m.jsonl" in assert_refused_again.err
    again = main("batch", "in", "-o", "out", "--manifest", "m.jsonl", "--resume", "-q")
    assert (again.code, again.out) == (5, "")
    assert Manifest(Path("m.jsonl").read_text()).summary["skipped"] == 5
    both = main("batch", "in/a.npy", "-o", "out", "--manifest", "-", "--resume")
    assert Manifest(both.out).summary["skipped"] == 1


def test_table_in_a_terminal(tree, in_terminal):
    code, shown = in_terminal("batch", "in", "-o", "out", columns=60)
    assert code == 0
    assert "out: 5 files" in shown
    assert "│ done" in shown
    assert '"summary"' not in shown


def test_progress_bar(tree, in_terminal):
    code, shown = in_terminal("batch", "in", "-o", "out", "--progress", columns=100, NO_COLOR="1")
    assert code == 0
    assert "5/5 files" in shown


# Resuming


def test_resume_does_nothing_twice(tree, batch):
    first = batch("in", "-o", "out", "--gamma", "gamma.npy")
    made = outputs()
    times = {name: os.stat(f"out/{name}").st_mtime_ns for name in made}
    again = batch("in", "-o", "out", "--gamma", "gamma.npy", "--resume", "--jobs", "1")
    assert again.having("skipped") == first.having("done")
    for name, line in again.lines.items():
        for key in ("output", "rows", "bytes"):
            assert line[key] == first.lines[name][key]
    assert {name: os.stat(f"out/{name}").st_mtime_ns for name in made} == times


CHANGES = {
    "input touched": lambda: os.utime("in/a.npy", (1, 1)),
    "input rewritten": lambda: np.save("in/a.npy", rows(5, 8)),
    "output gone": lambda: os.unlink("out/a.npy"),
    "output touched": lambda: os.utime("out/a.npy"),
    "output cut": lambda: os.truncate("out/a.npy", 100),
    "output of another": lambda: shutil.copy("out/b2.npy", "out/a.npy"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_resume_after_a_change(change, tree, batch):
    batch("in", "-o", "out")
    CHANGES[change]()
    again = batch("in", "-o", "out", "--resume")
    assert again.having("done") == {"in/a.npy"}
    truth = layer_norm(np.load("in/a.npy")).astype("f4")
    np.testing.assert_array_equal(np.load("out/a.npy"), truth)
    assert batch("in", "-o", "out", "--resume").summary["skipped"] == 5


@pytest.mark.parametrize(
    "options",
    [
        ["--eps", "0.1"],
        ["--kind", "rms"],
        ["--gamma", "gamma.npy"],
        ["--beta", "gamma.npy"],
        ["--gamma", "gamma.npy", "--gamma-offset", "1"],
        ["--dtype", "float64"],
        ["--axis", "0"],
        ["--keep-others"],
        ["--assume-dtype", "float16"],
    ],
    ids=" ".join,
)
def test_resume_with_another_parameter(options, here, batch):
    save_file({"x": rows(3, 8)}, "x.safetensors")
    np.save("gamma.npy", GAMMA)
    batch("x.safetensors", "-o", "out")
    changed = batch("x.safetensors", "-o", "out", "--resume", *options)
    assert changed.summary["done"] == 1
    assert batch("x.safetensors", "-o", "out", "--resume", *options).summary["skipped"] == 1
    assert batch("x.safetensors", "-o", "out", "--resume").summary["done"] == 1


def test_resume_when_gamma_has_other_values(tree, batch):
    options = ["in", "-o", "out", "--gamma", "gamma.npy", "--resume"]
    batch(*options)
    np.save("gamma.npy", GAMMA + 1)
    assert batch(*options).summary["done"] == 5
    np.save("gamma.npy", (GAMMA + 1).astype("f8"))  # the same values
    assert batch(*options).summary["skipped"] == 5


def test_resume_with_the_speed_changed_only(tree, batch):
    batch("in", "-o", "out", "--backend", "numpy")
    again = batch("in", "-o", "out", "--resume", "--threads", "2", "--jobs", "1", "--shard", "1/1")
    assert again.summary["skipped"] == 5


def test_each_part_of_a_batch_takes_the_engine_of_all_of_it(tree, batch, monkeypatch):
    """Engines may differ in a bit: a shard and a run that goes on must take that of the whole run."""
    chosen = []

    def choose(name, elements):
        if elements:
            chosen.append(elements)
        return choose_engine(name, elements)

    monkeypatch.setattr("layernorm_cli.tasks.batch.choose_engine", choose)
    np.save("in/sub/e.npy", rows(50, 8))
    batch("in", "-o", "out")
    Path("out/a.npy").unlink()
    batch("in", "-o", "out", "--resume")
    batch("in", "-o", "elsewhere", "--shard", "2/3")
    assert len(chosen) == 3
    assert len(set(chosen)) == 1


def test_resume_of_another_tensor(here, batch):
    save_file({"x": rows(3, 8), "y": rows(3, 8)}, "f.safetensors")
    batch("f.safetensors#x", "-o", "out")
    assert batch("f.safetensors#y", "-o", "out", "--resume").summary["done"] == 1
    assert batch("f.safetensors#y", "-o", "out", "--resume").summary["skipped"] == 1


def test_resume_of_another_input_of_that_size_and_time(here, batch):
    for folder in ("one", "two"):
        (here / folder).mkdir()
        np.save(f"{folder}/x.npy", rows(3, 8))
        os.utime(f"{folder}/x.npy", (1, 1))
    batch("one/x.npy", "-o", "out")
    assert batch("two/x.npy", "-o", "out", "--resume").summary["done"] == 1
    np.testing.assert_array_equal(np.load("out/x.npy"), layer_norm(np.load("two/x.npy")).astype("f4"))


def test_checksums(tree, batch):
    batch("in", "-o", "out", "--checksum")
    os.utime("in/a.npy", (1, 1))
    (tree / "in").rename("moved")
    again = batch("moved", "-o", "out", "--resume", "--checksum")
    assert again.summary["skipped"] == 5
    x = np.load("moved/a.npy")
    stamp = os.stat("moved/a.npy")
    np.save("moved/a.npy", x + 1)
    os.utime("moved/a.npy", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    again = batch("moved", "-o", "out", "--resume", "--checksum")
    assert again.having("done") == {"moved/a.npy"}


def test_checksums_that_were_not_kept(tree, batch):
    batch("in/a.npy", "-o", "out")
    assert batch("in/a.npy", "-o", "out", "--resume", "--checksum").summary["done"] == 1
    assert batch("in/a.npy", "-o", "out", "--resume", "--checksum").summary["skipped"] == 1


def test_temporary_files_of_a_killed_run_go(tree, batch):
    batch("in", "-o", "out")
    left = ["out/.a.npy.01234567.tmp", "out/sub/.c.npy.89abcdef.tmp"]
    others = ["out/.other.npy.01234567.tmp", "out/.a.npy.tmp", "out/.a.npy.0123456.tmp"]
    for name in left + others:
        Path(name).write_bytes(b"part")
    batch("in", "-o", "out", "--resume")
    assert [name for name in left + others if os.path.exists(name)] == others


def test_an_output_that_was_whole_but_had_no_name_yet(tree, batch):
    batch("in", "-o", "out")
    made = outputs()
    (entry,) = [entry for entry in read_journals("out") if entry.output == "a.npy"]
    os.rename("out/a.npy", f"out/{entry.temporary}")
    again = batch("in", "-o", "out", "--resume")
    assert again.summary["skipped"] == 5
    assert outputs() == made


def test_a_journal_that_was_cut(tree, batch):
    batch("in", "-o", "out", "--jobs", "1")
    (journal,) = Path("out", FOLDER).iterdir()
    data = journal.read_bytes()
    journal.write_bytes(data[:-20])
    again = batch("in", "-o", "out", "--resume")
    assert again.having("done") == {"in/sub/d.npz"}
    assert batch("in", "-o", "out", "--resume").summary["skipped"] == 5


def slow_files(here, count=40):
    (here / "in").mkdir()
    for index in range(count):
        np.save(f"in/{index}.npy", rows(4000, 24))


def run_in_group(*arguments):
    return subprocess.Popen(
        [COMMAND, "batch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
        text=True,
    )


def test_killed_at_any_moment_and_resumed(here, batch):
    """SIGKILL to all processes; what is written in the end is what a run without that writes."""
    slow_files(here)
    batch("in", "-o", "whole", "--jobs", "1")
    truth = outputs("whole")
    chance = random.Random(0)
    kills, code = 0, None
    while code != 0:
        process = run_in_group("in", "-o", "out", "--resume", "--jobs", "2")
        process.stdout.readline()  # it has begun
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(chance.uniform(0, 0.03) if kills < 7 else TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        assert code in (None, 0), err
        kills += code is None
        for name, data in outputs().items():
            assert name.endswith(".tmp") or data == truth[name]
    assert kills > 2
    assert outputs() == truth
    made = [entry.output for entry in read_journals("out")]
    assert sorted(made) == sorted(truth), "made twice"
    assert batch("in", "-o", "out", "--resume").summary["skipped"] == len(truth)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("to_group", [True, False])
def test_signals(number, jobs, to_group, here):
    """The manifest stays as far as it is, nothing that is not whole is left, and no process."""
    (here / "in").mkdir()
    np.save("in/0.npy", rows(4, 8))
    for index in range(1, 4):
        sparse_npy(f"in/{index}.npy", (1 << 19, 256))
    process = run_in_group("in", "-o", "out", "--jobs", jobs, "--threads", "1")
    assert json.loads(process.stdout.readline())["input"] == "in/0.npy"
    wait_until(lambda: any(name.endswith(".tmp") for name in names()), "a file begun", process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out, err) == (128 + number, "", "")
    assert names() == {"0.npy"}
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def writes(pid, name):
    """Whether a process has a file open whose name begins so."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.path.basename(os.readlink(path)))
    return any(link.startswith(name) for link in links)


def test_a_worker_that_dies(here):
    """Its file fails, and its temporary file goes; another worker does the rest."""
    (here / "in").mkdir()
    sparse_npy("in/0.npy", (1 << 19, 256))
    for index in range(1, 30):
        np.save(f"in/{index}.npy", rows(4, 8))
    process = run_in_group("in", "-o", "out", "--jobs", "2", "--threads", "1")
    wait_until(
        lambda: any(name.startswith(".0.npy") for name in names()),
        "a file begun",
        process,
    )
    (writer,) = [child for child in children(process.pid) if writes(child, ".0.npy")]
    os.kill(writer, signal.SIGKILL)
    out, _ = process.communicate(timeout=TIMEOUT)
    manifest = Manifest(out)
    assert process.returncode == 5
    assert manifest.having("failed") == {"in/0.npy"}
    assert "a worker process died" in manifest.lines["in/0.npy"]["error"]
    assert names() == {f"{index}.npy" for index in range(1, 30)}


def test_all_workers_die(here):
    (here / "in").mkdir()
    for index in range(4):
        sparse_npy(f"in/{index}.npy", (1 << 19, 256))
    process = run_in_group("in", "-o", "out", "--jobs", "2", "--threads", "1")
    while process.poll() is None:
        for child in children(process.pid) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if any(name.endswith(".tmp") for name in names()):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    out, err = process.communicate()
    assert process.returncode in (3, 5), err
    assert "worker process died" in err + out


# Shards


def test_shards_cover_each_file_once(tree, batch):
    for count in (1, 2, 3, 7):
        folder = f"out{count}"
        done = [
            batch("in", "-o", folder, "--shard", f"{number}/{count}").having("done")
            for number in range(1, count + 1)
        ]
        assert sum(map(len, done)) == 5
        assert names(folder) == TREE
        assert batch("in", "-o", folder, "--resume").summary["skipped"] == 5
    assert batch("in", "-o", "second", "--shard", "2/3", "--jobs", "1").having("done") == {
        "in/b2.npy", "in/sub/d.npz"
    }  # fmt: skip


def test_shards_of_a_slurm_array(tree, batch, main):
    def task(number, first, last, step, count):
        values = {"ID": number, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
        return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}

    for first, step in ((0, 1), (1, 1), (10, 5)):
        ids = [first, first + step, first + 2 * step]
        for index, number in enumerate(ids, 1):
            environ = task(number, ids[0], ids[-1], step, 3)
            folder = f"o{first}-{number}"
            taken = batch("in", "-o", folder, "--shard", "slurm", **environ)
            assert taken.having("done") == batch(
                "in", "-o", f"{folder}i", "--shard", f"{index}/3"
            ).having("done")
    holes = task(3, 1, 7, 1, 3)
    assert_refused(main("batch", "in", "-o", "o", "--shard", "slurm", **holes), 2, "holes")
    batch("in", "-o", "all", **task(1, 1, 3, 1, 3))  # only when asked for
    assert names("all") == TREE


def test_shards_at_once(here):
    slow_files(here, 12)
    processes = [
        run_in_group("in", "-o", "out", "--shard", f"{number}/3", "--jobs", "1") for number in (1, 2, 3)
    ]
    manifests = [Manifest(process.communicate(timeout=TIMEOUT)[0]) for process in processes]
    inputs = itertools.chain.from_iterable(manifest.having("done") for manifest in manifests)
    assert sorted(inputs) == sorted(f"in/{index}.npy" for index in range(12))
    assert names() == {f"{index}.npy" for index in range(12)}


# Pipes


def test_find_and_xargs(tree, shell):
    done = shell(
        "find in -name '*.npy' -print0 | $LAYERNORM batch -0 --files-from - --output-dir out"
        " && (cd in && find . -name '*.npy' -print0 |"
        "     xargs -0 -P 2 -I{} sh -c '$LAYERNORM batch \"{}\" --base . -o ../each -q')"
    )
    assert done.code == 0, done.err
    assert {f"in/{name}": data for name, data in outputs("each").items()} == outputs()
    assert batch_entries("each") == {"a.npy", "b2.npy", "b10.npy", "sub/c.npy"}


def batch_entries(folder):
    return {entry.output for entry in read_journals(folder)}


def test_closed_pipe(tree, shell):
    done = shell("$LAYERNORM batch in --output-dir out | head -n 1; echo ${PIPESTATUS[0]}")
    assert done.out.splitlines()[-1] == "0"
    assert done.err == ""
    assert not any(name.endswith(".tmp") for name in names())


MEASURE = """
import re, resource, sys
from layernorm_cli.cli.main import main
try:
    main()
finally:  # ru_maxrss of the process itself would be that of what started it, if larger
    own = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]
    print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep="\\n", file=sys.stderr)
"""


def largest_process(layernorm, *arguments):
    """Megabytes of the largest process of a batch, and its manifest."""
    done = layernorm("batch", *arguments, command=(sys.executable, "-c", MEASURE))
    return max(int(line) for line in done.err.splitlines() if line.isdigit()) / 1024, Manifest(done.out)


def test_memory_does_not_depend_on_the_files(here, layernorm):
    (here / "in").mkdir()
    for index in range(2):
        sparse_npy(f"in/{index}.npy", (1 << 17, 256))  # 128 MB
    most, manifest = largest_process(layernorm, "in", "-o", "out", "--jobs", "2")
    assert manifest.summary["done"] == 2
    assert most < 150


@pytest.mark.slow
def test_memory_of_many_inputs(here, layernorm):
    listed = "".join(f"nowhere/a/rather/long/name/of/a/folder/{index}.npy\n" for index in range(100_000))
    Path("list").write_text(listed)
    np.save("gamma.npy", GAMMA)
    most, manifest = largest_process(layernorm, "--files-from", "list", "-o", "out", "--jobs", "2")
    assert manifest.summary["failed"] == 100_000
    assert most < 150


def test_a_scheduler_is_for_dask(main, here):
    np.save("x.npy", np.ones((3, 4)))
    run = main("batch", "x.npy", "-o", "out", "--scheduler", "tcp://127.0.0.1:1")
    assert_refused(run, 2, "--scheduler", "--engine dask")


def test_without_dask_the_message_says_how_to_install_it(main, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    np.save("x.npy", np.ones((3, 4)))
    run = main("batch", "x.npy", "-o", "out", "--engine", "dask")
    assert_refused(run._replace(created=set()), 4, "pip install 'layernorm[dask]'")
