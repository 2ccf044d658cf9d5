"""layernorm verify: the answer and its exit code, files of all kinds, sites of a checkpoint, reports."""

import csv
import io
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from conftest import COMMAND, DATA, assert_refused, environment
from safetensors.numpy import load_file, save_file

from layernorm_cli import layer_norm

NORMS = str(DATA / "gpt2" / "norms.safetensors")
ACTS = str(DATA / "gpt2" / "activations.safetensors")
KEYS = {  # of the design
    *("match", "eps", "kind", "max_abs_error", "max_ulp_error", "exact_fraction", "best"),
    *("variants", "inferred_eps"),
}
rng = np.random.default_rng(0)


def save(name, array):
    np.save(name, array)
    return array


@pytest.fixture
def files(here):
    """x, gamma, beta, their norm right.npy, and wrong.npy with the unbiased variance."""
    x = save("x.npy", rng.standard_normal((4, 5, 8)).astype("f4"))
    gamma = save("gamma.npy", (1 + 0.3 * rng.standard_normal(8)).astype("f4"))
    beta = save("beta.npy", rng.standard_normal(8).astype("f4"))
    save("right.npy", layer_norm(x, gamma, beta).astype("f4"))
    wide = x.astype("f8")
    std = np.sqrt(wide.var(-1, ddof=1, keepdims=True) + 1e-5)
    save("wrong.npy", ((wide - wide.mean(-1, keepdims=True)) / std * gamma + beta).astype("f4"))
    return x, gamma, beta


AFFINE = ("--gamma", "gamma.npy", "--beta", "beta.npy")


def test_installed_command(files, layernorm):
    done = layernorm("verify", "x.npy", "right.npy", *AFFINE)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("yes: Y is the layer norm of X with eps 1e-05\n")
    done = layernorm("verify", "x.npy", "wrong.npy", *AFFINE)
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[0] == "no: Y is the layer norm of X but for this: unbiased variance (d - 1)"
    assert any(line.startswith("out of tolerance: 160 elements in 20 of 20 rows") for line in lines)
    assert any(line.startswith("worst rows     (") for line in lines)
    assert any(line.startswith("worst features ") for line in lines)
    ranked = [line.split("  ")[0] for line in lines[lines.index(next(filter(is_header, lines))) :]]
    assert ranked[1:3] == ["the norm as stated", "unbiased variance (d - 1)"]


def is_header(line):
    return line.startswith("Y compared with")


def test_json(files, main):
    x, gamma, beta = files
    done = main("verify", "x.npy", "wrong.npy", *AFFINE, "--format", "json")
    found = done.json
    assert done.code == 1
    assert set(found) >= KEYS
    assert (found["match"], found["best"]) == (False, "unbiased variance (d - 1)")
    assert found["variants"][0] == {
        "variant": found["best"],
        "eps": 1e-5,
        "explains": True,
        "max_abs_error": pytest.approx(0, abs=1e-6),
    }
    assert found["max_abs_error"] == np.abs(np.load("wrong.npy") - layer_norm(x, gamma, beta)).max()
    assert (found["input"], found["output"], found["gamma"]) == ("x.npy", "wrong.npy", "gamma.npy")
    assert (found["shape"], found["dtype"], found["wrong_rows"]) == ([4, 5, 8], "float32", 20)
    assert len(found["worst_rows"][0]["row"]) == 2
    assert found["inferred_eps"] == pytest.approx(1e-5, rel=0.3) or found["inferred_eps"] is None
    right = main("verify", "x.npy", "right.npy", *AFFINE, "--format", "json").json
    assert (right["match"], right["best"], right["variants"]) == (True, None, [])
    assert (right["max_ulp_error"], right["exact_fraction"]) == (0, 1)


def test_other_forms(files, main):
    arguments = ("verify", "x.npy", "wrong.npy", *AFFINE, "--format")
    (line,) = main(*arguments, "jsonl").out.splitlines()
    assert json.loads(line) == main(*arguments, "json").json
    rows = list(csv.DictReader(io.StringIO(main(*arguments, "csv").out)))
    assert [row["variant"] for row in rows[:2]] == ["as stated", "unbiased variance (d - 1)"]
    assert [row["explains"] for row in rows[:2]] == ["False", "True"]
    assert "\n| unbiased variance (d - 1) |" in main(*arguments, "markdown").out
    done = main(*arguments, "table", "--quiet")
    assert (done.code, done.stdout, done.stderr) == (1, b"", b"")


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_apply_wrote_is_right(kind, dtype, here, main):
    x = (3 + rng.standard_normal((30, 24))).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    save_file({"x": x, "r": x[::-1].copy(), "g": x[0], "b": x[1]}, "x.safetensors")
    options = ("--gamma", "x.safetensors#g", "--beta", "x.safetensors#b", "--kind", kind)
    options += ("--residual", "x.safetensors#r", "--gamma-offset", "1", "--eps", "1e-3")
    made = main("apply", "x.safetensors#x", *options, "-o", "y.safetensors", "--quiet")
    assert made.code == 0, made.err
    assert main("verify", "x.safetensors#x", "y.safetensors", *options).code == 0
    assert main("verify", "x.safetensors#x", "x.safetensors#x", *options).code == 1


def test_residual_and_offset(files, main):
    x, gamma, beta = files
    residual = save("r.npy", rng.standard_normal(x.shape).astype("f4"))
    save("y.npy", layer_norm(x, gamma, beta).astype("f4") + residual)
    arguments = ("verify", "x.npy", "y.npy", *AFFINE, "--residual", "r.npy", "--format", "json")
    assert main(*arguments).json["best"] == "residual added after the norm, not before it"
    save("y.npy", layer_norm(x, gamma, beta).astype("f4"))
    assert main(*arguments).json["best"] == "residual left out"
    arguments = ("verify", "x.npy", "y.npy", *AFFINE, "--gamma-offset", "1", "--format", "json")
    assert main(*arguments).json["best"] == "the offset of gamma forgotten"


def test_axis(here, main):
    x = save("x.npy", rng.standard_normal((3, 4, 5)))
    save("y.npy", layer_norm(x, axis=-2))
    assert main("verify", "x.npy", "y.npy", "--axis", "-2").code == 0
    assert main("verify", "x.npy", "y.npy").code == 1


def test_ties_are_told(here, main):
    x = save("x.npy", rng.standard_normal((9, 8)).astype("f4"))
    save("y.npy", layer_norm(x, eps=0).astype("f4"))
    lines = main("verify", "x.npy", "y.npy").out.splitlines()
    assert lines[0] == "no: Y is the layer norm of X but for this: eps missing"
    assert lines[1].startswith("these rows do not tell it apart from: eps 1e-12 instead of 1e-05")


def test_tolerances(files, main):
    save("y.npy", np.load("right.npy") + np.float32(1e-4))
    arguments = ("verify", "x.npy", "y.npy", *AFFINE)
    assert main(*arguments).code == 1
    assert main(*arguments, "--atol", "2e-4").code == 0
    assert main(*arguments, "--rtol", "1e-6", "--atol", "1e-6").code == 1
    assert main(*arguments, LAYERNORM_ATOL="2e-4").code == 0


def test_pipes(files, shell):
    for line in (
        "$LAYERNORM verify - wrong.npy --gamma gamma.npy --beta beta.npy < <(cat x.npy)",
        "cat wrong.npy | $LAYERNORM verify x.npy - --gamma gamma.npy --beta beta.npy",
        "$LAYERNORM verify x.npy wrong.npy --gamma gamma.npy --beta - < <(cat beta.npy)",
    ):
        done = shell(line)
        assert done.code == 1, done.err
        assert done.err == ""
        assert "but for this: unbiased variance (d - 1)" in done.out
    done = shell("$LAYERNORM apply x.npy -o - | $LAYERNORM verify x.npy -")
    assert (done.code, done.err) == (0, "")


def test_orders_and_dtypes_of_files(here, main):
    x = rng.standard_normal((50, 16))
    cases = {
        "fortran": (np.asfortranarray(x), np.asfortranarray(layer_norm(x))),
        "integers": ((9 * x).astype("i2"), layer_norm((9 * x).astype("i2"))),
        "swapped": (x.astype(">f4"), layer_norm(x.astype("f4")).astype(">f4")),
        "half": (x.astype("f2"), layer_norm(x.astype("f2")).astype("f2")),
        "finer": (x.astype("f4"), layer_norm(x.astype("f4"))),
    }
    for name, (before, after) in cases.items():
        save("x.npy", before)
        save("y.npy", after)
        assert main("verify", "x.npy", "y.npy").code == 0, name
        save("y.npy", (after * 1.01).astype(after.dtype))
        assert main("verify", "x.npy", "y.npy").code == 1, name
    eight = x.astype(ml_dtypes.float8_e4m3fn)
    save_file({"x": eight, "y": layer_norm(eight).astype(ml_dtypes.bfloat16)}, "8.safetensors")
    assert main("verify", "8.safetensors#x", "8.safetensors#y").code == 0
    short = x.astype(ml_dtypes.bfloat16)
    save("x.npy", short.view("V2"))
    save("y.npy", layer_norm(short).astype(ml_dtypes.bfloat16).view("V2"))
    assert_refused(main("verify", "x.npy", "y.npy"), 3, "--assume-dtype")
    assert main("verify", "x.npy", "y.npy", "--assume-dtype", "bfloat16").code == 0


def test_nan_rows(files, main):
    x = files[0].copy()
    x[1, 2, 3] = np.nan
    save("x.npy", x)
    save("y.npy", layer_norm(x, *files[1:]).astype("f4"))
    done = main("verify", "x.npy", "y.npy", *AFFINE)
    assert (done.code, "rows with NaN or inf: 1" in done.out) == (0, True)
    save("y.npy", np.nan_to_num(np.load("y.npy")))
    found = main("verify", "x.npy", "y.npy", *AFFINE, "--format", "json")
    assert found.code == 1
    assert found.json["worst_rows"][0] == {"row": [1, 2], "max_abs_error": "Infinity"}
    assert main("verify", "x.npy", "y.npy", *AFFINE).out.startswith("no: 1 of 20 rows of Y is not")


def test_no_rows(here, main):
    save("x.npy", np.empty((0, 4)))
    assert main("verify", "x.npy", "x.npy").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "mentions"),
    [
        (["x.npy"], 2, ["Y", "--params"]),
        (["x.npy", "gamma.npy"], 2, ["Y gamma.npy", "(8,)", "(4, 5, 8)"]),
        (["x.npy", "right.npy", "--residual", "gamma.npy"], 2, ["residual", "(8,)"]),
        (["x.npy", "right.npy", "--gamma", "x.npy"], 2, ["gamma x.npy"]),
        (["x.npy", "missing.npy"], 3, ["missing.npy"]),
        (["-", "-"], 2, ["given twice"]),
        (["x.npy", "right.npy", "--rtol", "nan"], 2, ["--rtol", "nan"]),
        (["x.npy", "right.npy", "--atol", "-1"], 2, ["--atol", "-1"]),
        (["x.npy", "right.npy", "--eps", "inf"], 2, ["inf"]),
        (["x.npy", "right.npy", "--site", "ln_f"], 2, ["--params"]),
        ([ACTS, "--params", NORMS, "--site", "ln_f"], 2, ["--site"]),
        ([ACTS, "--params", NORMS, "--residual", "x.npy"], 2, ["--residual"]),
        ([ACTS, "--params", NORMS, "--input", "in"], 2, ["--input in", "{site}"]),
        ([ACTS, "--params", NORMS, "--output", "{site}{site}"], 2, ["--output", "2 times"]),
        ([ACTS, "--params", NORMS, "--output", "{site}.nosuch"], 3, ["no site", "h.0.ln_1.input"]),
    ],
)
def test_refused(arguments, code, mentions, files, main):
    assert_refused(main("verify", *arguments), code, *mentions)


def test_all_sites(here, layernorm):
    patterns = ("--input", "{site}.input", "--output", "{site}.output")
    done = layernorm("verify", "--params", NORMS, ACTS, *patterns)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "yes: the outputs of all 25 sites are the norms of their inputs"
    assert sum(line.startswith("transformer.") and "  yes  " in line for line in lines) == 25


def test_some_sites_are_wrong(here, main):
    acts = load_file(ACTS)
    norms = load_file(NORMS)
    acts["h.3.ln_2.output"] = acts["h.3.ln_2.output"] - norms["transformer.h.3.ln_2.bias"]
    acts["ln_f.output"] = acts["ln_f.output"] * np.float32(1.01)
    del acts["h.5.ln_1.output"]
    save_file(acts, "acts.safetensors")
    arguments = ("verify", "acts.safetensors", "--params", NORMS, "--format")
    done = main(*arguments, "json")
    assert done.code == 1
    assert "no input or no output of 1 site: transformer.h.5.ln_1" in done.err
    sites = {site["site"]: site for site in done.json["sites"]}
    assert (len(sites), done.json["match"]) == (24, False)
    assert {name: site["best"] for name, site in sites.items() if not site["match"]} == {
        "transformer.h.3.ln_2": "beta left out",
        "transformer.ln_f": None,
    }
    assert [json.loads(line) for line in main(*arguments, "jsonl").out.splitlines()] == done.json[
        "sites"
    ]
    rows = list(csv.DictReader(io.StringIO(main(*arguments, "csv").out)))
    assert [row["site"] for row in rows if row["match"] == "False"] == [
        "transformer.h.3.ln_2",
        "transformer.ln_f",
    ]
    table = main(*arguments, "table").out
    assert table.startswith("no: the outputs of 2 of 24 sites are not the norms of their inputs\n")
    assert "no known mistake" in table
    assert "| transformer.h.3.ln\\_2 |" in main(*arguments, "markdown").out


def test_one_site(here, main):
    x, y = (f"{ACTS}#h.3.ln_2.{name}" for name in ("input", "output"))
    arguments = ("verify", x, y, "--params", NORMS, "--site", "h.3.ln_2", "--format", "json")
    found = main(*arguments).json
    assert (found["match"], found["eps_source"]) == (True, "config.json: layer_norm_epsilon")
    assert found["inferred_eps"] == pytest.approx(1e-5, rel=0.05)
    done = main(*arguments, "--eps", "1e-12")
    assert (done.code, done.json["best"]) == (1, "eps 1e-05 instead of 1e-12")


def test_in_a_narrow_terminal(files, in_terminal):
    code, shown = in_terminal("verify", "x.npy", "wrong.npy", *AFFINE, columns=60, NO_COLOR="1")
    assert code == 1
    assert "unbiased variance (d - 1)" in shown
    assert "\x1b[3" not in shown


def test_memory_does_not_depend_on_the_size(here):
    peaks = []
    for name, rows in (("small", 2_000), ("large", 40_000)):
        save(f"{name}.npy", np.random.default_rng(0).standard_normal((rows, 256)).astype("f4"))
        script = (
            "import resource, subprocess, sys\n"
            "code = subprocess.run(sys.argv[1:]).returncode\n"
            "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        command = [COMMAND, "verify", f"{name}.npy", f"{name}.npy", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-c", script, *command],
            capture_output=True,
            env=environment(),
            check=True,
        )
        code, peak = map(int, done.stdout.split())
        assert code == 1
        peaks.append(peak * (1 if sys.platform == "darwin" else 1024) / 1e6)
    assert peaks[1] < peaks[0] + 15
    assert peaks[1] < 120
