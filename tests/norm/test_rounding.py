import numpy as np
import pytest

from layernorm_cli.norm.dtypes import DTYPES, numpy_dtype
from layernorm_cli.norm.rounding import round_into, widen_into

from .oracle import assert_same_bits

LAYOUTS = {  # exponent bits, fraction bits
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
SMALL = [name for name in LAYOUTS if name != "float32"]


def decode(patterns, name):
    """The float64 values of bit patterns, by the definition of the format."""
    exponent_bits, fraction_bits = LAYOUTS[name]
    patterns = np.asarray(patterns, np.int64)
    largest_exponent, largest_fraction = 2**exponent_bits - 1, 2**fraction_bits - 1
    fraction = patterns & largest_fraction
    exponent = (patterns >> fraction_bits) & largest_exponent
    significand = fraction + np.where(exponent > 0, largest_fraction + 1, 0)
    scale = np.maximum(exponent, 1) - (largest_exponent // 2) - fraction_bits
    values = np.ldexp(significand.astype(np.float64), scale)
    top = exponent == largest_exponent
    if name == "float8_e4m3fn":  # no infinity, one NaN of each sign
        values[top & (fraction == largest_fraction)] = np.nan
    else:
        values[top] = np.where(fraction[top] == 0, np.inf, np.nan)
    return np.where(patterns >> (exponent_bits + fraction_bits), -values, values)


def all_patterns(name):
    bits = DTYPES[name].itemsize * 8
    if bits <= 16:
        return np.arange(2**bits)
    edges = [
        0,
        1,
        2,
        0x7FFFFF,
        0x800000,
        0x800001,
        0x3F800000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
    ]
    positive = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**31, 50_000)])
    return np.concatenate([positive, positive | 2**31])


def finite_magnitudes(name):
    """Patterns of the finite values of 0 and more, in the order of their values."""
    patterns = np.unique(all_patterns(name))
    return patterns[np.isfinite(decode(patterns, name)) & ~np.signbit(decode(patterns, name))]


def from_patterns(patterns, name):
    return patterns.astype(f"u{DTYPES[name].itemsize}").view(numpy_dtype(DTYPES[name]))


def rounded_patterns(y, name):
    out = np.empty(y.shape, numpy_dtype(DTYPES[name]))
    round_into(y.copy(), out)
    return out.view(f"u{out.dtype.itemsize}").astype(np.int64)


def midpoints(name):
    """Patterns p, the next ones, and the exact numbers halfway between them; overflow's bound is one."""
    lower = finite_magnitudes(name)
    exponent_bits, fraction_bits = LAYOUTS[name]
    values = decode(lower, name)
    smallest = 2 - 2 ** (exponent_bits - 1)
    exponents = np.maximum(
        np.frexp(values)[1] - 1, smallest, where=values > 0, out=np.full(len(values), smallest)
    )
    return lower, lower + 1, values + np.ldexp(0.5, exponents - fraction_bits)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", LAYOUTS)
class TestRounding:
    def check(self, y, sign, name, expected):
        sign_bit = 1 << (DTYPES[name].itemsize * 8 - 1)
        patterns = rounded_patterns(sign * y, name)
        np.testing.assert_array_equal(patterns, expected | (sign_bit if sign < 0 else 0))

    def test_values_of_the_format_stay(self, name, sign):
        patterns = finite_magnitudes(name)
        self.check(decode(patterns, name), sign, name, patterns)

    def test_midpoints_go_to_even(self, name, sign):
        lower, upper, middle = midpoints(name)
        self.check(middle, sign, name, np.where(lower % 2 == 0, lower, upper))

    def test_just_below_a_midpoint_goes_down(self, name, sign):
        lower, _, middle = midpoints(name)
        self.check(np.nextafter(middle, 0), sign, name, lower)

    def test_just_above_a_midpoint_goes_up(self, name, sign):
        """Above the last midpoint, up is infinity; for float8_e4m3fn, NaN."""
        _, upper, middle = midpoints(name)
        self.check(np.nextafter(middle, np.inf), sign, name, upper)

    def test_overflow(self, name, sign):
        above_largest = finite_magnitudes(name)[-1] + 1
        y = np.array([1e39, 1e300, 1.7976931348623157e308, np.inf])
        self.check(y, sign, name, np.full(4, above_largest))

    def test_underflow_keeps_the_sign(self, name, sign):
        self.check(np.array([0.0, 5e-324, 1e-300, 1e-60]), sign, name, np.zeros(4, np.int64))


@pytest.mark.parametrize("name", SMALL)
def test_random_values_go_to_a_nearest_one(name):
    rng = np.random.default_rng(0)
    grid = decode(finite_magnitudes(name), name)
    y = np.exp2(rng.uniform(np.log2(grid[1]) - 3, np.log2(grid[-1]), 20_000))
    place = rounded_patterns(y, name)
    error = np.abs(y - grid[place])
    assert (error <= np.abs(y - grid[np.maximum(place - 1, 0)])).all()
    assert (error <= np.abs(y - grid[np.minimum(place + 1, len(grid) - 1)])).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_nan_stays_nan(name):
    payloads = [0x7FF8000000000000, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]
    y = np.array(payloads, np.uint64).view(np.float64)
    assert np.isnan(decode(rounded_patterns(y, name), name)).all()


@pytest.mark.parametrize(
    ("name", "y", "expected"),
    [
        ("bfloat16", 1 + 2**-8 + 2**-40, 1 + 2**-7),
        ("float8_e5m2", 1 + 2**-3 + 2**-40, 1 + 2**-2),
        ("float8_e4m3fn", 1 + 2**-4 + 2**-40, 1 + 2**-3),
        ("float8_e4m3fn", 464, 448),
        ("float8_e4m3fn", np.nextafter(464, 500), np.nan),
        ("float8_e5m2", np.nextafter(61440, 0), 57344),
        ("float8_e5m2", 61440, np.inf),
        ("float16", 65519.99, 65504),
        ("float16", 65520, np.inf),
    ],
)
def test_rounding_by_hand(name, y, expected):
    np.testing.assert_array_equal(decode(rounded_patterns(np.array([float(y)]), name), name), [expected])


def test_float64_is_copied():
    y = np.array([[0.1, -0.0, 5e-324], [np.inf, np.nan, -1.7976931348623157e308]])
    out = np.empty_like(y)
    round_into(y.copy(), out)
    assert_same_bits(out, y)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("order", "CF")
def test_rounding_between_any_layouts(name, order):
    values = np.random.default_rng(0).standard_normal((6, 10)) * 10.0 ** np.arange(-5, 5)
    expected = rounded_patterns(values, name)
    y = np.empty((6, 20), order=order)[:, ::2]
    y[...] = values
    out = np.zeros((10, 12), numpy_dtype(DTYPES[name])).T[::2]
    round_into(y, out)
    np.testing.assert_array_equal(np.ascontiguousarray(out).view(f"u{out.dtype.itemsize}"), expected)


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
def test_rounding_into_big_endian(name):
    y = np.array([[0.1, -1e-6, 1.0, 3e4]])
    native, swapped = np.empty(y.shape, name), np.empty(y.shape, np.dtype(name).newbyteorder(">"))
    round_into(y.copy(), native)
    round_into(y.copy(), swapped)
    assert native.tobytes() == swapped.byteswap().tobytes()


# Widening


def widened(x, order="C"):
    out = np.empty(x.shape, order=order)
    widen_into(x, out)
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_pattern_is_widened_exactly(name):
    patterns = all_patterns(name)
    values = widened(from_patterns(patterns, name))
    truth = decode(patterns, name)
    np.testing.assert_array_equal(values, truth)
    defined = ~np.isnan(truth)
    np.testing.assert_array_equal(np.signbit(values[defined]), np.signbit(truth[defined]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_rounding_undoes_widening(name):
    patterns = all_patterns(name)
    patterns = patterns[~np.isnan(decode(patterns, name))]
    np.testing.assert_array_equal(
        rounded_patterns(widened(from_patterns(patterns, name)), name), patterns
    )


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("order", "CF")
def test_strided_arrays_are_widened(name, order):
    x = np.arange(120).reshape(10, 12).astype(numpy_dtype(DTYPES[name]))
    truth = np.array([[float(v) for v in row] for row in x])
    for view in (lambda a: a.T, lambda a: a[::2, ::3], lambda a: a[::-1, ::-1], lambda a: a[:, 4:5]):
        np.testing.assert_array_equal(widened(view(x), order), view(truth))


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">f2", ">i8", ">i4", ">i2", ">u8", ">u4", ">u2"])
def test_big_endian_arrays_are_widened(dtype):
    x = np.array([[1, 2, 3], [100, 0, 77]], dtype)
    np.testing.assert_array_equal(widened(x), [[1, 2, 3], [100, 0, 77]])
    np.testing.assert_array_equal(widened(x.T), [[1, 100], [2, 0], [3, 77]])


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("int64", 2**53, 2.0**53),
        ("int64", -(2**53) + 1, -(2.0**53) + 1),
        ("int64", 2**63 - 1, 2.0**63),
        ("uint64", 2**64 - 1, 2.0**64),
        ("uint64", 2**53 + 1, 2.0**53),
        ("int8", -128, -128.0),
        ("uint8", 255, 255.0),
        ("bool", True, 1.0),
    ],
)
def test_integers_are_widened(dtype, value, expected):
    np.testing.assert_array_equal(widened(np.array([[value]], dtype)), [[expected]])
