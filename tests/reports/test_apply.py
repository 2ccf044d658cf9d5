import csv
import json
import math

import pytest

from layernorm_cli.reports.apply import apply_json, apply_table, csv_header, csv_line, jsonl_line
from layernorm_cli.results import ApplyResult, Range, RowSummary, TableRow

ROWS = (
    TableRow((0, 0), 1 / 3, 2.0, 1e-17, 1.0),
    TableRow((0, 1), math.inf, math.nan, math.nan, math.nan),
    TableRow((4, 9), -1.0, 0.0, 0.0, 0.0),
)
RESULT = ApplyResult(
    input="acts.safetensors#x",
    tensor="x",
    output=None,
    shape=(5, 10, 3),
    dtype="float16",
    output_dtype="float32",
    kind="layer",
    axis=-1,
    eps=1e-5,
    eps_source="default",
    gamma=None,
    beta=None,
    gamma_offset=0,
    backend="numpy",
    rows=50,
    table=ROWS,
    summary=RowSummary(Range(-1.0, 1 / 3), Range(0.0, 2.0), 1, 1),
    warnings=(),
)


def test_json_is_the_record():
    report = json.loads(apply_json(RESULT), parse_constant=pytest.fail)
    assert report["shape"] == [5, 10, 3]
    assert report["table"][0] == {
        "row": [0, 0],
        "mean_before": 1 / 3,
        "var_before": 2,
        "mean_after": 1e-17,
        "var_after": 1,
    }
    assert report["table"][1]["mean_before"] == "Infinity"
    assert report["summary"]["mean_before"] == {"min": -1, "max": 1 / 3}
    assert apply_json(RESULT).endswith("}\n")


@pytest.mark.parametrize("row", ROWS)
def test_a_line_a_row(row):
    (line,) = jsonl_line(row).splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["row"] == list(row.row)
    header, fields = csv.reader([csv_header(), csv_line(row)])
    assert header == ["row", "mean_before", "var_before", "mean_after", "var_after"]
    assert fields[0] == ",".join(map(str, row.row))
    assert list(map(repr, map(float, fields[1:]))) == list(map(repr, row[1:]))


@pytest.mark.parametrize(("index", "text"), [((), ""), ((7,), "7"), ((1, 2, 3), '"1,2,3"')])
def test_index_in_csv(index, text):
    assert csv_line(TableRow(index, 1.0, 2.0, 3.0, 4.5)) == f"{text},1.0,2.0,3.0,4.5\n"


def test_table():
    table = apply_table(RESULT)
    assert table.rows[0] == ("0, 0", "0.333333", "2", "1e-17", "1")
    assert table.rows[1] == ("0, 1", "inf", "NaN", "NaN", "NaN")
    assert table.gap == 2
    assert table.above[0] == "acts.safetensors#x (x): float16 (5, 10, 3), 50 rows"
    assert table.below[0].startswith("47 of 50 rows not shown")


CHANGES = [
    ({"rows": 1}, "(5, 10, 3), 1 row"),
    ({"kind": "rms"}, "rms norm"),
    ({"eps": 0.25, "eps_source": "--eps"}, "eps 0.25 (--eps)"),
    ({"gamma": "g.npy", "beta": "b.npy"}, "gamma g.npy, beta b.npy"),
    ({"gamma": "g.npy", "gamma_offset": 1}, "gamma g.npy + 1"),
    ({"gamma": None}, "no gamma, no beta"),
    ({"axis": -2}, "over axis -2"),
    ({"backend": "numba"}, "engine numba"),
    ({"output": "y.npy"}, "output y.npy: float32"),
]


@pytest.mark.parametrize(
    ("change", "text"), CHANGES, ids=lambda value: value if isinstance(value, str) else None
)
def test_lines_above_the_table(change, text):
    assert text in "\n".join(apply_table(RESULT._replace(**change)).above)


def test_gap_only_where_rows_are_hidden():
    assert apply_table(RESULT._replace(rows=3)).gap is None
    assert apply_table(RESULT._replace(table=())).gap is None


def test_lines_below_the_table():
    below = apply_table(RESULT._replace(rows=3)).below
    assert below == [
        "all rows before: mean -1 to 0.333333, var 0 to 2",
        "rows constant: 1",
        "rows with NaN or inf: 1",
    ]
    none = RowSummary(Range(None, None), Range(None, None), 0, 0)
    assert apply_table(RESULT._replace(rows=3, summary=none)).below == [
        "all rows before: mean none, var none"
    ]
