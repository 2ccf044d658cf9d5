"""layernorm grad X DY"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import DATA, assert_refused, sparse_npy
from safetensors.numpy import load_file, save_file

from layernorm_cli import layer_norm_backward, pipeline, row_stats, workers

GPT2 = DATA / "gpt2"
NAMES = ("dx", "dgamma", "dbeta")


@pytest.fixture
def dy(x):
    """dy.npy, of the shape of x.npy, and the array in it."""
    array = np.linspace(-1, 2, 12, dtype="<f4").reshape(3, 4) ** 3
    np.save("dy.npy", array)
    return array


def assert_written(path, found, dtype="float32"):
    written = load_file(path)
    assert sorted(written) == sorted(NAMES)
    for name in NAMES:
        assert written[name].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        np.testing.assert_array_equal(written[name], getattr(found, name).astype(written[name].dtype))


def test_gradients_are_written(main, x, dy):
    run = main("grad", "x.npy", "dy.npy", "-o", "g.safetensors")
    assert (run.code, run.err, run.created) == (0, "", {"g.safetensors"})
    assert_written("g.safetensors", layer_norm_backward(x, dy))


def test_the_installed_command(layernorm, x, dy):
    run = layernorm("grad", "x.npy", "dy.npy", "-o", "g.safetensors", "--check", "2")
    assert (run.code, run.err, run.created) == (0, "", {"g.safetensors"})
    assert "against finite differences in 2 directions, 3 rows: relative error dx" in run.out
    assert_written("g.safetensors", layer_norm_backward(x, dy))


@pytest.mark.parametrize("site", ["h.0.ln_1", "h.5.ln_2", "h.11.ln_1", "ln_f"])
def test_a_trained_model(main, site):
    refs = (
        f"{GPT2 / 'activations.safetensors'}#{site}.input",
        f"{GPT2 / 'gradients.safetensors'}#{site}.dy",
    )
    params = ("--params", GPT2 / "norms.safetensors", "--site", site, "--eps", "1e-5")
    assert main("grad", *refs, *params, "-o", "g.safetensors").code == 0
    written, truth = load_file("g.safetensors"), load_file(GPT2 / "gradients.safetensors")
    for name, theirs in zip(NAMES, ("dx", "dweight", "dbias"), strict=True):
        np.testing.assert_array_equal(written[name], truth[f"{site}.{theirs}"])


def test_json(main, x, dy):
    np.save("gamma.npy", np.array([1, 2, 0.5, -1.0]))
    options = ("--gamma", "gamma.npy", "--eps", "0.1", "--rows", "2", "--check", "3", "--format", "json")
    report = main("grad", "x.npy", "dy.npy", "-o", "g.safetensors", *options).json
    found = layer_norm_backward(x, dy, [1, 2, 0.5, -1], eps=0.1)
    check = report.pop("check")
    assert max(check.pop(name) for name in NAMES) < 1e-9
    assert check == {"directions": 3, "rows": 3}
    for name in ("dgamma", "dbeta"):
        stats, values = report.pop(f"{name}_stats"), getattr(found, name)
        assert stats["norm"] == pytest.approx(np.sqrt(np.square(values).sum()), rel=1e-14)
        assert (stats["min"], stats["max"]) == (values.min(), values.max())
    table, before = report.pop("table"), row_stats(x)
    after = row_stats(found.dx.astype(np.float32))
    assert [row["row"] for row in table] == [[0], [2]]
    for row in table:
        place = row.pop("row")[0]
        assert row == {
            "mean_before": before.mean[place],
            "var_before": before.var[place],
            "mean_after": after.mean[place],
            "var_after": after.var[place],
        }
    assert report.pop("summary")["constant_rows"] == 0
    assert report == {
        "input": "x.npy",
        "tensor": None,
        "upstream": "dy.npy",
        "output": "g.safetensors",
        "outputs": {name: f"g.safetensors#{name}" for name in NAMES},
        "shape": [3, 4],
        "dtype": "float32",
        "output_dtype": "float32",
        "kind": "layer",
        "axis": -1,
        "eps": 0.1,
        "eps_source": "--eps",
        "gamma": "gamma.npy",
        "beta": None,
        "gamma_offset": 0,
        "backend": "numpy",
        "rows": 3,
    }


def test_nothing_is_written_unless_asked_for(main, x, dy):
    report = main("grad", "x.npy", "dy.npy", "--format", "json").json
    assert report["outputs"] == dict.fromkeys(NAMES)
    assert report["check"] is None


@pytest.mark.parametrize(
    ("dtype", "options", "dx_dtype", "sum_dtype"),
    [
        ("float64", (), "float64", "float64"),
        ("float16", (), "float16", "float32"),
        ("bfloat16", (), "bfloat16", "float32"),
        ("int32", (), "float64", "float64"),
        ("float32", ("--dtype", "float16"), "float16", "float16"),
        ("float16", ("--dtype", "float64"), "float64", "float64"),
    ],
)
def test_dtypes(main, here, dtype, options, dx_dtype, sum_dtype):
    values = np.random.default_rng(0).normal(0, 3, (2, 6, 8))
    x, dy = values.astype(getattr(ml_dtypes, dtype, dtype))
    save_file({"x": x, "dy": dy}, "in.safetensors")
    run = main("grad", "in.safetensors#x", "in.safetensors#dy", "-o", "g.safetensors", *options)
    assert run.code == 0, run.err
    written, found = load_file("g.safetensors"), layer_norm_backward(x, dy)
    for name, expected in zip(NAMES, (dx_dtype, sum_dtype, sum_dtype), strict=True):
        assert written[name].dtype == np.dtype(getattr(ml_dtypes, expected, expected))
        np.testing.assert_array_equal(written[name], getattr(found, name).astype(written[name].dtype))


def test_rms_axis_and_offset(main, here):
    rng = np.random.default_rng(1)
    x, dy, gamma = rng.normal(0, 1, (5, 3, 4)), rng.normal(0, 1, (5, 3, 4)), rng.normal(0, 1, (3, 4))
    for name, array in (("x", x), ("dy", dy), ("gamma", gamma)):
        np.save(f"{name}.npy", array)
    options = ("--kind", "rms", "--axis", "-2", "--gamma", "gamma.npy", "--gamma-offset", "1")
    assert main("grad", "x.npy", "dy.npy", "-o", "g.safetensors", *options).code == 0
    found = layer_norm_backward(x, dy, gamma, axis=-2, kind="rms", gamma_offset=1)
    assert_written("g.safetensors", found, "float64")
    assert load_file("g.safetensors")["dgamma"].shape == (3, 4)


def test_the_same_bits_by_every_way(main, here, monkeypatch):
    rng = np.random.default_rng(2)
    x, dy = rng.normal(3, 2, (2, 1000, 24)).astype(np.float32)
    np.save("x.npy", x)
    np.save("dy.npy", dy)
    np.save("fortran.npy", np.asfortranarray(x))
    assert main("grad", "x.npy", "dy.npy", "-o", "expected.safetensors").code == 0
    expected = load_file("expected.safetensors")
    monkeypatch.setattr(workers, "_may_fork", lambda: True)
    monkeypatch.setattr(pipeline, "FORK_ELEMENTS", 0)
    monkeypatch.setattr("layernorm_cli.norm.backward.SEGMENT_ELEMENTS", 64 * 24)
    main("grad", "x.npy", "dy.npy", "-o", "segments.safetensors", "--threads", "1")
    segments = load_file("segments.safetensors")
    for block, threads, source in ((64, 2, "x.npy"), (500, 3, "x.npy"), (1, 2, "fortran.npy")):
        monkeypatch.setattr(pipeline, "BLOCK_ELEMENTS", block * 24)
        options = ("-o", "g.safetensors", "--force", "--threads", str(threads))
        assert main("grad", source, "dy.npy", *options).code == 0
        for name in NAMES:
            np.testing.assert_array_equal(load_file("g.safetensors")[name], segments[name])
    for name in NAMES:
        np.testing.assert_allclose(segments[name], expected[name], 1e-6)


def test_pipes(shell, x, dy):
    run = shell("$LAYERNORM grad - dy.npy -o g.safetensors --quiet < x.npy")
    assert (run.code, run.out) == (0, "")
    assert_written("g.safetensors", layer_norm_backward(x, dy))
    run = shell("cat dy.npy | $LAYERNORM grad x.npy - -o g.safetensors --force --quiet")
    assert run.code == 0
    assert_written("g.safetensors", layer_norm_backward(x, dy))


def test_rows_with_nan_are_warned_of(main, x, dy):
    x[1, 2] = np.nan
    dy[2, 0] = np.inf
    np.save("x.npy", x)
    np.save("dy.npy", dy)
    run = main("grad", "x.npy", "dy.npy", "-o", "g.safetensors", "--check", "1", "--format", "json")
    assert run.code == 0
    assert "2 rows with NaN or inf" in run.err
    assert run.json["check"]["rows"] == 1
    assert run.json["dgamma_stats"]["norm"] == "NaN"
    dx = load_file("g.safetensors")["dx"]
    np.testing.assert_array_equal(np.isnan(dx).all(axis=1), [False, True, True])


def test_no_rows(main, here):
    np.save("x.npy", np.empty((0, 4), np.float32))
    run = main("grad", "x.npy", "x.npy", "-o", "g.safetensors", "--check", "1")
    assert run.code == 0, run.err
    written = load_file("g.safetensors")
    assert written["dx"].shape == (0, 4)
    np.testing.assert_array_equal(written["dgamma"], np.zeros(4))


def test_tables_and_lines(main, x, dy):
    found = layer_norm_backward(x, dy)
    out = main("grad", "x.npy", "dy.npy").out
    assert "gradients of the layer norm over axis -1, eps 1e-05 (default), no gamma" in out
    assert "mean x" in out
    assert "var dx" in out
    assert f"dbeta (sum of dy): norm {np.sqrt(np.square(found.dbeta).sum()):.6g}" in out
    assert main("grad", "x.npy", "dy.npy", "--format", "markdown").out.count("| ") > 4
    lines = main("grad", "x.npy", "dy.npy", "--format", "csv").out.splitlines()
    assert lines[0] == "row,mean_before,var_before,mean_after,var_after"
    assert len(lines) == 4
    assert len(main("grad", "x.npy", "dy.npy", "--format", "jsonl").out.splitlines()) == 3
    assert main("grad", "x.npy", "dy.npy", "--quiet").out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "mentions"),
    [
        (("x.npy", "other.npy"), 2, ["other.npy", "(2, 4)", "(3, 4)"]),
        (("x.npy", "gone.npy"), 3, ["gone.npy"]),
        (("-", "-"), 2, ["standard input"]),
        (("x.npy", "dy.npy", "-o", "-"), 2, ["three tensors"]),
        (("x.npy", "dy.npy", "-o", "g.npy"), 2, [".safetensors"]),
        (("x.npy", "dy.npy", "-o", "no/g.safetensors"), 3, ["mkdir"]),
        (("x.npy", "dy.npy", "--backend", "onnxruntime"), (2, 4), ["onnxruntime"]),
        (("x.npy", "dy.npy", "--check", "-1"), 2, ["not 0 or more"]),
        (("x.npy", "dy.npy", "--gamma", "other.npy"), 2, ["(2, 4)"]),
        (("x.npy", "dy.npy", "--site", "ln_f"), 2, ["--params"]),
        (("scalar.npy", "scalar.npy"), 3, ["0-d"]),
    ],
)
def test_refusals(main, x, dy, arguments, code, mentions):
    np.save("other.npy", np.ones((2, 4), np.float32))
    np.save("scalar.npy", np.float32(1))
    run = main("grad", *arguments)
    assert_refused(run, run.code, *mentions)
    assert run.code in (code if isinstance(code, tuple) else (code,))


def test_a_pipe_cannot_be_checked(shell, x, dy):
    run = shell("cat x.npy | $LAYERNORM grad - dy.npy --check 1")
    assert_refused(run, 2, "--check", "once only")


def test_an_output_is_not_replaced_unasked(main, x, dy):
    output = Path("g.safetensors")
    output.write_bytes(b"mine")
    assert_refused(main("grad", "x.npy", "dy.npy", "-o", "g.safetensors"), 2, "exists already")
    assert output.read_bytes() == b"mine"
    assert main("grad", "x.npy", "dy.npy", "-o", "g.safetensors", "--force").code == 0


MEASURE = """
import re, resource
from layernorm_cli.cli.main import main
try:
    main()
finally:  # ru_maxrss of the process itself would be that of what started it, if larger
    print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_depend_on_size(layernorm, here):
    sparse_npy("x.npy", (1 << 20, 768))
    command = (sys.executable, "-c", MEASURE)
    run = layernorm("grad", "x.npy", "x.npy", "--quiet", "--backend", "numpy", command=command)
    assert run.code == 0, run.err
    assert max(map(int, run.out.split())) <= 120 * 1024
