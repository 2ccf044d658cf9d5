import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.errors import UsageError
from layernorm_cli.norm.spec import DEFAULT_EPS, Norm, check_eps, make_norm, parse_eps

from .oracle import quick

# eps


@pytest.mark.parametrize(
    ("text", "eps"),
    [
        ("1e-5", 1e-5),
        ("1E-05", 1e-5),
        (".00001", 1e-5),
        ("0.00001", 1e-5),
        ("+1e-5", 1e-5),
        (" 1e-5\n", 1e-5),
        ("1.", 1.0),
        ("1.e-3", 1e-3),
        ("12", 12.0),
        ("0", 0.0),
        ("0e-999", 0.0),
        (".0", 0.0),
        ("5e-324", 5e-324),
        ("3e-324", 5e-324),
        ("1.7976931348623157e308", 1.7976931348623157e308),
    ],
)
def test_decimal_eps_is_read(text, eps):
    assert parse_eps(text) == eps


@pytest.mark.parametrize(
    "text",
    ["nan", "NaN", "inf", "-inf", "Infinity", "1_0", "0x1p-3", "0x10", "", " ", "1,5", " 1e-5f"],
)
def test_words_and_other_notations_are_refused(text):
    refuse(text)


@pytest.mark.parametrize(
    "text",
    [
        ".",
        "e5",
        "1e",
        "1e5.5",
        "1e-",
        "--1",
        "1 e-5",
        "1e-5 2",
        "\u0661",
        "1\u0661",
        "1/2",
        "1j",
        "1e-5\0",
    ],
)
def test_broken_numbers_are_refused(text):
    refuse(text)


def refuse(text):
    with pytest.raises(UsageError, match=r"not a decimal number\n.*1e-5") as caught:
        parse_eps(text)
    assert caught.value.where == f"eps {text!r}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["1e-400", "2e-324", "0.001e-330", "-1e-400", "1" + "e-9999999999"])
def test_eps_that_underflows_is_refused(text):
    with pytest.raises(UsageError, match="underflows to 0"):
        parse_eps(text)


@pytest.mark.parametrize(
    "text", ["-1", "-1e-5", "-5e-324", "1e400", "1.8e308", "-1e400", "1e99999999999"]
)
def test_negative_and_infinite_eps_are_refused(text):
    with pytest.raises(UsageError, match="not a usable eps"):
        parse_eps(text)


@pytest.mark.parametrize("eps", [parse_eps("-0.0"), parse_eps("-0"), check_eps(-0.0)])
def test_negative_zero_is_zero(eps):
    assert math.copysign(1, eps) == 1
    assert eps == 0


@quick
@given(st.floats(0, allow_infinity=False))
def test_printed_eps_is_read_back(eps):
    assert parse_eps(repr(eps)) == parse_eps(f"{eps:.17e}") == eps


@quick
@given(st.text(st.sampled_from("0123456789+-.eE_ xinfa"), max_size=8))
def test_read_eps_is_what_float_reads_and_usable(text):
    try:
        eps = parse_eps(text)
    except UsageError:
        return
    assert eps == float(text)
    assert math.isfinite(eps)
    assert eps >= 0


@pytest.mark.parametrize("eps", [math.nan, math.inf, -math.inf, -1, -5e-324, np.float32("nan")])
def test_unusable_eps_is_refused(eps):
    with pytest.raises(UsageError, match="not a usable eps"):
        check_eps(eps)


@pytest.mark.parametrize("eps", [0, 1, 5e-324, 1.7976931348623157e308, np.float32(0.5), np.int8(3)])
def test_usable_eps_becomes_a_float(eps):
    assert check_eps(eps) == eps
    assert type(check_eps(eps)) is float


# Norms


def test_defaults():
    assert make_norm() == Norm("layer", 1e-5, None, None)
    assert DEFAULT_EPS == 1e-5


def test_parameters_become_flat_float64():
    norm = make_norm("rms", 0, np.array([[1, 2], [3, 4]], ">i2"), [[5, 6], [7, 8.5]], shape=(2, 2))
    assert (norm.kind, norm.eps) == ("rms", 0)
    np.testing.assert_array_equal(norm.gamma, [1, 2, 3, 4])
    np.testing.assert_array_equal(norm.beta, [5, 6, 7, 8.5])
    assert norm.gamma.dtype == norm.beta.dtype == np.float64


def test_parameters_are_copied():
    gamma = np.ones(3)
    norm = make_norm(gamma=gamma, gamma_offset=1)
    gamma[:] = 7
    np.testing.assert_array_equal(norm.gamma, [2, 2, 2])


def test_gamma_offset_is_added_in_float64():
    gamma = np.array([2.0**-11, -1, 0.5], np.float16)
    norm = make_norm(gamma=gamma, beta=gamma, gamma_offset=1)
    np.testing.assert_array_equal(norm.gamma, [1 + 2.0**-11, 0, 1.5])
    np.testing.assert_array_equal(norm.beta, gamma)


def test_absent_gamma_is_1_whatever_the_offset():
    assert make_norm(gamma_offset=1).gamma is None


@pytest.mark.parametrize("offset", [2, -1, 0.5, math.nan])
def test_other_gamma_offsets_are_refused(offset):
    with pytest.raises(UsageError, match="gamma offset"):
        make_norm(gamma_offset=offset)


@pytest.mark.parametrize("kind", ["RMS", "", "batch", None])
def test_other_kinds_are_refused(kind):
    with pytest.raises(UsageError, match=r"(?s)not a kind of norm.*layer or rms"):
        make_norm(kind)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 3), (3, 1), (0,)])
@pytest.mark.parametrize("name", ["gamma", "beta"])
def test_other_shapes_are_refused(name, shape):
    with pytest.raises(UsageError, match=r"(?s)shape \(3,\).*nothing is broadcast") as caught:
        make_norm(**{name: np.ones(shape)}, shape=(3,))
    assert caught.value.where == name
    assert caught.value.found == f"has shape {shape}"


@pytest.mark.parametrize(
    "values", [[1j, 2], ["1", "2"], [None, 1], np.zeros(2, "M8[s]"), np.zeros(2, "V2")]
)
@pytest.mark.parametrize("name", ["gamma", "beta"])
def test_parameters_that_are_not_real_are_refused(name, values):
    with pytest.raises(UsageError, match=rf"{name}: has dtype"):
        make_norm(**{name: values})
