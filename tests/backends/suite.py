"""What every engine must do, as classes that a test class of each engine inherits.

A test's arguments are axes: it runs for each combination of what `axes` gives for their names. None is a
pytest fixture, so that `failures` can run the same tests on an engine that is broken on purpose.
"""

import inspect
import itertools

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from norm.oracle import (
    DISTRIBUTIONS,
    FINITE_ROWS,
    NONFINITE,
    assert_same_bits,
    exact_norms,
    extended_norm,
    quick,
    rows_like,
    ulp_errors,
)

from layernorm_cli.backends import Engine
from layernorm_cli.norm.forward import row_kernel
from layernorm_cli.norm.spec import Norm

WRONGLY_ROUNDED = 1e-4  # exact engines: at most this part of the results, in every dtype but float64
FLOAT64_ULP = 4  # exact engines: of max(1, |y|)
STATS_ULP = {  # of max(|mean|, sd), var and rstd; var is a sum of 256 squares at a time
    "mean": 4,
    "var": 8,
    "rstd": 4,
}
UNITS = {  # other engines: units of their own precision, of max(1, |y|)
    "float64": 16,
    "float32": 16,
    "float16": 3,
    "bfloat16": 3,
}
ONNX_EPS_ERROR = 2.0**-25  # onnxruntime's eps is a float32 number, float64 rows or not

BENIGN = {
    "normal": lambda normal: normal,
    "mean 2": lambda normal: 2 + normal,
    "x 300": lambda normal: 300 * normal,
}
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
AFFINE = ("neither", "gamma", "beta", "both")


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def epsilon(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def parameters(affine, width, dtype):
    """gamma and beta, float64 numbers that an engine's own dtype can hold, or None."""
    normal = np.random.default_rng(width).standard_normal((2, width))
    gamma, beta = ([[1], [0]] + 0.3 * normal).astype(dtype).astype(np.float64)
    return (
        gamma if affine in ("gamma", "both") else None,
        beta if affine in ("beta", "both") else None,
    )


def truth_of(x, norm):
    """The unrounded norm of finite rows, in long double."""
    gamma = 1 if norm.gamma is None else norm.gamma
    beta = 0 if norm.beta is None else norm.beta
    return extended_norm(x, norm.eps, norm.kind, gamma, beta)


def wrongly_rounded(y, truth):
    """How many numbers of y are further from the truth than a neighbour of theirs.

    The number that was rounded is a float64 one: a truth nearer than that to a tie may go either way.
    """
    largest = ml_dtypes.finfo(y.dtype).max
    neighbours = [np.nextafter(y, side) for side in (-largest, largest)]
    errors = [np.abs(value.astype(np.longdouble) - truth) for value in (y, *neighbours)]
    slack = FLOAT64_ULP * np.spacing(np.maximum(1, np.abs(truth).astype(np.float64)))
    return np.count_nonzero(~(errors[0] <= np.fmin(errors[1], errors[2]) + slack))


def stats_errors(stats, mean, var, rstd):
    """How far the statistics are from these, each in its units of STATS_ULP."""
    scale = np.maximum(np.abs(mean), np.sqrt(var))
    for field, expected, size in (("mean", mean, scale), ("var", var, var), ("rstd", rstd, rstd)):
        unit = STATS_ULP[field] * np.spacing(size.astype(np.float64))
        yield (np.abs(getattr(stats, field) - expected) / unit).max()


def assert_rows_are_their_own(kernel, x, dtype):
    """Every row's bits are the same in all of x, alone, and in blocks of another start and size."""
    y, stats = np.empty(x.shape, dtype), []
    stats.append(kernel(x, y))
    for size in (1, 2, 3, len(x) - 1):
        part = np.empty_like(y)
        for start in range(0, len(x), size):
            block = slice(start, start + size)
            seen = kernel(x[block], part[block])
            for field in ("mean", "var", "rstd", "constant", "nonfinite"):
                assert_same_bits(getattr(seen, field), getattr(stats[0], field)[block])
        assert_same_bits(part, y)


class EngineSuite:
    """For engines that compute as their package does, in x's own precision."""

    engine: Engine
    prepare: staticmethod
    eps_error = 0.0

    @classmethod
    def axes(cls):
        offered = cls.engine.dtypes
        return {
            "kind": cls.engine.kinds,
            "dtype": [name for name in FLOATS if name in offered],
            "integers": [*(INTEGERS if "integers" in offered else ()), *({"bool"} & {*offered})],
            "width": (5, 33, 769),
            "wide": (5003, 20_000),
            "affine": AFFINE,
            "eps": (1e-12, 1e-5, 0.1),
            "distribution": BENIGN,
            "bad": NONFINITE,
            "finite": FINITE_ROWS,
        }

    def kernel(self, norm, width):
        return self.prepare(norm, width, "cpu")

    def run(self, x, norm, out=None):
        y = np.empty(x.shape, out or x.dtype)
        return y, self.kernel(norm, x.shape[1])(x, y)

    def rows(self, distribution, rows, width, dtype):
        normal = np.random.default_rng(width).standard_normal((rows, width))
        return BENIGN[distribution](normal).astype(dtype)

    def assert_values(self, y, x, norm):
        truth = truth_of(x, norm)
        coarser = max(y.dtype, x.dtype, key=epsilon)
        bound = UNITS[coarser.name] * epsilon(coarser)
        if self.eps_error:
            bound += self.eps_error * norm.eps / (x.astype(np.float64).var(axis=1).min() + norm.eps)
        errors = np.abs(y.astype(np.longdouble) - truth) / np.maximum(1, np.abs(truth))
        assert errors.max() <= bound

    def test_values(self, dtype, kind, width):
        dtype = numpy_dtype(dtype)
        norm = Norm(kind, 1e-5, *parameters("both", width, dtype))
        kernel = self.kernel(norm, width)
        for distribution in self.axes()["distribution"]:
            x = self.rows(distribution, max(4, 3000 // width), width, dtype)
            y = np.empty_like(x)
            kernel(x, y)
            self.assert_values(y, x, norm)

    def test_gamma_and_beta(self, dtype, kind, affine):
        dtype = numpy_dtype(dtype)
        x = self.rows("normal", 9, 33, dtype)
        norm = Norm(kind, 1e-5, *parameters(affine, 33, dtype))
        y, _ = self.run(x, norm)
        self.assert_values(y, x, norm)

    def test_eps(self, dtype, kind, eps):
        dtype = numpy_dtype(dtype)
        x = self.rows("normal", 9, 33, dtype)
        norm = Norm(kind, eps)
        y, _ = self.run(x, norm)
        self.assert_values(y, x, norm)

    def test_wide_rows(self, dtype, kind, wide):
        dtype = numpy_dtype(dtype)
        x = self.rows("normal", 3, wide, dtype)
        norm = Norm(kind, 1e-5, *parameters("both", wide, dtype))
        y, _ = self.run(x, norm)
        self.assert_values(y, x, norm)

    def test_rows_of_one(self, dtype, kind):
        x = np.array([[3], [-2], [0.5], [0]], numpy_dtype(dtype))
        norm = Norm(kind, 1e-5, np.array([2.0]), np.array([0.25]))
        y, stats = self.run(x, norm)
        self.assert_values(y, x, norm)
        if kind == "layer":
            assert (y == 0.25).all()
        assert stats.constant.all()

    def test_integers(self, integers, kind):
        least, most = (0, 1) if integers == "bool" else (np.iinfo(integers).min, np.iinfo(integers).max)
        x = np.random.default_rng(1).integers(
            max(least, -1000), min(most, 1000), (20, 50), endpoint=True
        )
        x = x.astype(integers)
        norm = Norm(kind, 1e-5, *parameters("both", 50, np.float64))
        y, _ = self.run(x, norm, np.float64)
        self.assert_values(y, x.astype(np.float64), norm)

    def test_output_of_another_dtype(self, dtype, kind):
        dtype = numpy_dtype(dtype)
        x = self.rows("normal", 9, 33, dtype)
        norm = Norm(kind, 1e-5, *parameters("both", 33, dtype))
        kernel = self.kernel(norm, 33)
        for out in self.axes()["dtype"]:
            y = np.empty(x.shape, numpy_dtype(out))
            kernel(x, y)
            self.assert_values(y, x, norm)

    def test_no_rows(self, dtype, kind):
        x = np.empty((0, 7), numpy_dtype(dtype))
        y, stats = self.run(x, Norm(kind))
        assert y.shape == (0, 7)
        assert [field.shape for field in stats[:5]] == [(0,)] * 5

    def test_rows_of_zeros_give_beta(self, dtype, kind):
        dtype = numpy_dtype(dtype)
        gamma, beta = parameters("both", 40, dtype)
        y, _ = self.run(np.zeros((3, 40), dtype), Norm(kind, 1e-5, gamma, beta))
        assert (y == beta.astype(dtype)).all()

    def test_constant_rows_give_beta(self, dtype):
        dtype = numpy_dtype(dtype)
        x = np.repeat(np.array([[4], [-0.5], [1]], dtype), 64, axis=1)
        gamma, beta = parameters("both", 64, dtype)
        y, stats = self.run(x, Norm("layer", 1e-5, gamma, beta))
        assert (y == beta.astype(dtype)).all()
        assert stats.constant.all()

    def test_nonfinite_rows_change_no_other(self, dtype, kind):
        dtype = numpy_dtype(dtype)
        norm = Norm(kind, 1e-5, *parameters("both", 64, dtype))
        kernel = self.kernel(norm, 64)
        others = np.arange(9) != 4
        for bad in NONFINITE:
            x = self.rows("normal", 9, 64, dtype)
            x[4] = rows_like(bad, 1, 64).astype(dtype)
            y = np.empty_like(x)
            stats = kernel(x, y)
            self.assert_values(y[others], x[others], norm)
            assert np.isnan(y[4]).any()
            assert (stats.nonfinite == ~others).all()
            assert (np.isfinite(stats.rstd) == others).all()

    def test_strided_and_big_endian_rows(self, dtype, kind):
        dtype = numpy_dtype(dtype)
        x = self.rows("normal", 9, 64, dtype)
        kernel = self.kernel(Norm(kind), 64)
        expected = np.empty_like(x)
        kernel(x, expected)
        room = np.zeros((18, 130), dtype)
        room[::2, 1:-1:2] = x
        inputs = [np.asfortranarray(x), room[::2, 1:-1:2], x[::-1, ::-1].copy()[::-1, ::-1]]
        if dtype.kind == "f":
            inputs.append(x.astype(dtype.newbyteorder(">")))
        for other in inputs:
            y = np.empty_like(x)
            kernel(other, y)
            assert_same_bits(y, expected)

    def test_input_is_only_read(self, dtype, kind):
        x = self.rows("normal", 9, 64, numpy_dtype(dtype))
        before = x.copy()
        x.flags.writeable = False
        self.run(x, Norm(kind, 1e-5, *parameters("both", 64, x.dtype)))
        assert_same_bits(x, before)

    def test_statistics_without_results(self, dtype, kind):
        x = self.rows("normal", 9, 64, numpy_dtype(dtype))
        kernel = self.kernel(Norm(kind), 64)
        y = np.empty_like(x)
        for seen, expected in zip(kernel(x, None), kernel(x, y), strict=True):
            assert_same_bits(np.asarray(seen), np.asarray(expected))

    def test_statistics(self, distribution, dtype, kind, width):
        x = self.rows(distribution, max(4, 3000 // width), width, numpy_dtype(dtype))
        wide = x.astype(np.float64).astype(np.longdouble)
        mean = wide.mean(axis=1)
        centred = wide - mean[:, None] if kind == "layer" else wide
        var = (centred * centred).mean(axis=1)
        stats = self.kernel(Norm(kind, 1e-3), width)(x, None)
        assert max(stats_errors(stats, mean, var, 1 / np.sqrt(var + np.longdouble(1e-3)))) <= 1


class OnnxSuite(EngineSuite):
    """For onnxruntime, whose operator takes eps as a float32 number."""

    eps_error = ONNX_EPS_ERROR


class ExactSuite(EngineSuite):
    """For engines that round correctly, and give the same bits always."""

    @classmethod
    def axes(cls):
        return {**super().axes(), "distribution": DISTRIBUTIONS}

    def rows(self, distribution, rows, width, dtype):
        with np.errstate(over="ignore"):
            x = rows_like(distribution, rows, width).astype(dtype)
        large = float(ml_dtypes.finfo(dtype).max)
        return np.where(np.isfinite(x), x, np.array(large, dtype))

    def assert_values(self, y, x, norm):
        truth = truth_of(x, norm)
        if y.dtype == np.float64:
            assert ulp_errors(y, truth).max() <= FLOAT64_ULP
        else:
            assert wrongly_rounded(y, truth) <= WRONGLY_ROUNDED * y.size

    def test_many_results_are_correctly_rounded(self, distribution, kind):
        x = self.rows(distribution, 200, 768, np.float32)
        norm = Norm(kind, 1e-5, *parameters("both", 768, np.float32))
        y, _ = self.run(x, norm)
        self.assert_values(y, x, norm)

    def test_nonfinite_rows_are_all_nan(self, dtype, kind, bad):
        dtype = numpy_dtype(dtype)
        x = rows_like(bad, 2, 64).astype(dtype)
        norm = Norm(kind, 1e-5, *parameters("both", 64, dtype))
        y, _ = self.run(x, norm)
        assert np.isnan(y).all()

    def test_any_constant_row_gives_beta(self, dtype):
        dtype = numpy_dtype(dtype)
        values = (
            np.random.default_rng(2).standard_normal((20, 1))
            * 10.0 ** np.arange(-2, 2).repeat(5)[:, None]
        )
        gamma, beta = parameters("both", 51, dtype)
        y, stats = self.run(values.astype(dtype).repeat(51, axis=1), Norm("layer", 1e-5, gamma, beta))
        assert (y == beta.astype(dtype)).all()
        assert stats.constant.all()

    def test_a_row_has_its_own_bits(self, dtype, kind, width):
        dtype = numpy_dtype(dtype)
        names = [*DISTRIBUTIONS, *FINITE_ROWS, *NONFINITE, *DISTRIBUTIONS]
        with np.errstate(over="ignore"):
            x = np.concatenate([rows_like(name, 1, width, seed) for seed, name in enumerate(names)])
            x = x.astype(dtype)
        norm = Norm(kind, 1e-5, *parameters("both", width, dtype))
        assert_rows_are_their_own(self.kernel(norm, width), x, dtype)

    def test_a_row_has_its_own_bits_in_a_large_block(self, kind):
        x = rows_like("mean 1e4", 700, 769)
        y, _ = self.run(x, Norm(kind))
        alone, _ = self.run(x[650:651].copy(), Norm(kind))
        assert_same_bits(alone, y[650:651])

    def test_extreme_rows(self, finite, kind):
        x = rows_like(finite, 3, 21)
        y, _ = self.run(x, Norm(kind))
        assert ulp_errors(y, exact_norms(x, kind=kind)).max() <= FLOAT64_ULP

    def test_finite_rows_stay_finite(self, kind):
        @quick
        @given(
            x=arrays(np.float64, (2, 5), elements=st.floats(allow_nan=False, allow_infinity=False)),
            eps=st.sampled_from([1e-5, 1e-12, 1.0, 1e-300, 5e-324]),
        )
        def check(x, eps):
            y, stats = self.run(x, Norm(kind, eps))
            assert np.isfinite(y).all()
            assert not stats.nonfinite.any()
            assert ulp_errors(y, exact_norms(x, eps, kind)).max() <= FLOAT64_ULP

        check()

    def test_statistics_are_those_of_the_reference(self, distribution, dtype, kind, width):
        x = self.rows(distribution, 20, width, numpy_dtype(dtype))
        _, stats = self.run(x, Norm(kind))
        expected = row_kernel(Norm(kind), width)(x, None)
        assert max(stats_errors(stats, expected.mean, expected.var, expected.rstd)) <= 1
        np.testing.assert_array_equal(stats.constant, expected.constant)
        np.testing.assert_array_equal(stats.nonfinite, expected.nonfinite)


def suite_of(name, engine, prepare):
    """A test class for an engine; prepare is its function."""
    base = ExactSuite if engine.exact else OnnxSuite if name == "onnxruntime" else EngineSuite
    return type(f"{name.title()}Suite", (base,), {"engine": engine, "prepare": staticmethod(prepare)})


def failures(suite, prefix="test_"):
    """The tests of a suite that fail, one by one, each with its arguments and what it raised."""
    axes = suite.axes()
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        if not name.startswith(prefix):
            continue
        arguments = [argument for argument in inspect.signature(test).parameters if argument != "self"]
        for values in itertools.product(*(axes[argument] for argument in arguments)):
            try:
                test(suite(), **dict(zip(arguments, values, strict=True)))
            except AssertionError as error:
                yield name, values, error
