import json
import math
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layernorm_cli.reports.strict_json import to_json

numbers = st.floats() | st.integers() | st.booleans() | st.none()
values = st.recursive(
    numbers | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


class Inner(NamedTuple):
    places: tuple[int, ...]
    worst: float


class Outer(NamedTuple):
    name: str
    inner: Inner
    more: list[Inner]


@given(values, st.sampled_from([None, 2]))
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
def test_what_was_put_in_is_read_again(value, indent):
    text = to_json(value, indent)
    assert text.isascii()
    assert same(json.loads(text, parse_constant=pytest.fail), value)


def same(found, value):
    """Whether found is value, with strings in place of the numbers that JSON lacks."""
    if isinstance(value, float):
        if math.isnan(value):
            return found == "NaN"
        return (
            found == ("Infinity" if value > 0 else "-Infinity") if math.isinf(value) else found == value
        )
    if isinstance(value, list):
        return len(found) == len(value) and all(map(same, found, value))
    if isinstance(value, dict):
        return found.keys() == value.keys() and all(same(found[key], value[key]) for key in value)
    return type(found) is type(value) and found == value


def test_records_are_objects_and_tuples_are_arrays():
    inner = Inner((1, 2), math.nan)
    assert to_json(Outer("a", inner, [inner])) == (
        '{"name": "a", "inner": {"places": [1, 2], "worst": "NaN"}, '
        '"more": [{"places": [1, 2], "worst": "NaN"}]}'
    )


@pytest.mark.parametrize("number", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22])
def test_full_precision(number):
    found = json.loads(to_json(number))
    assert (found, math.copysign(1, found)) == (number, math.copysign(1, number))


def test_one_line_unless_indented():
    assert "\n" not in to_json({"a": [1, {"b": "\n"}]})
    assert to_json({"a": [1]}, 2) == '{\n  "a": [\n    1\n  ]\n}'
