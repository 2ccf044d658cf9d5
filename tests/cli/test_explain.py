"""layernorm explain: every step of one row, in every form; which row, what is read, pictures, errors."""

import csv
import importlib.util
import io
import json
import math
import re

import ml_dtypes
import numpy as np
import pytest
from conftest import DATA, assert_refused, sparse_npy
from safetensors.numpy import load_file, save_file

from layernorm_cli import layer_norm

GPT2 = str(DATA / "gpt2" / "norms.safetensors")
ACTS = str(DATA / "gpt2" / "activations.safetensors")
KEYS = [
    *("input", "tensor", "shape", "dtype", "kind", "axis", "eps_source", "gamma", "beta"),
    *("gamma_offset", "rows", "row", "x", "mean", "centred", "squared", "var", "eps", "std", "rstd"),
    *("xhat", "gamma_values", "beta_values", "y", "eps_effect", "sweep", "dtypes", "scaled"),
]
plot = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture
def worked(here):
    """x.npy, gamma.npy and beta.npy of the example that is worked by hand."""
    np.save("x.npy", [[2.0, 6, -2, 4], [1, 1, 1, 1]])
    np.save("gamma.npy", [0.5, 2, 1, 0.8])
    np.save("beta.npy", [0.1, -0.5, 0, 0.3])


@pytest.fixture
def cube(here):
    """x.npy, float32 (2, 3, 40), and the array in it."""
    array = np.random.default_rng(0).normal(1, 2, (2, 3, 40)).astype("f4")
    np.save("x.npy", array)
    return array


def test_the_arithmetic_of_four_features(worked, layernorm):
    done = layernorm("explain", "x.npy", "--eps", "0")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "mean = (2 + 6 + -2 + 4) / 4 = 2.5" in lines
    assert "var = (0.25 + 12.25 + 20.25 + 2.25) / 4 = 8.75" in lines
    assert "std = sqrt(var + eps) = sqrt(8.75 + 0) = 2.95804" in lines
    assert "y of feature 0 = (2 - 2.5) / 2.95804 = -0.169031" in lines
    table = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])][:4]
    assert table == [
        ["0", "2", "-0.5", "0.25", "-0.169031", "-0.169031"],
        ["1", "6", "3.5", "12.25", "1.18322", "1.18322"],
        ["2", "-2", "-4.5", "20.25", "-1.52128", "-1.52128"],
        ["3", "4", "1.5", "2.25", "0.507093", "0.507093"],
    ]
    assert "x times 40 has the same y" in done.out


def test_gamma_and_beta(worked, main):
    done = main("explain", "x.npy", "--gamma", "gamma.npy", "--beta", "beta.npy", "--eps", "0")
    assert "y = (x - mean) / std * gamma + beta" in done.out
    assert "(2 - 2.5) / 2.95804 * 0.5 + 0.1 = 0.0154846" in done.out
    assert re.search(r"^ +1 +6 +3.5 +12.25 +1.18322 +2 +-0.5 +1.86643$", done.out, re.MULTILINE)


def test_rms(worked, main):
    done = main("explain", "x.npy", "--kind", "rms", "--eps", "1")
    assert "mean square = (4 + 36 + 4 + 16) / 4 = 15" in done.out
    assert "std = sqrt(mean square + eps) = sqrt(15 + 1) = 4" in done.out
    assert "x - mean" not in done.out
    assert "mean square after = mean square / (mean square + eps) = 15 / (15 + 1) = 0.9375" in done.out


def test_json(worked, layernorm):
    done = layernorm("explain", "x.npy", "--gamma", "gamma.npy", "--format", "json")
    assert (done.code, done.err) == (0, "")
    report = done.json
    assert list(report) == KEYS
    assert [report[key] for key in KEYS[:12]] == [
        *("x.npy", None, [2, 4], "float64", "layer", -1, "default", "gamma.npy", None, 0, 2, [0]),
    ]
    assert (report["x"], report["mean"], report["var"]) == ([2, 6, -2, 4], 2.5, 8.75)
    assert (report["squared"], report["eps"]) == ([0.25, 12.25, 20.25, 2.25], 1e-5)
    assert report["gamma_values"] == [0.5, 2, 1, 0.8]
    assert report["y"] == layer_norm(report["x"], report["gamma_values"]).tolist()
    assert report["eps_effect"] == {
        "var_ratio": pytest.approx(8.75 / 8.75001, rel=1e-15),
        "shrink_percent": pytest.approx(1e-3 / 8.75001, rel=1e-14),
    }
    assert [point["eps"] for point in report["sweep"]] == [0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3]
    assert report["sweep"][4]["var_after"] == report["eps_effect"]["var_ratio"]
    assert [short["dtype"] for short in report["dtypes"]] == ["float16", "bfloat16", "float32"]
    assert [short["eps_survives"] for short in report["dtypes"]] == [False, False, True]
    assert 0 < report["dtypes"][2]["max_abs_error"] < 1e-6
    assert report["scaled"]["factor"] == 40
    assert report["scaled"]["max_abs_change"] > 0


def test_json_of_a_constant_row_is_strict(worked, main):
    report = main("explain", "x.npy", "--row", "1", "--eps", "0", "--format", "json").json
    assert (report["y"], report["rstd"], report["eps_effect"]["var_ratio"]) == (
        ["NaN"] * 4,
        "Infinity",
        "NaN",
    )
    assert "0 / 0 is NaN" in main("explain", "x.npy", "--row", "1", "--eps", "0").out
    assert "y is beta" in main("explain", "x.npy", "--row", "1").out


def test_a_feature_a_line(cube, main):
    arguments = ("explain", "x.npy", "--row", "4", "--grad", "7", "--compare-axis", "--format")
    report = main(*arguments, "json").json
    lines = [json.loads(line) for line in main(*arguments, "jsonl").out.splitlines()]
    names = ["feature", "x", "centred", "squared", "xhat", "gamma", "beta", "y", "batch_y", "grad"]
    assert [list(line) for line in lines] == [names] * 40
    assert [line["feature"] for line in lines] == list(range(40))
    for name in ("x", "centred", "squared", "xhat", "y", "grad"):
        assert [line[name] for line in lines] == report[name]
    assert [line["batch_y"] for line in lines] == report["compare_axis"]["y"]
    rows = list(csv.DictReader(io.StringIO(main(*arguments, "csv").out)))
    assert list(rows[0]) == names
    assert [float(row["y"]) for row in rows] == report["y"]
    assert rows[0]["gamma"] == ""
    assert len(main(*arguments, "csv", "--features", "3").out.splitlines()) == 4
    markdown = main(*arguments, "markdown").out
    assert "| feature | x | x - mean | squared | xhat | y |" in markdown
    assert main(*arguments, "json", "--quiet").stdout == b""


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ("0", (0, 0)),
        ("5", (1, 2)),
        ("1,0", (1, 0)),
        ("-1", (1, 2)),
        ("-2,-1", (0, 2)),
        (" 1, 1", (1, 1)),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_which_row(row, place, order, cube, main):
    np.save("x.npy", np.asarray(cube, order=order))
    report = main("explain", "x.npy", "--row", row, "--format", "json").json
    assert report["row"] == list(place)
    assert report["x"] == cube[place].tolist()
    assert report["y"] == layer_norm(cube)[place].tolist()


@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_over_several_axes(order, axis, cube, main):
    np.save("x.npy", np.asarray(cube, order=order))
    report = main("explain", "x.npy", "--row", "-1", "--axis", str(axis), "--format", "json").json
    leading = cube.shape[:axis]
    assert report["row"] == [size - 1 for size in leading]
    last = cube.reshape(-1, *cube.shape[axis:])[-1]
    assert report["x"] == last.reshape(-1).tolist()


@pytest.mark.parametrize("order", ["C", "F"])
def test_from_a_pipe(order, cube, layernorm):
    file = io.BytesIO()
    np.save(file, np.asarray(cube, order=order))
    done = layernorm("explain", "-", "--row", "3", "--format", "json", stdin=file.getvalue())
    assert done.json["x"] == cube.reshape(6, 40)[3].tolist()
    data = file.getvalue() + b"surplus"
    done = layernorm("explain", "-", "--row", "3", "--format", "json", stdin=data)
    assert "7 surplus bytes" in done.err
    done = layernorm("explain", "-", "--row", "0", stdin=file.getvalue()[:-4])
    assert_refused(done, 3, "truncated")


@pytest.mark.parametrize("form", ["f2", "bfloat16", "i2", "?"])
def test_other_dtypes(form, here, main):
    dtype = ml_dtypes.bfloat16 if form == "bfloat16" else form
    x = np.array([[2, 6, -2, 4]]).astype(dtype)
    save_file({"x": x}, "x.safetensors")
    report = main("explain", "x.safetensors", "--format", "json").json
    assert (report["tensor"], report["x"]) == ("x", x[0].astype(float).tolist())
    if form == "bfloat16":
        np.save("x.npy", x.view("V2"))
        report = main("explain", "x.npy", "--assume-dtype", "bfloat16", "--format", "json").json
        assert report["x"] == [2, 6, -2, 4]


def test_only_the_row_is_read(here, layernorm):
    """A sparse file of 30 GB: reading it all would take longer than a test may."""
    sparse_npy("x.npy", (10_000_000, 768))
    with open("x.npy", "r+b") as file:
        file.seek(-768 * 4, 2)
        file.write(np.arange(768, dtype="<f4").tobytes())
    report = layernorm("explain", "x.npy", "--row", "-1", "--format", "json").json
    assert (report["row"], report["mean"]) == ([9_999_999], 383.5)
    assert report["var"] == pytest.approx((768**2 - 1) / 12, rel=1e-15)


def test_only_the_row_is_read_in_fortran_order(here, layernorm):
    shape = (2, 5_000_000, 768)
    with open("x.npy", "wb") as file:
        header = {"descr": "<f4", "fortran_order": True, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for feature in range(768):
            file.seek(start + 4 * int(np.ravel_multi_index((1, 77, feature), shape, order="F")))
            file.write(np.float32(feature).tobytes())
        file.truncate(start + 4 * int(np.prod(shape)))
    report = layernorm("explain", "x.npy", "--row", "1,77", "--format", "json").json
    assert report["x"] == list(range(768))


def test_a_site_of_a_checkpoint(main, here):
    done = main(
        *("explain", f"{ACTS}#h.0.ln_1.input", "--row", "1,5"),
        *("--params", GPT2, "--site", "h.0.ln_1", "--format", "json"),
    )
    report = done.json
    assert report["eps_source"] == "config.json: layer_norm_epsilon"
    assert report["gamma"].endswith("norms.safetensors#transformer.h.0.ln_1.weight")
    captured = load_file(ACTS)["h.0.ln_1.output"][1, 5]
    np.testing.assert_allclose(report["y"], captured, 1e-5, 1e-6)


def test_gamma_offset(worked, main):
    arguments = ("explain", "x.npy", "--gamma", "gamma.npy", "--gamma-offset", "1")
    report = main(*arguments, "--format", "json").json
    assert (report["gamma_offset"], report["gamma_values"]) == (1, [1.5, 3, 2, 1.8])
    assert "gamma gamma.npy + 1" in main(*arguments).out


def test_compare_axis(cube, main):
    arguments = ("explain", "x.npy", "--row", "1,1", "--compare-axis")
    batch = main(*arguments, "--format", "json").json["compare_axis"]
    matrix = cube.reshape(6, 40).astype(np.longdouble)
    centred = matrix - matrix.mean(axis=0)
    var = (centred**2).mean(axis=0)
    assert list(batch) == ["rows", "mean", "var", "xhat", "y"]
    assert batch["rows"] == 6
    np.testing.assert_allclose(batch["mean"], matrix.mean(axis=0).astype(float), 1e-14, 1e-15)
    np.testing.assert_allclose(batch["var"], var.astype(float), 1e-14)
    y = (centred[4] / np.sqrt(var + 1e-5)).astype(float)
    np.testing.assert_allclose(batch["y"], y, 1e-13)
    out = main(*arguments).out
    assert "batch normalization of the same matrix, 6 rows by 40 features" in out
    difference = np.abs(y - layer_norm(cube)[1, 1]).max()
    assert f"y differs by {difference:.6g} at most" in out


@pytest.mark.parametrize("order", ["C", "F"])
def test_compare_axis_of_a_file_of_many_blocks(order, here, layernorm):
    x = np.random.default_rng(0).normal(1e6, 0.1, (30_000, 24))
    np.save("x.npy", np.asarray(x, order=order))
    batch = layernorm("explain", "x.npy", "--row", "7", "--compare-axis", "--format", "json").json[
        "compare_axis"
    ]
    centred = x - x[0]
    centred -= centred.mean(axis=0)
    y = centred[7] / np.sqrt(np.square(centred).mean(axis=0) + 1e-5)
    np.testing.assert_allclose(batch["y"], y, 1e-11, 1e-12)


def test_grad(worked, main):
    arguments = ("explain", "x.npy", "--gamma", "gamma.npy", "--grad", "-3")
    report = main(*arguments, "--format", "json").json
    assert report["grad_feature"] == 1
    step = 1e-4
    moved = [
        layer_norm(np.add(report["x"], [0, sign * step, 0, 0]), report["gamma_values"])
        for sign in (1, -1)
    ]
    np.testing.assert_allclose(report["grad"], (moved[0] - moved[1]) / (2 * step), 1e-7, 1e-9)
    assert np.count_nonzero(report["grad"]) == 4
    out = main(*arguments).out
    assert "dy_i / dx_j = gamma_i * rstd * ([i = j] - 1/d - xhat_i * xhat_j / d)" in out
    assert "every y moves" in out
    assert " - 1/d" not in main(*arguments, "--kind", "rms").out


@pytest.mark.parametrize("features", ["all", "2", "0", "99"])
def test_features_shown(features, cube, main):
    lines = main("explain", "x.npy", "--features", features, "--grad", "0").out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("feature "))
    shown = []
    for line in lines[start + 1 :]:
        if not re.match(r" *\d+  ", line):
            break
        shown.append(int(line.split()[0]))
    assert shown == {"2": [0, 39], "0": []}.get(features, list(range(40)))
    assert any("not shown" in line for line in lines) == (len(shown) < 40)


def test_ten_features_by_default(cube, main):
    assert "30 of 40 features not shown; --features all shows them" in main("explain", "x.npy").out


def test_wide_rows_are_not_written_out(here, main):
    np.save("x.npy", np.arange(768.0))
    out = main("explain", "x.npy").out
    assert "mean = (sum of x) / 768 = 294528 / 768 = 383.5" in out
    assert "..." not in out


@pytest.mark.parametrize("columns", ["20", "1000"])
def test_plain_off_a_terminal(columns, cube, layernorm):
    arguments = ("explain", "x.npy", "--grad", "0", "--compare-axis", "--features", "all")
    wide = layernorm(*arguments, COLUMNS=columns, FORCE_COLOR="1")
    assert wide.out == layernorm(*arguments).out
    assert wide.stdout.isascii()
    assert b"\x1b" not in wide.stdout


@pytest.mark.parametrize("scale", [1, 1e-7, -1e30])
def test_in_a_terminal_of_80_columns(scale, here, in_terminal):
    x = (scale * np.random.default_rng(0).normal(1, 2, (2, 64))).astype("f4")
    for name in ("x.npy", "gamma.npy", "beta.npy"):
        np.save(name, x if name == "x.npy" else x[0])
    arguments = ("explain", "x.npy", "--gamma", "gamma.npy", "--beta", "beta.npy", "--grad", "5")
    code, out = in_terminal(*arguments, "--compare-axis")
    assert code == 0
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.splitlines()]
    assert max(map(len, shown)) <= 80
    assert sum(line.startswith("╭") for line in shown) in (5, 6)
    assert "⋮" in out


def test_no_colour_where_none_is_wanted(worked, in_terminal):
    assert "\x1b" not in in_terminal("explain", "x.npy", NO_COLOR="1")[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_with_what_is_no_number(value, here, main):
    np.save("x.npy", [[1, value, 2], [1, 2, 3]])
    done = main("explain", "x.npy", "--compare-axis", "--grad", "0")
    assert (done.code, done.err) == (0, "")
    assert "all of y is NaN" in done.out
    report = main("explain", "x.npy", "--format", "json").json
    assert (report["y"], report["var"]) == (["NaN"] * 3, "NaN")
    assert "NaN" not in main("explain", "x.npy", "--row", "1").out


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_squares_out_of_range(scale, here, main):
    np.save("x.npy", np.multiply([2, 6, -2, 4], scale))
    done = main("explain", "x.npy", "--eps", "0")
    assert (done.code, done.err) == (0, "")
    assert "power of two" in done.out
    report = main("explain", "x.npy", "--eps", "0", "--format", "json").json
    np.testing.assert_allclose(report["y"], layer_norm([2, 6, -2, 4], eps=0), 1e-14)
    assert report["std"] == pytest.approx(math.sqrt(8.75) * scale, rel=1e-14)


def test_a_single_feature(here, main):
    np.save("x.npy", [[3.0], [4.0]])
    done = main("explain", "x.npy", "--grad", "0", "--compare-axis")
    assert (done.code, done.err) == (0, "")
    assert "a single feature is its own mean" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "mentions"),
    [
        (["--row", "6"], 2, ["x.npy: row 6: out of range", "-6 to 5"]),
        (["--row", "1,3"], 2, ["row 1,3", "-2 to 1, -3 to 2"]),
        (["--row", "1,2,3"], 2, ["3 indices", "or 2 indices"]),
        (["--row", "one"], 2, ["--row 'one'", "1,3"]),
        (["--row", "1_0"], 2, ["--row '1_0'"]),
        (["--row", ""], 2, ["--row ''"]),
        (["--row", "0.5"], 2, ["--row '0.5'"]),
        (["--grad", "40"], 2, ["x.npy: feature 40: out of range", "-40 to 39"]),
        (["--grad", "x"], 2, ["--grad 'x'"]),
        (["--features", "-1"], 2, ["--features '-1'", "or all"]),
        (["--axis", "3"], 2, ["axis 3"]),
        (["--eps", "nan"], 2, ["nan"]),
        (["--gamma", "x.npy"], 2, ["gamma x.npy", "(2, 3, 40)"]),
        (["--gamma", "nosuch.npy"], 3, ["nosuch.npy"]),
        (["--site", "ln"], 2, ["--params"]),
        (["--gamma-offset", "1"], 2, ["--gamma REF"]),
    ],
)
def test_errors(arguments, code, mentions, cube, main):
    assert_refused(main("explain", "x.npy", *arguments), code, *mentions)


def test_errors_of_inputs(here, main):
    assert_refused(main("explain", "x.npy"), 3, "x.npy")
    np.save("x.npy", np.zeros((0, 4)))
    assert_refused(main("explain", "x.npy"), 3, "there are no rows", "(0,)")
    np.save("x.npy", np.zeros((4, 0)))
    assert_refused(main("explain", "x.npy"), 3, "zero width")
    np.save("x.npy", 1.0)
    assert_refused(main("explain", "x.npy"), 3, "0-d")
    assert_refused(main("explain", "-", "--gamma", "-"), 2, "twice")


@plot
@pytest.mark.parametrize(
    ("name", "magic", "width"), [("p.png", b"\x89PNG", 300), ("p.svg", b"<?xml", 3)]
)
def test_pictures_are_the_same_bytes_each_time(name, magic, width, here, main):
    np.save("x.npy", np.random.default_rng(0).normal(0, 1, (2, width)))
    np.save("gamma.npy", np.ones(width))
    drawn = []
    for _ in range(2):
        arguments = ("explain", "x.npy", "--plot", name, "--gamma", "gamma.npy", "--quiet", "--force")
        done = main(*arguments)
        assert (done.code, done.err) == (0, "")
        drawn.append((here / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(magic)
    assert len(drawn[0]) > 5_000


@plot
@pytest.mark.parametrize(
    ("row", "options"),
    [
        ([np.nan, 1, 2], ()),
        ([np.inf, -np.inf, np.nan], ("--kind", "rms")),
        ([5, 5, 5], ("--eps", "0")),
        ([0, 0, 0], ("--kind", "rms")),
        ([1e200, 2e200, -1e200], ()),
        ([1.7e308, -1.7e308, 1], ("--kind", "rms")),
        ([5e-324, 0, 1e-323], ("--eps", "0")),
        ([5e-324, 0, 1e-323], ()),
        ([1, 1 + 2.0**-52, 1], ("--eps", "0")),
        ([7], ()),
    ],
    ids=str,
)
def test_pictures_of_odd_rows(row, options, here, main):
    np.save("x.npy", [row])
    done = main("explain", "x.npy", *options, "--plot", "p.svg", "--quiet")
    assert (done.code, done.err, done.created) == (0, "", {"p.svg"})


@plot
def test_pictures_that_cannot_be(worked, here, main):
    assert_refused(main("explain", "x.npy", "--plot", "p.gif"), 2, "p.gif", ".png")
    (here / "p.png").write_bytes(b"mine")
    assert_refused(main("explain", "x.npy", "--plot", "p.png"), 2, "p.png", "--force")
    assert (here / "p.png").read_bytes() == b"mine"
    assert_refused(main("explain", "x.npy", "--plot", "q.png", "--row", "9"), 2, "row 9")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there")
def test_pictures_without_matplotlib(worked, main):
    assert_refused(main("explain", "x.npy", "--plot", "p.png"), 4, "layernorm[plot]")
