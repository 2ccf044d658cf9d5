"""layernorm apply: every option, every form of the report, files, names, terminals, memory."""

import csv
import io
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import COMMAND, TIMEOUT, assert_refused, environment, load, sparse_npy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from layernorm_cli import __version__, layer_norm, pipeline, row_stats, workers
from layernorm_cli.cli.main import app
from layernorm_cli.errors import printable

FORMATS = ("table", "json", "jsonl", "csv", "markdown")
COLUMNS = ["row", "mean_before", "var_before", "mean_after", "var_after"]
rng = np.random.default_rng(1)
X = rng.normal(3, 2, (2, 3, 4)).astype("<f4")
GAMMA, BETA = rng.normal(1, 1, (2, 4)).astype("<f4")
RESIDUAL = rng.normal(0, 5, X.shape).astype("<f4")


@pytest.fixture
def files(here):
    """x, gamma, beta, residual, long (21 rows) and raw (bfloat16 as numpy.save leaves it)."""
    np.save("x.npy", X)
    np.save("gamma.npy", GAMMA)
    np.save("beta.npy", BETA)
    np.save("gamma34.npy", np.tile(GAMMA, (3, 1)))
    np.save("residual.npy", RESIDUAL)
    np.save("long.npy", np.arange(84, dtype="<f4").reshape(21, 4) ** 2)
    np.save("raw.npy", X.astype(ml_dtypes.bfloat16))
    save_file(
        {"ln.weight": GAMMA, "ln.bias": BETA, "x.ln_b.weight": BETA, "x.ln_b.bias": GAMMA},
        "norms.safetensors",
    )
    return here


@pytest.fixture
def apply(files, main):
    """Applies to x.npy or another file, quietly by default, and demands success."""

    def run(*options, x="x.npy", program=main, **variables):
        done = program("apply", x, *options, **variables)
        assert done.code == 0, done.err
        return done

    return run


def table_of(text, form):
    """The table of a report as [[row index], four floats] a row."""
    if form == "json":
        rows = json.loads(text)["table"]
    elif form == "jsonl":
        rows = [json.loads(line) for line in text.splitlines()]
    elif form == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        for row in rows:
            row["row"] = [int(index) for index in row["row"].split(",") if index]
    elif form == "markdown":
        lines = [line for line in text.splitlines() if line.startswith("|")][2:]
        rows = [cells(line.strip("|").split("|")) for line in lines]
    else:
        # the numbers are aligned, and an index has spaces behind its commas
        found = [
            re.fullmatch(r" *((?:\d+(?:, )?)*)((?:  +[-\w.+]+){4})", line) for line in text.splitlines()
        ]
        rows = [cells([match[1], *match[2].split()]) for match in found if match]
    return [[list(row["row"]), *(float(row[name]) for name in COLUMNS[1:])] for row in rows]


def cells(texts):
    index, *numbers = (text.strip() for text in texts)
    return {
        "row": [int(i) for i in index.split(", ") if i],
        **dict(zip(COLUMNS[1:], numbers, strict=True)),
    }


NUMBERS = [
    ([], {}),
    (["--eps", "0.5"], {"eps": 0.5}),
    (["--kind", "rms"], {"kind": "rms"}),
    (["--kind", "layer"], {}),
    (["--gamma", "gamma.npy"], {"gamma": GAMMA}),
    (["--beta", "beta.npy"], {"beta": BETA}),
    (
        ["--gamma", "gamma.npy", "--beta", "beta.npy", "--gamma-offset", "1", "--kind", "rms"],
        {"gamma": GAMMA, "beta": BETA, "gamma_offset": 1, "kind": "rms"},
    ),
    (["--gamma", "gamma.npy", "--gamma-offset", "0"], {"gamma": GAMMA}),
    (["--axis", "-1"], {}),
    (["--axis", "2"], {}),
    (["--axis", "-2"], {"axis": -2}),
    (["--axis", "1", "--gamma", "gamma34.npy"], {"axis": 1, "gamma": np.tile(GAMMA, (3, 1))}),
    (["--axis", "0"], {"axis": 0}),
    (["--backend", "numpy"], {}),
    (["--device", "cpu"], {}),
    (["--dtype", "float64"], {}),
]


@pytest.mark.parametrize(("options", "arguments"), NUMBERS, ids=lambda value: " ".join(value) or "none")
def test_what_is_computed(options, arguments, apply):
    apply(*options, "-o", "y.npy")
    y = np.load("y.npy")
    truth = layer_norm(X, **arguments)
    np.testing.assert_array_equal(y, truth.astype(y.dtype))
    assert y.dtype == ("float64" if "--dtype" in options else "float32")


def test_gamma_offset_is_added(apply):
    apply("--gamma", "gamma.npy", "--gamma-offset", "1", "-o", "y.npy")
    np.save("gamma1.npy", GAMMA.astype("f8") + 1)
    apply("--gamma", "gamma1.npy", "-o", "z.npy")
    np.testing.assert_array_equal(np.load("y.npy"), np.load("z.npy"))


def test_axis_joins_the_axes_behind_it(apply):
    report = apply("--axis", "-2", "--format", "json", "-o", "y.npy").json
    assert (report["axis"], report["rows"]) == (-2, 2)
    assert [row["row"] for row in report["table"]] == [[0], [1]]
    flat = layer_norm(X.reshape(2, 12)).reshape(X.shape)
    np.testing.assert_array_equal(np.load("y.npy"), flat.astype("f4"))


# Every option, a value for it, and what else it takes for the value to matter.
OPTIONS = {
    "--gamma": ("gamma.npy", []),
    "--beta": ("beta.npy", []),
    "--params": ("norms.safetensors", []),
    "--site": ("ln", ["--params", "norms.safetensors"]),
    "--all-sites": (None, ["--params", "norms.safetensors"]),
    "--match": ("{site}", []),
    "--residual": ("residual.npy", []),
    "--eps": ("0.25", []),
    "--kind": ("rms", []),
    "--gamma-offset": ("1", ["--gamma", "gamma.npy"]),
    "--axis": ("1", []),
    "--output": ("y.npy", []),
    "--sum-out": ("sum.npy", ["--residual", "residual.npy"]),
    "--save-stats": ("s.csv", []),
    "--dtype": ("float16", ["--output", "y.npy"]),
    "--assume-dtype": ("bfloat16", ["--residual", "raw.npy"]),
    "--force": (None, ["--output", "gamma.npy"]),
    "--backend": ("numpy", []),
    "--device": ("cuda", []),
    "--threads": ("0", []),
    "--format": ("csv", []),
    "--rows": ("2", []),
    "--quiet": (None, []),
    "--progress": (None, []),
    "--debug": (None, ["--beta", "missing.npy"]),
}
# numpy is the default, there is no terminal, and x.npy has no names
NOT_SEEN_HERE = {"--backend", "--progress", "--match"}


def test_options_are_complete():
    import typer.main

    command = typer.main.get_command(app).commands["apply"]
    options = {max(p.opts, key=len): p.envvar for p in command.params if p.param_type_name == "option"}
    options.pop("--help", None)
    assert options == {name: f"LAYERNORM_{name[2:].upper().replace('-', '_')}" for name in OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_variables_of_the_environment(name, files, main):
    value, rest = OPTIONS[name]
    variable = f"LAYERNORM_{name[2:].upper().replace('-', '_')}"
    option = [name] if value is None else [name, value]
    results = []
    for options, variables in ((option, {}), ([], {variable: value or "1"}), ([], {})):
        try:
            done = main("apply", "x.npy", *rest, *options, **variables)
        except Exception as error:  # --debug lets it pass
            done = type(error)
        else:
            made = {path: (files / path).read_bytes() for path in done.created}
            done = (
                done.code,
                done.stdout,
                done.stderr.replace(b" (env var: '%s')" % variable.encode(), b""),
                made,
            )
            for path in made:
                (files / path).unlink()
        results.append(done)
        np.save("gamma.npy", GAMMA)
    by_option, by_variable, by_nothing = results
    assert by_option == by_variable
    assert by_nothing != by_option or name in NOT_SEEN_HERE


def test_an_option_wins_over_its_variable(apply):
    assert apply("--eps", "0.5", "--format", "json", LAYERNORM_EPS="0.1").json["eps"] == 0.5


def test_an_empty_variable_is_no_option(apply):
    assert (
        apply("--format", "json", LAYERNORM_EPS="", LAYERNORM_GAMMA="").json["eps_source"] == "default"
    )


def test_json_keys(apply):
    report = apply("--format", "json", "-o", "y.npy").json
    assert list(report) == [
        *("input", "tensor", "output", "shape", "dtype", "output_dtype", "kind", "axis", "eps"),
        *("eps_source", "gamma", "beta", "gamma_offset", "backend", "rows", "table", "summary"),
    ]
    assert [list(row) for row in report["table"]] == [COLUMNS] * 6
    assert list(report["summary"]) == ["mean_before", "var_before", "constant_rows", "nonfinite_rows"]
    assert list(report["summary"]["mean_before"]) == ["min", "max"]
    assert list(report["summary"]["var_before"]) == ["min", "max"]


def test_json_values(apply):
    report = apply(
        *("--format", "json", "-o", "y.safetensors", "--gamma", "gamma.npy", "--beta", "beta.npy"),
        *("--kind", "rms", "--gamma-offset", "1", "--eps", "1e-6", "--dtype", "bfloat16"),
    ).json
    table, summary = report.pop("table"), report.pop("summary")
    report.pop("warnings", None)  # another test says that it should not be there
    assert report == {
        "input": "x.npy",
        "tensor": None,
        "output": "y.safetensors",
        "shape": [2, 3, 4],
        "dtype": "float32",
        "output_dtype": "bfloat16",
        "kind": "rms",
        "axis": -1,
        "eps": 1e-6,
        "eps_source": "--eps",
        "gamma": "gamma.npy",
        "beta": "beta.npy",
        "gamma_offset": 1,
        "backend": "numpy",
        "rows": 6,
    }
    stats, after = row_stats(X, kind="rms"), row_stats(load("y.safetensors"), kind="rms")
    assert [[row[name] for row in table] for name in COLUMNS[1:]] == [
        stats.mean.tolist(),
        stats.var.tolist(),
        after.mean.tolist(),
        after.var.tolist(),
    ]
    assert summary == {
        "mean_before": {"min": stats.mean.min(), "max": stats.mean.max()},
        "var_before": {"min": stats.var.min(), "max": stats.var.max()},
        "constant_rows": 0,
        "nonfinite_rows": 0,
    }


ODD = np.array([[1, 2, 4], [7, 7, 7], [np.nan, 1, 2], [np.inf, 1, 2], [-np.inf, 1, 2]], "<f4")


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_that_are_not_finite(form, apply):
    np.save("odd.npy", ODD)
    done = apply("--format", form, "--rows", "all", x="odd.npy")
    text = done.out
    if form in ("json", "jsonl"):
        json.loads(text.splitlines()[-1] if form == "jsonl" else text, parse_constant=pytest.fail)
        assert '"NaN"' in text
        assert '"Infinity"' in text
        assert '"-Infinity"' in text
    table = table_of(text, form)
    assert [row[0] for row in table] == [[0], [1], [2], [3], [4]]
    assert [bool(np.isfinite(row[1:]).all()) for row in table] == [True, True, False, False, False]
    assert done.err == (
        "layernorm: warning: odd.npy: 3 rows with NaN or inf, all NaN in the output; "
        "the first is row (2,)\n"
    )


def test_summary_speaks_of_all_rows(apply):
    np.save("odd.npy", ODD)
    summary = apply("--format", "json", "--rows", "0", x="odd.npy").json["summary"]
    assert summary["nonfinite_rows"] == 3
    assert summary["constant_rows"] == 1
    assert summary["mean_before"] == {"min": pytest.approx(7 / 3), "max": 7}
    assert summary["var_before"] == {"min": 0, "max": pytest.approx(14 / 9)}


EXACT = {"json": 0, "jsonl": 0, "csv": 0, "table": 5e-6, "markdown": 5e-6}


@pytest.mark.parametrize("rows", ["0", "1", "2", "5", "6", "7", "all", None])
@pytest.mark.parametrize("form", FORMATS)
def test_rows(form, rows, apply):
    text = apply("--format", form, *([] if rows is None else ["--rows", rows]), x="long.npy").out
    if rows is None:
        rows = "all" if form in ("csv", "jsonl") else "10"
    count = 21 if rows == "all" else int(rows)
    shown = [*range((count + 1) // 2), *range(21 - count // 2, 21)]
    stats = row_stats(np.load("long.npy"))
    table = table_of(text, form)
    assert [row[0] for row in table] == [[place] for place in shown]
    np.testing.assert_allclose([row[1] for row in table], stats.mean[shown], EXACT[form])
    np.testing.assert_allclose([row[2] for row in table], stats.var[shown], EXACT[form])
    if form in ("table", "markdown"):
        assert (f"{21 - count} of 21 rows not shown" in text) == (count < 21)
    if form == "json":
        assert json.loads(text)["rows"] == 21


@pytest.mark.parametrize("rows", ["21", "22", str(2**70)])
def test_more_rows_than_there_are(rows, apply):
    assert apply("--rows", rows, x="long.npy").out == apply("--rows", "all", x="long.npy").out


def test_csv_quotes_the_index(apply):
    lines = apply("--format", "csv").out.splitlines()
    assert lines[0] == "row,mean_before,var_before,mean_after,var_after"
    assert [line.split(",", 2)[:2] for line in lines[1:]] == [
        [f'"{i}', f'{j}"'] for i in range(2) for j in range(3)
    ]
    np.save("v.npy", X[0, 0])
    (row,) = csv.DictReader(io.StringIO(apply("--format", "csv", x="v.npy").out))
    assert row["row"] == ""


def test_lines_of_the_table(apply):
    np.save("odd.npy", ODD)
    options = ["--rows", "4", "--gamma", "g.npy", "-o", "y.npy", "--eps", "1e-3"]
    np.save("g.npy", np.ones(3, "f4"))
    lines = apply(*options, x="odd.npy").out.splitlines()
    assert lines[0] == "odd.npy: float32 (5, 3), 5 rows"
    assert lines[1].startswith("layer norm over axis -1, eps 0.001 (--eps), gamma g.npy")
    assert lines[2] == "output y.npy: float32"
    assert re.split("  +", lines[3]) == ["row", "mean before", "var before", "mean after", "var after"]
    assert len({len(line) for line in lines[3:8]}) == 1
    assert lines[8:] == [
        "1 of 5 rows not shown; --rows all shows them",
        "all rows before: mean 2.33333 to 7, var 0 to 1.55556",
        "rows constant: 1",
        "rows with NaN or inf: 3",
    ]


def test_table_and_markdown_say_the_same(apply):
    plain, markdown = (apply("--format", form, x="long.npy").out for form in ("table", "markdown"))
    words = [re.sub(r"\| ---: (\| ---: )*\||\|", "", text).split() for text in (plain, markdown)]
    assert words[0] == words[1]


@pytest.mark.parametrize("axis", ["-1", "-2", "0"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("form", ["csv", "safetensors"])
def test_save_stats(form, kind, axis, apply):
    apply("--save-stats", f"s.{form}", "-o", "y.npy", "--axis", axis, "--kind", kind, "--rows", "1")
    leading = X.shape[: int(axis) % 3]
    if form == "safetensors":
        stats = load_file("s.safetensors")
        assert {array.shape for array in stats.values()} == {leading}
        assert {str(array.dtype) for array in stats.values()} == {"float64"}
    else:
        with open("s.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row.pop("row") for row in rows] == [",".join(map(str, i)) for i in np.ndindex(*leading)]
        stats = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    assert set(stats) == {"mean", "var", "rstd", "mean_after", "var_after"}
    truth = row_stats(X, axis=int(axis), kind=kind)
    after = row_stats(np.load("y.npy"), axis=int(axis), kind=kind)
    for name, expected in (
        *(("mean", truth.mean), ("var", truth.var), ("rstd", truth.rstd)),
        *(("mean_after", after.mean), ("var_after", after.var)),
    ):
        np.testing.assert_array_equal(stats[name].reshape(-1), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_save_stats_does_not_change_the_report(form, apply):
    options = ["--rows", "5", "--format", form]
    plain = apply(*options, x="long.npy").out
    assert apply(*options, "--save-stats", "s.csv", x="long.npy").out == plain


def test_save_stats_of_no_rows(apply):
    np.save("none.npy", np.zeros((0, 4), "f4"))
    apply("--save-stats", "s.csv", x="none.npy")
    assert Path("s.csv").read_text() == "row,mean,var,rstd,mean_after,var_after\n"
    apply("--save-stats", "s.safetensors", x="none.npy")
    assert load_file("s.safetensors")["mean"].shape == (0,)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_residual_and_sum(dtype, apply):
    apply("--residual", "residual.npy", "--sum-out", "sum.npy", "-o", "y.npy", "--dtype", dtype)
    wide = X.astype("f8") + RESIDUAL
    y, total = np.load("y.npy"), np.load("sum.npy")
    assert y.dtype == total.dtype == dtype
    np.testing.assert_array_equal(total, wide.astype(dtype))
    np.testing.assert_array_equal(y, layer_norm(wide).astype(dtype))


def test_residual_is_in_the_table(apply):
    table = apply("--residual", "residual.npy", "--format", "json").json["table"]
    stats = row_stats(X.astype("f8") + RESIDUAL)
    assert [row["mean_before"] for row in table] == stats.mean.tolist()


def test_sum_to_stdout_and_safetensors(apply):
    apply("--residual", "residual.npy", "--sum-out", "sum.safetensors", "-o", "y.npy")
    done = apply("--residual", "residual.npy", "--sum-out", "-", "-o", "z.npy")
    total = np.load(io.BytesIO(done.stdout))
    np.testing.assert_array_equal(total, load("sum.safetensors"))
    np.testing.assert_array_equal(np.load("y.npy"), np.load("z.npy"))


FLOATS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_into_safetensors(dtype, apply):
    apply("--dtype", dtype, "-o", "y.safetensors", "--gamma", "gamma.npy")
    apply("--dtype", FLOATS[dtype], "-o", "z.safetensors", "--gamma", "gamma.npy")
    with open("y.safetensors", "rb") as one, open("z.safetensors", "rb") as other:
        data = one.read()
        assert data == other.read()
    length = int.from_bytes(data[:8], "little")
    assert json.loads(data[8 : 8 + length])["y"]["dtype"] == FLOATS[dtype]
    y = np.frombuffer(data[8 + length :], getattr(ml_dtypes, dtype, None) or dtype).astype("f8")
    truth = layer_norm(X, GAMMA).reshape(-1)
    if dtype in ("float64", "float32"):
        np.testing.assert_array_equal(y, truth.astype(dtype).astype("f8"))
        return
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    size = np.dtype(kind).itemsize
    with np.errstate(invalid="ignore"):
        every = np.arange(256**size, dtype=f"u{size}").view(kind).astype("f8")
    every = every[np.isfinite(every)]
    nearest = [np.abs(every - value).min() for value in truth]
    np.testing.assert_array_equal(np.abs(y - truth), nearest)


def test_metadata_of_safetensors(apply):
    apply("-o", "y.safetensors", "--save-stats", "s.safetensors", "--eps", "0.5", "--kind", "rms")
    for name, keys in (("y", {"y"}), ("s", {"mean", "var", "rstd", "mean_after", "var_after"})):
        with safe_open(f"{name}.safetensors", "numpy") as file:
            assert set(file.keys()) == keys
            metadata = file.metadata()
        assert metadata["tool"] == f"layernorm {__version__}"
        assert (metadata["eps"], metadata["kind"]) == ("0.5", "rms")


def test_output_tensor_is_named_as_the_input(apply):
    save_file({"a.b": X, "c": X * 2}, "acts.safetensors")
    report = apply("-o", "y.safetensors", "--format", "json", x="acts.safetensors#a.b").json
    assert (report["tensor"], report["input"]) == ("a.b", "acts.safetensors#a.b")
    assert list(load_file("y.safetensors")) == ["a.b"]
    np.testing.assert_array_equal(load("y.safetensors"), layer_norm(X).astype("f4"))


@pytest.mark.parametrize("where", ["x", "--gamma", "--residual"])
def test_assume_dtype(where, apply):
    values = {"x": X, "--gamma": GAMMA, "--residual": RESIDUAL}[where].astype(ml_dtypes.bfloat16)
    np.save("v2.npy", values)
    np.save("u2.npy", values.view("u2"))
    np.save("wide.npy", values.astype("f4"))
    for raw in ("v2", "u2"):
        for name, assume in ((raw, ["--assume-dtype", "bfloat16"]), ("wide", [])):
            options = [*assume, "--dtype", "float64", "-o", f"{name}_y.npy", "--force", "--quiet"]
            if where == "x":
                apply(*options, x=f"{name}.npy")
            else:
                apply(*options, where, f"{name}.npy")
        np.testing.assert_array_equal(np.load(f"{raw}_y.npy"), np.load("wide_y.npy"))


def test_assume_dtype_leaves_typed_elements_alone(apply):
    apply("--assume-dtype", "bfloat16", "-o", "y.npy")
    np.testing.assert_array_equal(np.load("y.npy"), layer_norm(X).astype("f4"))


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("-o", "old.npy"),
        ("--sum-out", "old.safetensors"),
        ("--save-stats", "old.csv"),
        ("-o", "link.npy"),
    ],
)
def test_force(option, path, files, main, apply):
    old = files / path
    if path == "link.npy":
        old.symlink_to("nowhere.npy")
    else:
        old.write_bytes(b"old")
    options = ["--residual", "residual.npy", option, path]
    assert_refused(main("apply", "x.npy", *options), 2, path, "exists", "--force")
    assert path == "link.npy" or old.read_bytes() == b"old"
    apply(*options, "--force")
    assert old.read_bytes() != b"old"
    apply(*options, "-f")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_mode_follows_the_umask(mask, apply):
    before = os.umask(mask)
    try:
        apply("-o", "y.npy", "--save-stats", "s.csv")
    finally:
        os.umask(before)
    for path in ("y.npy", "s.csv"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o666 & ~mask


def test_the_name_given_is_the_name_written(apply):
    assert apply("-o", "y.tar.npy").created == {"y.tar.npy"}
    assert apply("-o", ".npy").created == {".npy"}


def test_quiet(apply, main):
    np.save("odd.npy", ODD)
    for options in (
        ["--quiet"],
        ["-q", "--format", "csv"],
        ["--quiet", "--format", "json", "-o", "y.npy"],
    ):
        done = apply(*options, x="odd.npy")
        assert (done.out, done.err) == ("", "")
    assert_refused(main("apply", "missing.npy", "--quiet"), 3, "missing.npy")


def test_stdout_has_nothing_but_the_npy(apply):
    np.save("odd.npy", ODD)
    done = apply("-o", "-", "--format", "json", x="odd.npy")
    np.testing.assert_array_equal(np.load(io.BytesIO(done.stdout)), layer_norm(ODD).astype("f4"))
    assert done.err.startswith("layernorm: warning: odd.npy: 3 rows")


def test_warning_of_constant_rows(apply):
    np.save("odd.npy", ODD[:2])
    done = apply("--eps", "0", x="odd.npy")
    assert done.err == (
        "layernorm: warning: odd.npy: 1 constant row, all NaN in the output since eps is 0; "
        "the first is row (1,)\n"
    )


def test_warning_of_results_too_large(apply):
    np.save("large.npy", np.full(4, 1e5, "f4"))
    done = apply("--gamma", "large.npy", "--dtype", "float16", "-o", "y.npy")
    count = np.isinf(np.load("y.npy")).sum()
    assert 0 < count < 24
    assert done.err == f"layernorm: warning: x.npy: {count} results too large for float16, now inf\n"


def test_warning_of_surplus_bytes(files, apply):
    (files / "more.npy").write_bytes((files / "x.npy").read_bytes() + b"abc")
    done = apply("-o", "y.npy", x="more.npy")
    assert done.err == "layernorm: warning: more.npy: 3 surplus bytes after the tensor; ignored\n"
    assert np.load("y.npy").shape == X.shape


def save_all_forms(array):
    """The array in every format and memory order; the refs."""
    np.save("c.npy", array)
    np.save("f.npy", np.asfortranarray(array))
    np.save("big.npy", array.astype(array.dtype.newbyteorder(">")))
    np.savez("stored.npz", x=array)
    np.savez_compressed("deflated.npz", x=array)
    save_file({"x": array}, "x.safetensors")
    return ["c.npy", "f.npy", "big.npy", "stored.npz#x", "deflated.npz", "x.safetensors#x"]


@pytest.mark.parametrize("processes", [True, False])
@pytest.mark.parametrize("block_rows", [1, 17, 1000])
@pytest.mark.parametrize("threads", ["1", "2", "3"])
def test_same_bytes_whatever_the_workers(threads, block_rows, processes, here, main, monkeypatch):
    x = np.random.default_rng(2).normal(100, 3, (5, 13, 33)).astype("<f4")
    residual = np.random.default_rng(3).normal(0, 1e4, x.shape).astype("<f4")
    np.save("gamma.npy", x[0, 0])
    np.save("beta.npy", x[0, 1])
    np.save("residual.npy", residual)
    refs = save_all_forms(x)
    options = ["--residual", "residual.npy", "--gamma", "gamma.npy", "--beta", "beta.npy"]

    def results(ref, *more):
        outputs = ["-o", "y.npy", "--sum-out", "sum.npy", "--save-stats", "s.csv", "--force"]
        done = main("apply", ref, *options, *outputs, "--rows", "all", "--format", "csv", *more)
        assert (done.code, done.err) == (0, "")
        return [done.stdout, *((here / name).read_bytes() for name in ("y.npy", "sum.npy", "s.csv"))]

    expected = results("c.npy", "--threads", "1")
    monkeypatch.setattr(pipeline, "BLOCK_ELEMENTS", block_rows * 33)
    monkeypatch.setattr(pipeline, "FORK_ELEMENTS", 0)
    monkeypatch.setattr(workers, "_may_fork", lambda: processes)
    forked = []
    monkeypatch.setattr(os, "fork", lambda real=os.fork: forked.append(1) or real())
    for ref in refs if threads == "2" else refs[:2]:
        assert results(ref, "--threads", threads) == expected, ref
    assert bool(forked) == (processes and threads != "1" and block_rows < 65)


@pytest.mark.parametrize("dtype", ["<f8", "<f2", "<i4", "?"])
def test_same_bytes_whatever_the_file(dtype, here, main):
    x = (np.random.default_rng(2).normal(1, 30, (3, 5, 7))).astype(dtype)
    made = set()
    for ref in save_all_forms(x):
        assert main("apply", ref, "-o", "y.npy", "--force", "--quiet").code == 0
        made.add((here / "y.npy").read_bytes())
    assert len(made) == 1
    y = np.load("y.npy")
    np.testing.assert_array_equal(y, layer_norm(x).astype(y.dtype))


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ([], ["X", "layernorm apply --help"]),
        (["x.npy", "y.npy"], ["y.npy"]),
        (["x.npy", "--nosuch"], ["--nosuch"]),
        (["x.npy", "--threads", "0"], ["--threads"]),
        (["x.npy", "--threads", "two"], ["--threads"]),
        (["x.npy", "--axis", "one"], ["--axis"]),
        (["x.npy", "--axis", "3"], ["axis 3", "(2, 3, 4)", "-3 to 2"]),
        (["x.npy", "--axis", "-4"], ["axis -4"]),
        (["x.npy", "--kind", "batch"], ["batch", "layer", "rms"]),
        (["x.npy", "--format", "xml"], ["xml", "table", "markdown"]),
        (["x.npy", "--rows", "-1"], ["'-1'", "all"]),
        (["x.npy", "--rows", "1.5"], ["'1.5'"]),
        (["x.npy", "--rows", "²"], ["²"]),
        (["x.npy", "--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["x.npy", "--dtype", "nosuch"], ["'nosuch'", "float32"]),
        (["x.npy", "--assume-dtype", "nosuch"], ["'nosuch'"]),
        (["x.npy", "--backend", "nosuch"], ["'nosuch'", "numpy"]),
        (["x.npy", "--device", "cuda"], ["cuda", "cpu"]),
        (["x.npy", "--gamma-offset", "1"], ["--gamma-offset", "gamma"]),
        (["x.npy", "--gamma", "gamma.npy", "--gamma-offset", "2"], ["2", "0, or 1"]),
        (["x.npy", "--gamma", "gamma.npy", "--gamma-offset", "nan"], ["nan"]),
        (["x.npy", "--gamma", "x.npy"], ["gamma x.npy", "(2, 3, 4)", "(4,)"]),
        (["x.npy", "--beta", "gamma34.npy"], ["beta gamma34.npy", "(3, 4)", "(4,)"]),
        (["x.npy", "--residual", "gamma.npy"], ["residual gamma.npy", "(4,)", "(2, 3, 4)"]),
        (["x.npy", "--sum-out", "s.npy"], ["--sum-out", "--residual"]),
        (["x.npy", "-o", "y.npy", "--save-stats", "./y.npy"], ["y.npy"]),
        (["x.npy", "-o", "-", "--residual", "residual.npy", "--sum-out", "-"], ["-"]),
        (["x.npy", "--save-stats", "-"], ["--save-stats"]),
        (["x.npy", "--save-stats", "s.npy"], ["s.npy", ".csv"]),
        (["x.npy", "-o", "y.npz"], ["y.npz", ".npy"]),
        (["x.npy", "-o", "y.npy", "--dtype", "bfloat16"], ["y.npy", "bfloat16", "--dtype float32"]),
        (["x.npy", "-o", "-", "--dtype", "float8_e5m2"], ["float8_e5m2", ".safetensors"]),
        (["x.npy", "-o"], ["-o"]),
        (["-", "--gamma", "-"], ["standard input", "twice"]),
        (["x.npy#name"], ["x.npy#name"]),
        (["x.npy#"], ["x.npy#"]),
        ([""], ["empty"]),
    ],
    ids=lambda value: (
        " ".join(value) if isinstance(value, list) and value and value[0][:1] == "x" else None
    ),
)
def test_usage_errors(arguments, mentions, files, main):
    assert_refused(main("apply", *arguments), 2, *mentions)


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["missing.npy"], ["missing.npy", "no such file"]),
        (["missing.npy#name"], ["missing.npy", "no such file"]),
        (["x.npy", "--gamma", "missing.npy"], ["missing.npy"]),
        (["x.npy", "--residual", "missing.npy"], ["missing.npy"]),
        (["."], ["directory"]),
        (["acts.safetensors"], ["acts.safetensors", "2 tensors", "a.b, c"]),
        (["acts.safetensors#d"], ["acts.safetensors", "'d'", "a.b, c"]),
        (["cut.npy", "-o", "y.npy"], ["cut.npy", "truncated", "95", "96"]),
        (["x.npy", "-o", "nowhere/y.npy"], ["nowhere/y.npy", "directory"]),
        (["x.npy", "--save-stats", "nowhere/s.csv"], ["nowhere/s.csv", "directory"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_of_files(arguments, mentions, files, main):
    save_file({"a.b": X, "c": X}, "acts.safetensors")
    (files / "cut.npy").write_bytes((files / "x.npy").read_bytes()[:-1])
    assert_refused(main("apply", *arguments), 3, *mentions)


@pytest.mark.parametrize("output", ["y.npy", "-"])
def test_truncated_pipe(output, files, layernorm):
    done = layernorm("apply", "-", "-o", output, stdin=(files / "x.npy").read_bytes()[:-1])
    assert (done.code, done.created) == (3, set())
    assert done.err.startswith("layernorm: -: truncated: 95 bytes of data\n")


def test_unwritable_folder(files, main):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (files / "locked").mkdir(mode=0o500)
    assert_refused(main("apply", "x.npy", "-o", "locked/y.npy"), 3, "locked/y.npy", "permission denied")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("output", [["-o", "/dev/full"], ["-o", "-"], []])
def test_no_space(output, files, layernorm):
    with open("/dev/full", "wb") as full:
        done = layernorm("apply", "x.npy", *output, stdout=None if "/dev/full" in output else full)
    assert_refused(done, 3, "no space left")


def test_an_engine_that_does_not_import(files, layernorm):
    (files / "modules" / "torch").mkdir(parents=True)
    (files / "modules" / "torch" / "__init__.py").write_text("raise ImportError('libfoo.so is missing')")
    done = layernorm("apply", "x.npy", "--backend", "torch", PYTHONPATH=str(files / "modules"))
    assert_refused(done, 4, "torch", "libfoo.so is missing")


NAMES = [
    "[bold]x[-b].npy",
    ":smile:.npy",
    "a  b.npy",
    "*a* _b_ `c` <i>|d.npy",
    "ünï中🙂.npy",
    "\x1b[31mred\x1b[0m.npy",
    "two\nlines.npy",
    "tab\tbell\x07.npy",
    "\u202egnp.npy",
    "a#b.npy",
    "-1.npy",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["table", "json", "markdown"])
def test_file_names(name, form, here, main):
    np.save(name, ODD)
    done = main("apply", "--format", form, "-o", f"y{name}", "--", name)
    assert done.code == 0
    assert done.created == {f"y{name}"}
    for text in (done.out, done.err):
        assert all(c == "\n" or c.isprintable() for c in text)
    assert f": {printable(name)}: 3 rows" in done.err
    if form == "json":
        assert (done.json["input"], done.json["output"]) == (name, f"y{name}")
    elif form == "table":
        assert f"{printable(name)}: float32 (5, 3), 5 rows\n" in done.out
        assert f"output y{printable(name)}: float32\n" in done.out


@pytest.mark.parametrize("name", ["*a*.npy", "__a__.npy", "<i>.npy"])
def test_markdown_does_not_take_names_for_markup(name, here, main):
    np.save(name, X)
    line = main("apply", "--format", "markdown", name).out.splitlines()[0]
    assert name[1:-4] in line.replace("\\", "").replace("&lt;", "<").replace("&gt;", ">")
    assert not line.startswith(name)  # but in backticks, or escaped


@pytest.mark.parametrize("name", NAMES)
def test_names_of_missing_files(name, here, main):
    done = main("apply", "--", name)
    assert_refused(done, 3, f"layernorm: {printable(name)}: no such file or directory")
    assert all(c == "\n" or c.isprintable() for c in done.err)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_names(name, here, main):
    save_file({name: X, "other": X}, "acts.safetensors")
    done = main("apply", f"acts.safetensors#{name}", "-o", "y.safetensors")
    assert done.code == 0, done.err
    assert f" ({printable(name)}): float32 (2, 3, 4)" in done.out
    assert all(c == "\n" or c.isprintable() for c in done.out)
    assert list(load_file("y.safetensors")) == [name]
    done = main("apply", "acts.safetensors")
    assert_refused(done, 3, printable(name))
    assert all(c == "\n" or c.isprintable() for c in done.err)


def test_file_name_that_is_not_text(x, layernorm):
    name = b"\xff.npy"
    os.rename(b"x.npy", name)
    done = layernorm("apply", name, "--format", "json")
    assert (done.code, done.err) == (0, "")
    assert os.fsencode(done.json["input"]) == name
    assert "\\udcff.npy: float32" in layernorm("apply", name).out


ENCODINGS = {
    "ascii": "\\xfc\\u4e2d",
    "latin-1": "ü\\u4e2d",
    "utf-8": "ü中",
    "ascii:strict": "\\xfc\\u4e2d",
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_of_stdout(encoding, here, layernorm):
    np.save("ü中.npy", ODD)
    done = layernorm("apply", "ü中.npy", PYTHONIOENCODING=encoding)
    out, err = (text.decode(encoding.split(":")[0]) for text in (done.stdout, done.stderr))
    assert done.code == 0
    assert out.startswith(f"{ENCODINGS[encoding]}.npy: float32")
    assert err.startswith(f"layernorm: warning: {ENCODINGS[encoding]}.npy: 3 rows")


def test_json_is_ascii(here, layernorm):
    np.save("ü中.npy", ODD)
    done = layernorm("apply", "ü中.npy", "--format", "json", PYTHONIOENCODING="ascii")
    assert done.json["input"] == "ü中.npy"


@pytest.mark.parametrize(
    "variables",
    [
        {"FORCE_COLOR": "1", "COLUMNS": "20", "TERM": "xterm-256color"},
        {"CLICOLOR_FORCE": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "1"},
        {"COLUMNS": "1000", "LINES": "3", "TERM": "dumb"},
        {"TTY_INTERACTIVE": "1", "NO_COLOR": "1"},
    ],
    ids=" ".join,
)
def test_nothing_changes_off_a_terminal(variables, files, layernorm, main):
    long = files / f"{'long_name_' * 20}.npy"
    np.save(long.name, X)
    plain = main("apply", long.name, "--rows", "all")
    done = layernorm("apply", long.name, "--rows", "all", **variables)
    assert (done.out, done.err) == (plain.out, "")
    assert long.name in done.out
    assert "\x1b" not in done.out
    assert "…" not in done.out
    assert "..." not in done.out
    assert len(table_of(done.out, "table")) == 6


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}], ids=str)
def test_no_escapes_from_the_progress_bar_off_a_terminal(variables, files, layernorm):
    done = layernorm("apply", "x.npy", "--progress", **variables)
    assert (done.code, done.err.strip()) == (0, "")


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
@pytest.mark.parametrize("columns", [40, 100])
def test_table_in_a_terminal(columns, variables, files, in_terminal, main):
    np.save("wide.npy", X * 1e-5)
    code, shown = in_terminal("apply", "wide.npy", "--rows", "4", columns=columns, **variables)
    assert code == 0
    plain = main("apply", "wide.npy", "--rows", "4").out
    text = ESCAPES.sub("", shown)
    assert "…" not in text
    for number in re.findall(r"-?\d\.\d+e?[-+]?\d*", plain):
        assert number in text
    if columns == 100:
        assert "╭" in text
        assert "⋮" in text
        assert max(map(len, text.splitlines())) <= columns
        assert bool(ESCAPES.search(shown)) == (variables == {})
    else:
        assert not ESCAPES.search(shown)
    rows = "\n".join(line.replace(" │ ", "  ").strip("│ \r") for line in text.splitlines())
    assert table_of(rows, "table") == table_of(plain, "table")


def test_names_in_a_terminal(here, in_terminal):
    name = "[bold]x[-b] :smile: \x1b[31m.npy"
    np.save(name, X)
    code, shown = in_terminal("apply", name, columns=100, NO_COLOR="1")
    assert code == 0
    assert shown.startswith(f"{printable(name)}: float32")
    assert "\x1b" not in shown


def test_ascii_terminal(files, in_terminal):
    code, shown = in_terminal("apply", "x.npy", columns=100, NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert code == 0
    assert shown.isascii()
    assert "+--" in shown


@pytest.fixture
def slow_input(here):
    """The reading end of a pipe through which rows come for more than a second."""
    np.save("x.npy", np.ones((1500, 1024), "<f4"))
    script = (
        "import sys, time; data = open('x.npy', 'rb').read(); out = sys.stdout.buffer\n"
        "for at in range(0, len(data), 1 << 20): out.write(data[at : at + (1 << 20)]); time.sleep(0.25)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as feeder:
        yield feeder.stdout


BAR = re.compile(r"\d+/1500 rows")


def test_progress_bar(slow_input, in_terminal):
    code, shown = in_terminal("apply", "-", "--rows", "0", columns=100, stdin=slow_input)
    assert code == 0
    assert BAR.search(ESCAPES.sub("", shown))
    assert shown.index("rows") < shown.index("float32")


@pytest.mark.parametrize("options", [["--no-progress"], ["--quiet", "--progress"]], ids=" ".join)
def test_no_progress_bar(options, slow_input, in_terminal):
    code, shown = in_terminal("apply", "-", "--rows", "0", *options, stdin=slow_input, columns=100)
    assert code == 0
    assert not BAR.search(ESCAPES.sub("", shown))


def test_no_progress_bar_for_little_work(files, in_terminal):
    _, shown = in_terminal("apply", "x.npy", columns=100, NO_COLOR="1")
    assert "\x1b" not in shown


def test_rows_go_to_stdout_beside_the_progress_bar(here, in_terminal):
    np.save("x.npy", np.ones((10_000, 128), "<f4"))  # four blocks
    with open("rows.csv", "wb") as rows:
        code, shown = in_terminal("apply", "x.npy", "--format", "csv", "--progress", stdout=rows)
    assert code == 0
    assert len((here / "rows.csv").read_text().splitlines()) == 10_001
    assert "10000/10000" in ESCAPES.sub("", shown)


MEASURE = """
import json, os, subprocess, sys, time

def rollup(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0

process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
together = 0
while True:
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid:
        break
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        pids = [process.pid, *file.read().split()]
    together = max(together, sum(map(rollup, pids)))
    time.sleep(0.02)
process.returncode = status
print(json.dumps([status, usage.ru_maxrss, together]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1 << 19, 1024), ["--threads", "1"]),
        ((1 << 19, 1024), ["--threads", "2"]),
        ((1 << 11, 1 << 18), ["--threads", "2"]),
        ((1 << 17, 1024), ["-o", "y.npy", "--save-stats", "s.safetensors"]),
        ((1 << 19, 4), ["--format", "csv"]),
        ((1 << 19, 4), ["--save-stats", "s.csv", "--rows", "0"]),
    ],
    ids=str,
)
def test_memory_does_not_depend_on_the_size(shape, options, here):
    """No process holds more than 120 MB, nor do all of them together (shared pages counted once)."""
    sparse_npy("x.npy", shape)
    command = [COMMAND, "apply", "x.npy", "--backend", "numpy", *options]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], capture_output=True, env=environment(), check=True
    )
    status, largest, together = json.loads(done.stdout)
    assert (status, done.stderr) == (0, b"")
    assert 10_000 < largest < 120_000
    assert 10_000 < together < 120_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_pipe(here):
    sparse_npy("x.npy", (1 << 17, 1024))
    with (
        open("x.npy", "rb") as file,
        subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as cat,
    ):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, COMMAND, "apply", "-", "-o", "y.npy", "--backend", "numpy"],
            stdin=cat.stdout,
            capture_output=True,
            env=environment(),
            timeout=TIMEOUT,
            check=True,
        )
    status, largest, _ = json.loads(done.stdout)
    assert (status, done.stderr) == (0, b"")
    assert largest < 120_000
    assert os.path.getsize("y.npy") == os.path.getsize("x.npy")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_other_names_of_standard_output(name, here, layernorm):
    np.save("x.npy", X)
    expected = layernorm("apply", "x.npy", "-o", "-").stdout
    assert layernorm("apply", "x.npy", "-o", name).stdout == expected
    with open("y.npy", "wb") as file:
        assert layernorm("apply", "x.npy", "-o", name, stdout=file).code == 0
    assert Path("y.npy").read_bytes() == expected


@pytest.mark.parametrize("option", ["--threads", "--axis"])
def test_numbers_have_no_underscores(option, here, main):
    np.save("x.npy", X)
    assert_refused(main("apply", "x.npy", option, "1_0"), 2, option, "1_0")
