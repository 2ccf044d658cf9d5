"""layernorm bench, on few rows: what is measured, not how fast it is."""

import numpy as np
import pytest

KEYS = {
    "backend",
    "dtype",
    "shape",
    "seconds",
    "gb_per_s",
    "ratio_to_copy",
    "exact_fraction",
    "max_abs_error",
    "peak_rss_mb",
    "wrong",
    "distributions",
}
FEW = ("bench", "--rows", "300", "--width", "64", "--repeat", "2", "--backend", "numpy")


def test_json(layernorm):
    result = layernorm(*FEW, "--format", "json").json
    (case,) = result["cases"]
    assert set(case) == KEYS
    assert (case["backend"], case["dtype"], case["shape"]) == ("numpy", "float32", [300, 64])
    assert case["exact_fraction"] >= 0.9999
    assert 0 < case["max_abs_error"] < 1e-5
    assert case["wrong"] is None
    assert case["seconds"] > 0
    assert 10 < case["peak_rss_mb"] < 500
    assert case["gb_per_s"] == pytest.approx(2 * 300 * 64 * 4 / case["seconds"] / 1e9)
    assert len(case["distributions"]) == 6


def test_table_and_markdown(layernorm):
    table = layernorm(*FEW).out.splitlines()
    assert "300 rows of 64, in memory" in table[0]
    assert table[2].split()[0] == "numpy"
    assert "| numpy |" in layernorm(*FEW, "--format", "markdown").out


def test_rows_of_a_file(layernorm, here):
    np.save(here / "x.npy", np.random.default_rng(0).standard_normal((5, 7, 16)).astype("f2"))
    (case,) = layernorm("bench", "x.npy", "--backend", "numpy", "--format", "json").json["cases"]
    assert (case["dtype"], case["shape"]) == ("float16", [35, 16])
    # float16 cannot hold a mean of 1e6 nor a scale of 1e20
    names = [check["distribution"] for check in case["distributions"]]
    assert "mean 1e4" in names
    assert "1e20 x N(0, 1)" not in names


def test_file_to_file(layernorm):
    (case,) = layernorm(*FEW, "--file", "--format", "json").json["cases"]
    assert case["ratio_to_copy"] > 1
    assert 10 < case["peak_rss_mb"] < 300


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("bench", "--backend", "nosuch"), 2),
        (("bench", "--format", "csv"), 2),
        (("bench", "--rows", "0"), 2),
        (("bench", "missing.npy"), 3),
        (("bench", "--file", "--dtype", "bfloat16"), 2),
    ],
)
def test_errors(layernorm, arguments, code):
    run = layernorm(*arguments)
    assert (run.code, run.stdout) == (code, b"")
    assert len(run.err.splitlines()) <= 3
    assert "Traceback" not in run.err


def test_a_wrong_engine_has_no_time(monkeypatch):
    """In this process: an engine that divides by d - 1."""
    from layernorm_cli import backends
    from layernorm_cli.norm.forward import row_kernel
    from layernorm_cli.tasks import bench

    def prepare(norm, width, device):
        def kernel(x, y):
            stats = row_kernel(norm, width)(x, y)
            if y is not None:
                y *= np.float32(np.sqrt((width - 1) / width))
            return stats

        return kernel

    monkeypatch.setattr(bench, "load_prepare", lambda *_: prepare)
    for name in ("numpy", "torch"):
        engine = backends.ENGINES[name]
        monkeypatch.setattr(bench, "choose_engine", lambda *_, e=engine, n=name: (n, e))
        case = bench._measure(bench.BenchRequest(rows=10, width=64), name)
        assert case.seconds is None
        assert "N(0, 1)" in case.wrong or "correctly rounded" in case.wrong
