"""The cases that public bug reports were made of.

Each goes through the installed command. Where a test has many parameters the first does, and the others
through the same main() in this process, which is thirty times faster.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import (
    COMMAND,
    DATA,
    TIMEOUT,
    assert_refused,
    environment,
    files_in,
    group_has_ended,
    load,
    sparse_npy,
    wait_until,
)

from layernorm_cli import layer_norm, open_tensor

CASES = DATA / "cases"
VALUES = ("A01", "A03", "A04", "A10", "A15", "B01", "B09", "C10")
ERRORS = ("A13", "B03", "B05", "C01")

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes on Linux only")


def expectation(case):
    return json.loads((CASES / case / "expected.json").read_text())


def numbers(values):
    return np.array(values, dtype=np.float64)


@pytest.fixture
def enter(here):
    """Copies a case's files into the current folder; returns what expected.json says."""

    def copy(case):
        shutil.copytree(CASES / case, here, dirs_exist_ok=True)
        (here / "expected.json").unlink()
        return expectation(case)

    return copy


@pytest.fixture
def program(request, layernorm, main):
    """The installed command for a test's first parameters, main() in this process for the others."""
    parameters = getattr(request.node, "callspec", None)
    return main if parameters is not None and any(parameters.indices.values()) else layernorm


@pytest.fixture
def forward(program):
    """Applies, and returns y and the report."""

    def run(x, *options, out="y.npy", warnings=0, program=program):
        done = program("apply", x, *options, "-o", out, "--format", "json", "--rows", "all")
        assert done.code == 0, done.err
        assert done.err.count("\n") == warnings, done.err
        assert done.created == {out}
        return load(out), done.json

    return run


def before(report, statistic):
    return numbers([row[f"{statistic}_before"] for row in report["table"]])


def test_every_case_is_covered_once():
    explicit = [name[5:8].upper() for name in globals() if re.match(r"test_[a-e]\d\d_", name)]
    assert sorted({*explicit, *VALUES, *ERRORS}) == sorted(os.listdir(CASES))
    assert not set(VALUES) & set(ERRORS)


@pytest.mark.parametrize("case", VALUES)
def test_values(case, enter, forward, layernorm):
    expected = enter(case)
    run, expect = expected["run"][0], expected["expect"]
    truth = np.load(expect["y"]["npy"]) if isinstance(expect["y"], dict) else numbers(expect["y"])
    eps, out = str(run["eps"]), run.get("out", "y.npy")
    y, report = forward(run["x"], "--eps", eps, out=out, program=layernorm)
    assert list(y.shape) == expect["out_shape"] == report["shape"]
    assert y.dtype == {"F32": "float32"}.get(expect["out_dtype"], expect["out_dtype"])
    np.testing.assert_allclose(y, truth, expect["rtol"], expect["atol"])
    np.testing.assert_allclose(before(report, "mean"), expect["stats_mean"], expect["rtol"], 0)
    np.testing.assert_allclose(before(report, "var"), expect["stats_var"], expect["rtol"], 0)
    assert report["rows"] == len(expect["stats_mean"])


ERROR_RUNS = [(case, run) for case in ERRORS for run in expectation(case)["run"]]


@pytest.mark.parametrize(
    ("case", "run"), ERROR_RUNS, ids=[f"{case}-{run.get('gamma', run['x'])}" for case, run in ERROR_RUNS]
)
def test_errors(case, run, enter, layernorm, main):
    expected = enter(case)
    expect = expected["expect"]
    program = layernorm if run == expected["run"][0] else main
    gamma = ("--gamma", run["gamma"]) if "gamma" in run else ()
    done = program("apply", run["x"], *gamma, "-o", "y.npy", "--format", "json", "--rows", "all")
    names = [run["x"] if name == "x.npy" else name for name in expect["stderr_should_mention"]]
    assert_refused(done, 2 if gamma else 3, *names)
    assert not any(os.path.exists(name) for name in expect.get("must_not_exist", ()))


def test_a01_equal_rows_and_exact_variances(enter, forward):
    enter("A01")
    y, report = forward("x.npy")
    assert (y == y[0]).all()
    assert set(before(report, "var")) == {1.328125}


def test_a03_table_shows_the_variances(enter, layernorm):
    enter("A03")
    lines = layernorm("apply", "x.npy").out.splitlines()
    shown = [line.split()[2] for line in lines if re.match(r" *\d", line)]
    assert shown == ["90000", "3.6e+09", "4.29077e+09", "16384"]


def test_a07_degenerate_shapes(enter, forward, main):
    expect = enter("A07")["expect"]
    y, report = forward("d1.npy", "--beta", "beta1.npy")
    np.testing.assert_array_equal(y, expect["d1"]["y"])
    np.testing.assert_array_equal(before(report, "var"), expect["d1"]["var"])
    for name in ("rows0", "nd0"):
        y, report = forward(f"{name}.npy", out=f"y_{name}.npy", program=main)
        assert list(y.shape) == report["shape"] == expect[name]["shape"]
        assert report["rows"] == len(report["table"]) == expect[name]["stats_rows"]
        assert report["summary"]["mean_before"] == {"min": None, "max": None}
    done = main("apply", "cols0.npy", "-o", "y_cols0.npy", "--format", "json")
    assert_refused(done, 3, "cols0.npy", "(3, 0)", "zero width")


def test_a07_rstd(enter, main):
    expect = enter("A07")["expect"]
    assert main("apply", "d1.npy", "--quiet", "--save-stats", "s.csv").code == 0
    rstd = np.genfromtxt("s.csv", delimiter=",", names=True)["rstd"]
    np.testing.assert_allclose(rstd, expect["d1"]["rstd"], 1e-15)


@pytest.mark.parametrize("name", ["i32", "u8", "f64"])
def test_a11_integers_and_float64(name, enter, forward):
    expect = enter("A11")["expect"]
    truth = expect["files"][name]
    y, report = forward(f"{name}.npy", "--eps", "1e-05")
    assert y.dtype == report["output_dtype"] == "float64"
    np.testing.assert_allclose(y, truth["y"], expect["rtol_f64"], 1e-15)
    np.testing.assert_allclose(before(report, "mean"), truth["mean"], 1e-15)
    np.testing.assert_allclose(before(report, "var"), truth["var"], 1e-15)


def test_a15_indices_and_one_dimension(enter, forward, main):
    enter("A15")
    y, report = forward("x.npy")
    assert [row["row"] for row in report["table"]] == [[i, j] for i in range(2) for j in range(3)]
    v, report = forward("v.npy", out="v_y.npy", program=main)
    np.testing.assert_array_equal(v, y[1, 2])
    assert [row["row"] for row in report["table"]] == [[]]
    assert report["rows"] == 1


def test_b01_fortran_order_in_three_dimensions(enter, forward, main):
    expect = enter("B01")["expect"]
    y, _ = forward("x3.npy")
    np.testing.assert_allclose(y, expect["y_x3"], expect["rtol"], expect["atol"])
    forward("x.npy", out="y_F.npy", program=main)
    forward("x_C.npy", out="y_C.npy", program=main)
    with open("y_F.npy", "rb") as ours, open("y_C.npy", "rb") as theirs:
        assert ours.read() == theirs.read()


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("bf16_V2", "bfloat16"),
        ("bf16_pipeV2", "bfloat16"),
        ("e5m2_f1", "float8_e5m2"),
        ("e4m3_V1", "float8_e4m3fn"),
    ],
)
def test_b08_raw_elements(name, likely, enter, program, forward):
    expect = enter("B08")["expect"]
    done = program("apply", f"{name}.npy", "-o", "y.npy")
    assert_refused(done, 3, f"{name}.npy", f"--assume-dtype {likely}")
    y, report = forward(f"{name}.npy", "--assume-dtype", likely, "--dtype", "float32")
    assert report["dtype"] == likely
    assert np.isfinite(y).all()
    if likely == "bfloat16":
        np.testing.assert_allclose(y, expect["y_with_flag"], expect["rtol"], 1e-7)
        np.testing.assert_allclose(before(report, "mean"), expect["stats_mean"], expect["rtol"])
        np.testing.assert_allclose(before(report, "var"), expect["stats_var"], expect["rtol"])


@pytest.mark.parametrize(
    "line",
    [
        "cat x.npy | $LAYERNORM apply - -o y.npy --quiet",
        "$LAYERNORM apply - -o y.npy --quiet < x.npy",
        "$LAYERNORM apply /dev/stdin -o y.npy --quiet < x.npy",
        "cat x.npy | $LAYERNORM apply /dev/stdin -o y.npy --quiet",
        "$LAYERNORM apply <(cat x.npy) -o y.npy --quiet",
        "$LAYERNORM apply x.npy -o - > y.npy",
        "cat x.npy | $LAYERNORM apply - -o - --format json | cat > y.npy",
    ],
)
def test_b09_pipes(line, enter, shell, main):
    expect = enter("B09")["expect"]
    done = shell(line)
    assert (done.code, done.out, done.err, done.created) == (0, "", "", {"y.npy"})
    np.testing.assert_allclose(np.load("y.npy"), expect["y"], expect["rtol"], expect["atol"])
    main("apply", "x.npy", "-o", "file.npy")
    with open("y.npy", "rb") as piped, open("file.npy", "rb") as filed:
        assert piped.read() == filed.read()


def test_b09_empty_standard_input(shell):
    done = shell("printf '' | $LAYERNORM apply - -o y.npy")
    assert_refused(done, 3, "-: ", "empty")


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("struct", ["structured", "a, b"]),
        ("strings", ["<U3", "strings"]),
        ("complex", ["complex64"]),
        ("zerod", ["0-d"]),
        ("dates", ["<M8[D]", "dates"]),
        ("text", ["text", ".safetensors"]),
    ],
)
def test_b11_not_numbers(name, mentions, enter, program):
    enter("B11")
    done = program("apply", f"{name}.npy", "-o", "y.npy", "--format", "json")
    assert_refused(done, 3, f"{name}.npy", "expected: ", *mentions)
    assert "allow_pickle" not in done.err


@pytest.mark.parametrize("name", ["archive.npz", "archive_renamed.npy", "bool.npy"])
def test_b11_numbers_all_the_same(name, enter, forward):
    enter("B11")
    y, report = forward(name)
    with np.load("archive.npz") as archive:
        x = np.load(name) if name == "bool.npy" else archive["x"]
    np.testing.assert_array_equal(y, layer_norm(x).astype(y.dtype))
    assert y.dtype == ("float64" if name == "bool.npy" else x.dtype)
    assert report["tensor"] == (None if name == "bool.npy" else "x")


def test_c03_float8_values(enter):
    expect = enter("C03")["expect"]
    for name in ("e4m3", "e5m2"):
        with open_tensor(f"fp8.safetensors#{name}") as tensor:
            values = tensor.read().astype(np.float64)
        np.testing.assert_array_equal(values.reshape(-1), numbers(expect[f"{name}_decoded"]))


def test_c03_float8_rows(enter, forward, main):
    expect = enter("C03")["expect"]["fp8_finite"]
    y, report = forward("fp8_finite.safetensors#x", out="y.safetensors")
    assert y.dtype == report["output_dtype"] == "bfloat16"
    np.testing.assert_allclose(y.astype("f8"), expect["y"], 2.0**-8)
    np.testing.assert_array_equal(before(report, "mean"), expect["mean"])
    np.testing.assert_array_equal(before(report, "var"), expect["var"])
    done = main("apply", "fp8_finite.safetensors", "-o", "y.npy")
    assert_refused(done, 2, "y.npy", "bfloat16", ".safetensors", "--dtype float32")


@pytest.mark.parametrize(
    ("name", "warnings"),
    [("meta_empty", 0), ("meta_unicode", 0), ("meta_int", 1), ("meta_nested", 1), ("meta_null", 1)],
)
def test_c06_odd_metadata(name, warnings, enter, main, forward):
    enter("C06")
    y, report = forward(f"{name}.safetensors#ln.weight", warnings=warnings)
    assert report["tensor"] == "ln.weight"
    assert np.isfinite(y).all()
    done = main("apply", f"{name}.safetensors", "-o", "z.npy")
    assert_refused(done, 3, f"{name}.safetensors", "2 tensors", "ln.weight, ln.bias")
    assert "__metadata__" not in done.err


def test_c06_metadata_only(enter, main):
    enter("C06")
    done = main("apply", "meta_only.safetensors", "-o", "y.npy")
    assert_refused(done, 3, "meta_only.safetensors", "no tensors")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cut", ["27", "32"]),
        ("cuthdr", ["30", "136"]),
        ("short", ["5", "8"]),
        ("empty", ["empty"]),
        ("hugelen", [str(2**62), "10"]),
        ("zerolen", ["0", "8"]),
        ("zeros", ["0", "64"]),
    ],
)
def test_c08_truncated(name, sizes, enter, program):
    enter("C08")
    done = program("apply", f"{name}.safetensors", "-o", "y.npy")
    assert_refused(done, 3, f"{name}.safetensors")
    assert re.search("truncated|incomplete", done.err)
    assert set(sizes) <= set(re.findall(r"\w+", done.err))


@pytest.mark.parametrize("eps", ["1e-12", "1e-06", "1e-05", "0.001"])
def test_d07_eps_decides(eps, enter, forward):
    expect = enter("D07")["expect"]
    y, report = forward("x.npy", "--eps", eps)
    assert abs(y[0, 0]) == pytest.approx(expect["row0_first"][eps], rel=1e-6)
    assert (report["eps"], report["eps_source"]) == (float(eps), "--eps")


@pytest.mark.parametrize(
    ("form", "reader"),
    [
        ("table", "head -n 2"),
        ("json", "head -c 10"),
        ("csv", "head -n 2"),
    ],
)
def test_e01_broken_pipe(form, reader, enter, shell):
    enter("E01")
    done = shell(f"$LAYERNORM apply x.npy --rows all --format {form} | {reader}")
    assert (done.code, done.err) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("rest", ["--rows all", "-o -"])
def test_e01_closed_stdout(rest, enter, shell):
    enter("E01")
    done = shell(f"$LAYERNORM apply x.npy {rest} >&-")
    assert (done.code, done.err, done.created) == (0, "", set())


def test_e01_broken_pipe_of_numbers(enter, shell):
    enter("E01")
    done = shell("$LAYERNORM apply x.npy -o - | head -c 6")
    assert (done.code, done.stdout, done.err) == (0, b"\x93NUMPY", "")


WORKERS = ("--threads", "2", "--backend", "numpy")


def temporary_files(folder):
    return [name for name in files_in(folder) if name.endswith(".tmp")]


def start(*arguments, **options):
    return subprocess.Popen(
        [COMMAND, "apply", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("existing", [True, False])
def test_e04_interrupted_pipe(number, existing, enter, here):
    enter("E04")
    old = (here / "old.npy").read_bytes()
    if existing:
        (here / "y.npy").write_bytes(old)
    np.save("x.npy", np.ones((4000, 64), "<f4"))
    files = files_in(here)
    with start("-", "-o", "y.npy", "--force", stdin=subprocess.PIPE) as process:
        process.stdin.write((here / "x.npy").read_bytes()[:600_000])
        process.stdin.flush()
        wait_until(lambda: temporary_files(here), "the output's beginning", process)
        process.send_signal(number)
        code = process.wait(TIMEOUT)
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")
    assert code == 128 + number
    assert files_in(here) == files
    assert not existing or (here / "y.npy").read_bytes() == old


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_e04_interrupted_workers(number, kill, enter, here):
    enter("E04")
    old = (here / "old.npy").read_bytes()
    (here / "y.npy").write_bytes(old)
    sparse_npy("x.npy", (1 << 18, 1024))
    files = files_in(here)
    with start("x.npy", "-o", "y.npy", "--force", *WORKERS, stdin=subprocess.DEVNULL) as process:
        wait_until(lambda: len(children(process.pid)) == 2, "two workers", process)
        assert temporary_files(here)
        kill(process.pid, number)
        code = process.wait(TIMEOUT)
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")
    assert code == 128 + number
    assert files_in(here) == files
    assert (here / "y.npy").read_bytes() == old
    assert group_has_ended(process.pid)


@linux
def test_e04_workers_end_with_their_killed_parent(here):
    sparse_npy("x.npy", (1 << 18, 1024))
    with start("x.npy", "--save-stats", "s.csv", *WORKERS, stdin=subprocess.DEVNULL) as process:
        wait_until(lambda: len(children(process.pid)) == 2, "two workers", process)
        process.kill()
        process.wait(TIMEOUT)
        assert group_has_ended(process.pid)


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return file.read().split()
    except FileNotFoundError:
        return []


@pytest.mark.parametrize(
    ("x", "out"),
    [
        ("x.npy", "x.npy"),
        ("x.npy", "./sub/../x.npy"),
        ("link.npy", "x.npy"),
        ("x.npy", "link.npy"),
        ("x.npy", "hard.npy"),
        ("hard.npy", "x.npy"),
    ],
)
def test_e06_output_is_the_input(x, out, enter, here, layernorm, main):
    expect = enter("E06")["expect"]
    (here / "sub").mkdir()
    for name in ("link.npy", "hard.npy"):
        (here / name).unlink()
    (here / "link.npy").symlink_to("x.npy")
    (here / "hard.npy").hardlink_to("x.npy")
    original = (here / "x.npy").read_bytes()
    assert_refused(main("apply", x, "-o", out), 2, out, "exists", "--force")
    assert (here / x).read_bytes() == original
    done = layernorm("apply", x, "-o", out, "--force", "--quiet")
    assert (done.code, done.out, done.err, done.created) == (0, "", "", set())
    np.testing.assert_allclose(np.load(out), expect["y"], expect["rtol"])
    assert (here / "link.npy").is_symlink()
    if "hard.npy" in (x, out):  # the other name still has the old content
        assert (here / ("x.npy" if out == "hard.npy" else "hard.npy")).read_bytes() == original


def test_e06_output_is_a_parameter(enter, layernorm, main):
    expect = enter("E06")["expect"]
    gamma = np.array([1, -2, 0.5, 3], "<f4")
    np.save("g.npy", gamma)
    assert_refused(main("apply", "x.npy", "--gamma", "g.npy", "-o", "g.npy"), 2, "g.npy", "--force")
    assert layernorm("apply", "x.npy", "--gamma", "g.npy", "-o", "g.npy", "--force").code == 0
    np.testing.assert_allclose(np.load("g.npy"), numbers(expect["y"]) * gamma, expect["rtol"])


E09 = expectation("E09")


@pytest.mark.parametrize("eps", E09["expect"]["valid"])
def test_e09_valid_eps(eps, enter, forward):
    expect = enter("E09")["expect"]
    y, report = forward("x.npy", "--eps", eps)
    np.testing.assert_allclose(y, expect["valid"][eps], expect["rtol"])
    assert report["eps"] == float(eps)


@pytest.mark.parametrize(
    "eps", [run["eps"] for run in E09["run"] if run.get("expect") == "exit 2"] + ["1e-400", "1_0"]
)
def test_e09_invalid_eps(eps, enter, program):
    enter("E09")
    done = program("apply", "x.npy", "--eps", eps, "-o", "y.npy", "--format", "json")
    assert_refused(done, 2, "eps", repr(eps))


@pytest.mark.parametrize("eps", ["0", "0.0", "-0.0"])
def test_e09_zero_eps(eps, enter, forward):
    expect = enter("E09")["expect"]
    y, report = forward("x.npy", "--eps", eps, warnings=1)
    np.testing.assert_allclose(y, numbers(expect["zero"]["y"]), expect["rtol"])
    assert report["eps"] == 0
    assert report["summary"]["constant_rows"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "mentions"),
    [
        (["missing.npy", "-o", "y.npy"], 3, ["missing.npy", "no such file"]),
        (["x.npy", "--gamma", "g5.npy", "-o", "y.npy"], 2, ["g5.npy", "(5,)", "(4,)"]),
        (["dir.npy"], 3, ["dir.npy", "directory"]),
        (["x.npy", "--backend", "nosuch", "-o", "y.npy"], 2, ["nosuch", "numpy"]),
        (["x.npy", "-o", "y.unknown"], 2, ["y.unknown", ".npy", ".safetensors"]),
        (["x.npy", "-o", "nowhere/y.npy"], 3, ["nowhere/y.npy", "directory"]),
        (["x.npy", "-o", "dir.npy", "--force"], 3, ["dir.npy", "directory"]),
    ],
)
def test_e11_user_errors(arguments, code, mentions, enter, program):
    enter("E11")
    assert_refused(program("apply", *arguments), code, *mentions)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_e11_engine_that_is_not_installed(engine, enter, layernorm):
    enter("E11")
    if importlib.util.find_spec(engine):
        pytest.skip(f"{engine} is installed")
    done = layernorm("apply", "x.npy", "--backend", engine, "-o", "y.npy")
    assert_refused(done, 4, engine, "pip install", f"layernorm[{engine}]")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_e11_no_permission(enter, here, layernorm):
    enter("E11")
    (here / "noread.npy").chmod(0)
    assert_refused(layernorm("apply", "noread.npy"), 3, "noread.npy", "permission denied")


def sites_of(run):
    """The sites of an inspect run that ended well."""
    assert run.code == 0, run.err
    return [site["site"] for site in run.json["sites"]]


@pytest.fixture
def inspect(main):
    return lambda *arguments: main("inspect", *arguments, "--format", "json")


def test_c11_shards(enter, inspect, main):
    expect = enter("C11")["expect"]
    for path in ("good/model.safetensors.index.json", "good", "stray/model.safetensors.index.json"):
        assert sites_of(inspect(path)) == expect["good"]["layer_norms"]
    for folder, mention in {
        "missing_shard": "model-00002-of-00002.safetensors",
        "missing_tensor": "model-00002-of-00002.safetensors#h.1.ln_1.bias",
        "traversal": "outside",
        "lfs_shard": "git lfs pull",
    }.items():
        assert_refused(main("inspect", f"{folder}/model.safetensors.index.json"), 3, mention)


@pytest.mark.parametrize("name", ["bare", "prefixed", "gb"])
def test_d01_spellings_of_gpt2(name, enter, inspect):
    expect = enter("D01")["expect"]
    run = inspect(f"{name}.safetensors")
    if name in ("bare", "prefixed"):
        assert sites_of(run) == expect[name]
    assert len(sites_of(run)) == expect["count"]
    for site in run.json["sites"]:
        assert (site["width"], site["beta"] is not None) == (expect["d"], expect["has_bias"])


def test_d03_gammas_and_betas_that_are_none(enter, inspect):
    expect = enter("D03")["expect"]
    assert sites_of(inspect("m.safetensors")) == expect["layer_norms"]


def test_d06_other_norms(enter, inspect):
    expect = enter("D06")["expect"]
    run = inspect("vision.safetensors")
    assert sites_of(run) == expect["layer_norms"]
    excluded = [item["name"] for item in run.json["excluded"]]
    assert {*expect["batch_norms_excluded"], *expect["ambiguous_allowed"][:1]} <= {*excluded}


@pytest.mark.parametrize(
    ("name", "eps"),
    [("bert", 1e-12), ("gpt2", 1e-5), ("persimmon", 1e-6), ("dino", 1e-6), ("none", None)],
)
def test_d07_eps_of_the_config(name, eps, enter, inspect):
    enter("D07")
    ((site,),) = [inspect(f"{name}/model.safetensors").json["sites"]]
    assert site["eps"] == eps


def test_c03_inspected(enter, main):
    enter("C03")
    run = main("inspect", "fp8.safetensors", "--format", "json")
    (site,) = run.json["sites"]
    stats = site["gamma_stats"]
    assert (site["dtype"], stats["min"], stats["max"]) == ("float8_e4m3fn", -0.5, 1.0)
    assert "ln.weight_scale_inv" in run.err


@pytest.mark.parametrize("name", ["meta_empty", "meta_unicode", "meta_only", "meta_int", "meta_nested"])
def test_c06_inspected(name, enter, inspect):
    enter("C06")
    assert sites_of(inspect(f"{name}.safetensors")) == ([] if name == "meta_only" else ["ln"])


@pytest.mark.parametrize("name", ["cut", "cuthdr", "short", "empty", "hugelen", "zerolen", "zeros"])
def test_c08_inspected(name, enter, main):
    enter("C08")
    assert_refused(main("inspect", f"{name}.safetensors"), 3, f"{name}.safetensors")


def test_c01_inspected(enter, main):
    expect = enter("C01")["expect"]
    assert_refused(main("inspect", "model.safetensors"), 3, *expect["stderr_should_mention"])
