"""The arithmetic of one row as a person writes it down, as tables, json, jsonl, csv or markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..norm.columns import BatchRow
from ..norm.explanation import Explanation, SweepPoint
from ..norm.low_precision import InDType
from ..results import ExplainResult
from .strict_json import to_json
from .tables import Table, fits, number

__all__ = ["explain_csv", "explain_json", "explain_jsonl", "explain_tables"]

Float64 = npt.NDArray[np.float64]
LINE = 78  # a sum that would be longer is not written out
KINDS = {"layer": "layer norm", "rms": "rms norm"}
NAMES = {"layer": "var", "rms": "mean square"}
OPTIONAL = ("grad_feature", "grad", "compare_axis")


def explain_json(result: ExplainResult) -> str:
    """Return all steps as one JSON object on indented lines."""
    fields = result._asdict()
    del fields["steps"], fields["warnings"]  # warnings go to standard error
    steps = _lists(result.steps._asdict())
    fields |= {k: v for k, v in steps.items() if not (k in OPTIONAL and v is None)}
    return to_json(fields, indent=2) + "\n"


def explain_jsonl(result: ExplainResult, features: int | None) -> str:
    """Return a feature a line as JSON."""
    columns = _per_feature(result.steps)
    lines = zip(*(_picked(values, features) for values in columns.values()), strict=True)
    return "".join(to_json(dict(zip(columns, line, strict=True))) + "\n" for line in lines)


def explain_csv(result: ExplainResult, features: int | None) -> str:
    """Return a feature a line."""
    columns = _per_feature(result.steps)
    lines = zip(*(_picked(values, features) for values in columns.values()), strict=True)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([columns, *(["" if v is None else v for v in line] for line in lines)])
    return out.getvalue()


def explain_tables(result: ExplainResult, features: int | None, width: int | None = None) -> list[Table]:
    """Return the steps and what eps does as tables, of so many features; None for all.

    width is that of the terminal, if there is one: the steps are two tables where one is too wide.
    """
    tables = list(_step_tables(result, features, width))
    tables += [_eps_table(result), _dtype_table(result.steps)]
    if result.steps.compare_axis is not None:
        tables.append(_batch_table(result, result.steps.compare_axis, features))
    if result.steps.grad is not None:
        tables.append(_grad_table(result, result.steps.grad, features))
    return tables


def _lists(fields: Mapping[str, object]) -> dict[str, object]:
    """Arrays as lists, here and in the records of fields."""
    plain: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            plain[name] = value.tolist()
        else:
            plain[name] = _lists(value._asdict()) if isinstance(value, BatchRow) else value
    return plain


def _per_feature(steps: Explanation) -> dict[str, Sequence[object]]:
    nothing = (None,) * steps.x.size

    def listed(values: Float64 | None) -> Sequence[object]:
        return nothing if values is None else values.tolist()

    columns: dict[str, Sequence[object]] = {
        "feature": range(steps.x.size),
        "x": listed(steps.x),
        "centred": listed(steps.centred),
        "squared": listed(steps.squared),
        "xhat": listed(steps.xhat),
        "gamma": listed(steps.gamma_values),
        "beta": listed(steps.beta_values),
        "y": listed(steps.y),
    }
    if steps.compare_axis is not None:
        columns["batch_y"] = listed(steps.compare_axis.y)
    if steps.grad is not None:
        columns["grad"] = listed(steps.grad)
    return columns


def _picked(values: Sequence[object], count: int | None) -> Sequence[object]:
    """The first and the last of values, count in all."""
    if count is None or count >= len(values):
        return values
    return [*values[: -(-count // 2)], *values[len(values) - count // 2 :]]


def _cells(columns: Mapping[str, Float64], features: int | None) -> tuple[list[list[str]], int | None]:
    """A row of text for each feature shown, and the number of the row before which some are left out."""
    size = next(iter(columns.values())).size
    places = [int(str(place)) for place in _picked(range(size), features)]
    rows = [[str(place), *(number(float(v[place])) for v in columns.values())] for place in places]
    return rows, -(-len(places) // 2) if rows and len(places) < size else None


def _step_tables(result: ExplainResult, features: int | None, width: int | None) -> Iterator[Table]:
    steps = result.steps
    columns = {"x": steps.x}
    if result.kind == "layer":
        columns["x - mean"] = steps.centred
    columns["squared"] = steps.squared
    first = list(columns)
    columns["xhat"] = steps.xhat
    if steps.gamma_values is not None:
        columns["gamma"] = steps.gamma_values
    if steps.beta_values is not None:
        columns["beta"] = steps.beta_values
    columns["y"] = steps.y
    rows, gap = _cells(columns, features)
    above, below = list(_above(result)), list(_below(result, len(rows)))
    whole = Table(("feature", *columns), rows, above, below, gap)
    if width is None or fits(whole, width):
        yield whole
        return
    half = 1 + len(first)
    yield Table(("feature", *first), [row[:half] for row in rows], above, (), gap)
    rest = [name for name in columns if name not in first]
    yield Table(("feature", *rest), [[row[0], *row[half:]] for row in rows], (), below, gap)


def _above(result: ExplainResult) -> Iterator[str]:
    steps, width = result.steps, result.steps.x.size
    tensor = f" ({result.tensor})" if result.tensor else ""
    row = ", ".join(map(str, steps.row))
    of = f", row {row} of {result.shape[: len(steps.row)]}" if len(steps.row) > 1 else f", row {row}"
    yield f"{result.input}{tensor}: {result.dtype} {result.shape}{of if steps.row else ''}"
    offset = f" + {result.gamma_offset:g}" if result.gamma_offset else ""
    named = (
        f"gamma {result.gamma}{offset}" if result.gamma else "",
        f"beta {result.beta}" if result.beta else "",
    )
    parameters = ", ".join(name for name in named if name) or "no gamma, no beta"
    kind = KINDS[result.kind]
    yield f"{kind} over axis {result.axis}, eps {steps.eps:g} ({result.eps_source}), {parameters}"
    if result.kind == "layer":
        yield _average("mean", "x", steps.x, steps.mean)
    name = NAMES[result.kind]
    yield _average(name, "squared", steps.squared, steps.var)
    root = f"sqrt({number(steps.var)} + {number(steps.eps)})"
    yield f"std = sqrt({name} + eps) = {root} = {number(steps.std)}"
    yield f"rstd = 1 / std = {number(steps.rstd)}"
    top, value = "x", number(float(steps.x[0]))
    if result.kind == "layer":
        top, value = "(x - mean)", f"({value} - {number(steps.mean)})"
    formula, example = f"{top} / std", f"{value} / {number(steps.std)}"
    if steps.gamma_values is not None:
        formula += " * gamma"
        example += f" * {number(float(steps.gamma_values[0]))}"
    if steps.beta_values is not None:
        formula += " + beta"
        example += f" + {number(float(steps.beta_values[0]))}"
    yield f"y = {formula}"
    yield f"y of feature 0 = {example} = {number(float(steps.y[0]))}"
    if width == 1 and result.kind == "layer":
        yield "a single feature is its own mean: x - mean is 0, whatever x is"


def _average(name: str, of: str, values: Float64, average: float) -> str:
    """A mean written out, or by its sum where the line would be too long."""
    count = values.size
    if count <= LINE // 4:
        terms = " + ".join(number(value) for value in values.tolist())
        line = f"{name} = ({terms}) / {count} = {number(average)}"
        if len(line) <= LINE:
            return line
    total = average * count
    if not math.isfinite(total):
        return f"{name} = (sum of {of}) / {count} = {number(average)}"
    return f"{name} = (sum of {of}) / {count} = {number(total)} / {count} = {number(average)}"


def _below(result: ExplainResult, shown: int) -> Iterator[str]:
    steps, width = result.steps, result.steps.x.size
    if shown < width:
        yield f"{width - shown} of {width} features not shown; --features all shows them"
    if not np.isfinite(steps.x).all():
        yield "the row holds NaN or inf: so do its mean and var, and all of y is NaN"
    elif (steps.x == steps.x[0]).all() and result.kind == "layer" and width > 1:
        yield (
            "all features are equal: x - mean is 0, and y is beta"
            if steps.eps
            else "all features are equal: x - mean is 0, var + eps is 0 too, and 0 / 0 is NaN"
        )
    elif math.isinf(steps.var):
        yield "the squares are beyond float64: std is that of x times a small power of two,"
        yield "which is exact, and then divided by it"
    elif steps.var == 0 and steps.x.any() and width > 1:
        yield "the squares are too small for float64: where they matter, std is that of x"
        yield "times a large power of two, which is exact, and then divided by it"


def _eps_table(result: ExplainResult) -> Table:
    steps = result.steps
    ratio, shrink = steps.eps_effect
    divided = f"{number(steps.var)} / ({number(steps.var)} + {number(steps.eps)})"
    var = NAMES[result.kind]
    above = [
        f"What eps does: {var} after = {var} / ({var} + eps) = {divided} = {number(ratio)}",
        f"{var} after is that of xhat; eps shrinks it by {_percent(shrink)}",
    ]
    rows = [
        (
            number(point.eps),
            number(point.var_after),
            _percent(_shrink(steps, point)),
            "this norm's" if point.eps == steps.eps else "",
        )
        for point in steps.sweep
    ]
    return Table(("eps", f"{var} after", "shrink", ""), rows, above, list(_scaled(steps)), align="rrrl")


def _scaled(steps: Explanation) -> Iterator[str]:
    factor, change, after = steps.scaled
    if not steps.centred.any():
        yield f"x times {factor:g} has the same xhat: 0"
    elif steps.eps == 0:
        if change == 0:
            yield f"x times {factor:g} has the same y: eps is 0, and std grows as x does"
    elif change == 0:
        yield f"x times {factor:g} has the same y: eps is nothing beside its squares"
    elif change > 0:
        yield f"x times {factor:g} changes y by {number(change)} at most, var after to {number(after)}"
        yield "eps is why: std grows as x does, but for eps; with eps 0, y is the same"


def _shrink(steps: Explanation, point: SweepPoint) -> float:
    below = steps.var + point.eps
    if 0 < below < math.inf and 0 < point.var_after < 1:
        return 100 * point.eps / below
    return 100 * (1 - point.var_after)


def _percent(value: float) -> str:
    return f"{number(value)} %"


def _dtype_table(steps: Explanation) -> Table:
    rows = [
        (
            short.dtype,
            number(short.eps),
            _var_in_dtype(short),
            "yes" if short.eps_survives else "no",
            number(short.max_abs_error),
        )
        for short in steps.dtypes
    ]
    above = ["The same with each step rounded to a shorter dtype, against float64"]
    below = ["eps survives where it is not 0, and var + eps is not var"]
    return Table(
        ("dtype", "eps", "var", "eps survives", "max abs error of y"), rows, above, below, align="lrrlr"
    )


def _var_in_dtype(short: InDType) -> str:
    what = " (overflows)" if short.var_overflows else " (underflows)" if short.var_underflows else ""
    return number(short.var) + what


def _batch_table(result: ExplainResult, batch: BatchRow, features: int | None) -> Table:
    steps = result.steps
    name = KINDS[result.kind]
    columns = {
        "mean of column": batch.mean,
        "var of column": batch.var,
        "y, batch": batch.y,
        f"y, {result.kind}": steps.y,
    }
    rows, gap = _cells(columns, features)
    above = [
        f"Beside batch normalization of the same matrix, {batch.rows} rows by {steps.x.size} features",
        f"{name}: each x among the features of its row; other rows change nothing",
        "batch norm: each x among the rows of its column, the other features apart",
        "(population var; the same eps, gamma and beta)",
    ]
    difference = np.abs(batch.y - steps.y)
    known = difference[~np.isnan(difference)]
    below = [f"y differs by {number(float(known.max()))} at most"] if known.size else []
    if batch.rows == 1:
        below.append("of a single row, each column's x - mean is 0")
    return Table(("feature", *columns), rows, above, below, gap)


def _grad_table(result: ExplainResult, grad: Float64, features: int | None) -> Table:
    steps, j, d = result.steps, result.steps.grad_feature or 0, result.steps.x.size
    mean_term, mean_number = (" - 1/d", f" - 1/{d}") if result.kind == "layer" else ("", "")
    gamma = "gamma_i * " if steps.gamma_values is not None else ""
    name = f"dy / dx[{j}]"
    columns = {"xhat": steps.xhat, name: grad}
    if steps.gamma_values is not None:
        columns = {"xhat": steps.xhat, "gamma": steps.gamma_values, name: grad}
    rows, gap = _cells(columns, features)
    moved = "mean and var" if result.kind == "layer" else "the mean square"
    own = number(float(steps.xhat[j]))
    scale = number(steps.rstd)
    if steps.gamma_values is not None:
        scale = f"{number(float(steps.gamma_values[j]))} * {scale}"
    above = [
        f"How y moves with x of feature {j}: {name}, the column {j} of the Jacobian",
        f"dy_i / dx_j = {gamma}rstd * ([i = j]{mean_term} - xhat_i * xhat_j / d)",
        f"of i = j = {j}: {scale} * (1{mean_number} - {own} * {own} / {d}) = {number(float(grad[j]))}",
        f"every y moves, not that of {j} alone: each has x[{j}] in it by way of {moved}",
    ]
    return Table(("feature", *columns), rows, above, (), gap)
