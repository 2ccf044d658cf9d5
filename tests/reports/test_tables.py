import re

import pytest

from layernorm_cli.reports.tables import Table, draw_boxed, draw_markdown, draw_plain, number

TABLE = Table(
    ("row", "mean before"),
    [("0, 0", "1"), ("0, 1", "-2.5e-07"), ("9, 9", "NaN")],
    ["x[red].npy: float32", "second \x1b[31mline"],
    ["1 row not shown"],
    2,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (1 / 3, "0.333333"),
        (-1234567.0, "-1.23457e+06"),
        (1e-300, "1e-300"),
        (float("nan"), "NaN"),
        (float("-inf"), "-inf"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_plain():
    assert draw_plain(TABLE) == (
        "x[red].npy: float32\n"
        "second \\x1b[31mline\n"
        " row  mean before\n"
        "0, 0            1\n"
        "0, 1     -2.5e-07\n"
        "9, 9          NaN\n"
        "1 row not shown\n"
    )


def test_plain_cuts_nothing():
    long = "long " * 100
    assert long.strip() in draw_plain(Table(("a", long), [(long, "1")], [long], [long]))


def test_markdown():
    assert draw_markdown(TABLE._replace(above=["x.npy"], rows=[("0", "a|b\n"), ("1", "2")])) == (
        "x.npy\n"
        "\n"
        "| row | mean before |\n"
        "| ---: | ---: |\n"
        "| 0 | a\\|b\\\\n |\n"
        "| 1 | 2 |\n"
        "\n"
        "1 row not shown\n"
    )


@pytest.mark.parametrize("name", ["*a*", "_a_", "`a`", "~a~", "<i>", "[a](b)", "# a", "a|b", "a\\*"])
def test_markdown_shows_names_as_they_are(name):
    table = Table(("name",), [(name,)], [name], [name])
    above, _, _, _, row, _, below = draw_markdown(table).splitlines()
    for line in (above, below, row.removeprefix("| ").removesuffix(" |")):
        assert re.sub(r"\\(\W|_)", r"\1", line) == name
        assert not re.search(r"(?<!\\)[*_`~<\[|#]", line.replace("\\\\", ""))


def test_boxed():
    assert draw_boxed(TABLE, 40, colour=False, unicode=True) == (
        "x[red].npy: float32\n"
        "second \\x1b[31mline\n"
        "╭──────┬─────────────╮\n"
        "│  row │ mean before │\n"
        "├──────┼─────────────┤\n"
        "│ 0, 0 │           1 │\n"
        "│ 0, 1 │    -2.5e-07 │\n"
        "│    ⋮ │           ⋮ │\n"
        "│ 9, 9 │         NaN │\n"
        "╰──────┴─────────────╯\n"
        "1 row not shown\n"
    )


def test_boxed_without_unicode():
    text = draw_boxed(TABLE, 40, colour=False, unicode=False)
    assert text.isascii()
    assert "|    : |           : |\n" in text


@pytest.mark.parametrize(
    "variables", [{}, {"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}, {"COLUMNS": "5"}], ids=str
)
def test_only_the_arguments_decide(variables, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    plain = draw_boxed(TABLE, 40, colour=False, unicode=True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert draw_boxed(TABLE, 40, colour=False, unicode=True) == plain


def test_colour(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in draw_boxed(TABLE, 40, colour=True, unicode=True)


@pytest.mark.parametrize("width", range(10, 30))
def test_a_box_that_does_not_fit_is_left_out(width):
    text = draw_boxed(TABLE, width, colour=False, unicode=True)
    assert ("╭" in text) == (width >= 22)
    if "╭" in text:
        assert max(map(len, text.splitlines())) <= width
    else:
        assert text == draw_plain(TABLE)


def test_columns_without_rows():
    empty = Table(("row", "mean"), [])
    assert draw_plain(empty) == "row  mean\n"
    assert draw_markdown(empty) == "| row | mean |\n| ---: | ---: |\n"
    assert "│ row │ mean │" in draw_boxed(empty, 80, colour=False, unicode=True)
