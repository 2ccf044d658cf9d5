import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layernorm_cli.norm.dtypes import DTYPES, numpy_dtype
from layernorm_cli.norm.forward import RowStats, concatenate, row_kernel
from layernorm_cli.norm.rounding import round_into
from layernorm_cli.norm.spec import Norm

from .oracle import (
    DISTRIBUTIONS,
    FINITE_ROWS,
    NONFINITE,
    ROWS,
    assert_same_bits,
    exact_norms,
    extended_norm,
    needs_extended,
    rows_like,
    thorough,
    ulp_errors,
)

KINDS = ("layer", "rms")
FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "f"]


PLAIN = Norm()


def run(x, norm=PLAIN, dtype=np.float64):
    y = np.empty(x.shape, dtype)
    return y, row_kernel(norm, x.shape[1])(x, y)


def parameters(width, dtype=np.float64):
    rng = np.random.default_rng(width)
    gamma = (1 + 0.3 * rng.standard_normal(width)).astype(dtype).astype(np.float64)
    beta = (0.5 * rng.standard_normal(width)).astype(dtype).astype(np.float64)
    return gamma, beta


# Accuracy


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_extended_precision_truth_agrees_with_rational_arithmetic(name, kind):
    x = rows_like(name, 2, 21)
    np.testing.assert_array_less(
        ulp_errors(extended_norm(x, kind=kind), exact_norms(x, kind=kind)), 0.51
    )


@needs_extended
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [31, 33, 768, 1000, 4099])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_float32_results_are_correctly_rounded(name, width, kind, affine):
    x = rows_like(name, 60_000 // width, width).astype(np.float32)
    gamma, beta = parameters(width, np.float32) if affine else (None, None)
    y, _ = run(x, Norm(kind, 1e-5, gamma, beta), np.float32)
    truth = extended_norm(x, 1e-5, kind, *((gamma, beta) if affine else ()))
    assert np.count_nonzero(y != truth.astype(np.float32)) <= 1e-4 * y.size


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [31, 33, 63, 127, 255, 768, 1000, 4099])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_float64_results_are_within_4_ulp(name, width, kind):
    x = rows_like(name, 60_000 // width, width)
    y, _ = run(x, Norm(kind))
    assert ulp_errors(y, extended_norm(x, kind=kind)).max() <= 4


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 7, 31, 32, 47, -24, -16, -1])
@pytest.mark.parametrize("width", [63, 768, 1000, 1023])
def test_one_large_feature_may_stand_anywhere(width, place, kind):
    """Whatever is added to its square after it rounds to its last place."""
    x = rows_like("normal", 100_000 // width, width)
    x[:, place] *= 3000
    y, _ = run(x, Norm(kind))
    assert ulp_errors(y, extended_norm(x, kind=kind)).max() <= 4


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [31, 63, 127, 768, 1000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_float64_results_with_gamma_and_beta_are_within_5_ulp(name, width, kind):
    """Two more roundings, and beta may leave a result smaller than what was rounded before."""
    x = rows_like(name, 120_000 // width, width, seed=1)
    gamma, beta = parameters(width)
    y, _ = run(x, Norm(kind, 1e-5, gamma, beta))
    assert ulp_errors(y, extended_norm(x, 1e-5, kind, gamma, beta)).max() <= 5


@needs_extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FINITE_ROWS)
@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-5])
def test_wide_extreme_rows_are_within_4_ulp(name, kind, eps):
    x = rows_like(name, 3, 5001)
    y, _ = run(x, Norm(kind, eps))
    with np.errstate(invalid="ignore"):
        truth = extended_norm(x, eps, kind).astype(np.float64)
    if name == "constant" and kind == "layer":
        truth[:] = 0 if eps else np.nan  # where the truth's own mean is not exact
    np.testing.assert_array_equal(np.isnan(y), np.isnan(truth))
    defined = ~np.isnan(truth)
    assert (ulp_errors(y[defined], truth[defined]) <= 4).all()


# The same bits whatever stands around a row


def sample_rows(names, width, dtype):
    rows = [rows_like(name, 1, width, seed) for seed, name in enumerate(names)]
    with np.errstate(over="ignore"):
        return np.concatenate(rows).astype(dtype)


def assert_same_rows(stats, expected):
    for field in ("mean", "var", "rstd", "constant", "nonfinite"):
        assert_same_bits(getattr(stats, field), getattr(expected, field))


def at(stats, place):
    return RowStats(*(field[place : place + 1] for field in stats[:5]))


@thorough
@given(
    width=st.integers(1, 70)
    | st.sampled_from([*range(255, 261), *range(1023, 1031), *range(4095, 4101)]),
    name=st.sampled_from(list(ROWS)),
    others=st.lists(st.sampled_from(list(ROWS)), min_size=1, max_size=4),
    tiles=st.integers(0, 2),
    surplus=st.integers(1, 9),
    into_tile=st.integers(-2, 2) | st.integers(0, 8191),
    kind=st.sampled_from(KINDS),
    eps=st.sampled_from([0.0, 5e-324, 1e-12, 1e-5]),
    affine=st.booleans(),
    dtype=st.sampled_from(["f8", "f4", "f2", ">f8"]),
)
def test_row_has_the_same_bits_in_any_company(
    width, name, others, tiles, surplus, into_tile, kind, eps, affine, dtype
):
    tile = max(1, min(96 * 1024 // width, 8192))
    count = tiles * tile + surplus
    place = (tiles * tile + into_tile) % count
    row, *company = sample_rows([name, *others], width, dtype)
    batch = np.array(company)[np.arange(count) % len(company)]
    batch[place] = row
    kernel = row_kernel(Norm(kind, eps, *(parameters(width) if affine else ())), width)
    alone = np.empty((1, width))
    alone_stats = kernel(row[None], alone)
    for order in "CF":
        y = np.empty(batch.shape)
        stats = kernel(np.asarray(batch, order=order), y)
        assert_same_bits(y[place : place + 1], alone)
        assert_same_rows(at(stats, place), alone_stats)


@pytest.mark.parametrize("width", [1, 3, 31, 33])
def test_row_of_minus_zeros_has_the_same_bits_beside_ordinary_ones(width):
    row = np.full((1, width), -0.0)
    alone, stats = run(row)
    beside, beside_stats = run(np.concatenate([row, rows_like("mean 1e4", 20, width)]))
    assert_same_bits(beside[:1], alone)
    assert_same_rows(at(beside_stats, 0), stats)


def one_after_another(a, b, out=None):
    total = np.add.accumulate(a * b, axis=-1)[..., -1]
    if out is not None:
        out[...] = total
    return total


@pytest.mark.parametrize("additions", [np.vecdot, one_after_another], ids=["BLAS", "one after another"])
@pytest.mark.parametrize("low_bits", range(1, 256, 36))
def test_row_near_the_nearly_constant_bound_has_the_same_bits_beside_a_constant_one(
    low_bits, additions, monkeypatch
):
    """The mean of such a row may be wrong by much of its spread: every addition rounds the same way.

    By how much depends on how many numbers the BLAS adds at a time; one is the worst.
    """
    monkeypatch.setattr(np, "vecdot", additions)
    width, rng = 4096, np.random.default_rng(low_bits)
    for exponent in np.arange(-45, -38, 0.25):
        mean = 1 + (rng.integers(2**44) * 256 + low_bits) * 2.0**-52
        steps = np.rint(2.0**exponent * mean * 2**52 / 256) + 1
        row = mean + rng.choice([-1, 1], (1, width)) * (steps * 256 * 2.0**-52)
        norm = Norm("layer", 0.0)
        alone, stats = run(row, norm)
        beside, beside_stats = run(np.concatenate([row, np.ones((1, width))]), norm)
        assert_same_bits(beside[:1], alone)
        assert_same_rows(at(beside_stats, 0), stats)


@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 255, 768, 4097])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: np.repeat(x, 3, axis=0)[::3],
        lambda x: x[:, ::-1].copy()[:, ::-1],
        lambda x: x.astype(">f8"),
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    ],
    ids=["every second column", "every third row", "reversed", "big-endian", "unaligned"],
)
def test_memory_layout_does_not_change_a_bit(view, width):
    x = np.concatenate([rows_like(name, 2, width) for name in ROWS])
    assert_same_bits(run(view(x))[0], run(x)[0])


@pytest.mark.parametrize("width", [3, 48, 513])
def test_float32_input_has_the_bits_of_the_same_float64_values(width):
    x = rows_like("mean 1e4", 9, width).astype(np.float32)
    assert_same_bits(run(x)[0], run(x.astype(np.float64))[0])


@pytest.mark.parametrize("width", [5, 40, 4100])
def test_kernel_forgets_its_earlier_rows(width):
    kernel = row_kernel(PLAIN, width)
    x = rows_like("normal", 4, width)
    first, second = np.empty(x.shape), np.empty(x.shape)
    first_stats = kernel(x, first)
    kernel(rows_like("NaN", 50, width), np.empty((50, width)))
    second_stats = kernel(x, second)
    assert_same_bits(second, first)
    assert_same_rows(second_stats, first_stats)


def test_statistics_outlive_the_next_call():
    kernel = row_kernel(PLAIN, 40)
    stats = kernel(rows_like("normal", 4, 40), None)
    copy = RowStats(*(np.copy(field) for field in stats[:5]))
    kernel(rows_like("constant", 4, 40), None)
    assert_same_rows(stats, copy)


def test_input_is_left_as_it_was():
    x = rows_like("NaN", 3, 50)
    before = x.copy()
    run(x)
    assert_same_bits(x, before)


WIDE_ROWS = """
import hashlib
import numpy as np
from layernorm_cli.norm.forward import row_kernel
from layernorm_cli.norm.spec import Norm

x = np.random.default_rng(0).standard_normal((4, 100_003)) * 1e3 + 1
y = np.empty(x.shape)
stats = row_kernel(Norm("layer", 1e-5), x.shape[1])(x, y)
print(hashlib.sha256(y.tobytes() + stats.mean.tobytes() + stats.var.tobytes()).hexdigest())
"""


def test_threads_of_the_blas_do_not_change_a_bit():
    digests = set()
    for threads in "1", "2", "4":
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", WIDE_ROWS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


# The output


@pytest.mark.parametrize("width", [20, 45])
@pytest.mark.parametrize("name", FLOATS)
def test_output_is_the_float64_result_rounded_once(name, width):
    dtype = numpy_dtype(DTYPES[name])
    x = np.concatenate([rows_like(row, 3, width) for row in ROWS])
    norm = Norm("layer", 1e-5, *parameters(width))
    unrounded, stats = run(x, norm)
    rounded = np.empty(x.shape, dtype)
    round_into(unrounded, rounded)
    y, rounded_stats = run(x, norm, dtype)
    assert_same_bits(y, rounded)
    assert_same_rows(rounded_stats, stats)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [6, 300])
def test_statistics_are_the_same_without_output(width, kind):
    x = np.concatenate([rows_like(row, 3, width) for row in ROWS])
    _, stats = run(x, Norm(kind))
    assert_same_rows(row_kernel(Norm(kind), width)(x, None), stats)


@pytest.mark.parametrize("width", [1, 31, 32, 5000])
def test_no_rows_give_no_results(width):
    y, stats = run(np.empty((0, width), np.float32), PLAIN, np.float32)
    assert y.shape == (0, width)
    assert [field.shape for field in stats[:5]] == [(0,)] * 5
    assert [field.dtype.name for field in stats[:5]] == ["float64"] * 3 + ["bool"] * 2
    assert stats.overflow == 0


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("float64", 1.7976931348623157e308),
        ("float32", 3.4028235e38),
        ("float16", 65504),
        ("bfloat16", 3.3895314e38),
        ("float8_e4m3fn", 448),
        ("float8_e5m2", 57344),
    ],
)
def test_overflow_counts_results_that_do_not_fit(dtype, largest):
    x = np.array([[-1.0, 1.0, 1.0, -1.0]] * 2)
    gamma = np.array([largest * 0.999, 1.0, largest, -largest])
    beta = np.array([0.0, 0.0, largest / 2, largest / 2])
    y, stats = run(x, Norm("layer", 0.0, gamma, beta), numpy_dtype(DTYPES[dtype]))
    assert stats.overflow == 4
    np.testing.assert_array_equal(np.isfinite(y), [[True, True, False, False]] * 2)
    if dtype != "float8_e4m3fn":  # which has no infinity
        assert np.isposinf(y[:, 2:].astype(np.float64)).all()


def test_overflow_is_counted_over_tiles():
    x = np.tile([-1.0, 1.0], (20_000, 1))
    _, stats = run(x, Norm("layer", 1e-5, np.array([1.0, 1e6])), np.float16)
    assert stats.overflow == 20_000


@pytest.mark.parametrize("parameter", ["gamma", "beta"])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        ("float32", 2.0**128 - 2.0**103),
        ("float16", 65520),
        ("bfloat16", 2.0**128 - 2.0**119),
        ("float8_e4m3fn", np.nextafter(464, 500)),
        ("float8_e5m2", 61440),
    ],
)
def test_overflow_begins_where_the_nearest_value_would_not_fit(dtype, bound, parameter):
    for value, overflow in (bound, 1), (np.nextafter(bound, 0), 0):
        x = np.array([[1.0 if parameter == "gamma" else 0.0]])
        norm = Norm("rms", 0.0 if parameter == "gamma" else 1.0)._replace(
            **{parameter: np.array([value])}
        )
        y, stats = run(x, norm, numpy_dtype(DTYPES[dtype]))
        assert stats.overflow == np.count_nonzero(~np.isfinite(y)) == overflow


@pytest.mark.parametrize("row", [*NONFINITE, "zero"])
def test_undefined_rows_are_no_overflow(row):
    x = np.concatenate([rows_like(row, 3, 8), rows_like("normal", 2, 8)])
    y, stats = run(x, Norm("layer", 0.0, np.full(8, 9e4), np.zeros(8)), np.float16)
    assert np.isnan(y[:3]).all()
    assert stats.overflow == np.count_nonzero(np.isinf(y[3:])) > 0


@pytest.mark.parametrize("which", ["gamma", "beta"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_parameters_are_no_overflow(which, value):
    gamma, beta = np.ones(4), np.zeros(4)
    {"gamma": gamma, "beta": beta}[which][2] = value
    y, stats = run(rows_like("normal", 5, 4), Norm("layer", 1e-5, gamma, beta), np.float32)
    assert stats.overflow == 0
    np.testing.assert_array_equal(np.isfinite(y), [[True, True, False, True]] * 5)


def test_concatenate_joins_blocks_in_order():
    x = np.concatenate([rows_like("normal", 3, 8), rows_like("constant", 1, 8), rows_like("inf", 2, 8)])
    norm = Norm("layer", 1e-5, np.full(8, 9e4))
    blocks = [x[:1], x[1:4], x[4:]]
    parts = [run(block, norm, np.float16)[1] for block in blocks]
    _, whole = run(x, norm, np.float16)
    joined = concatenate(parts)
    assert_same_rows(joined, whole)
    assert joined.overflow == whole.overflow == sum(part.overflow for part in parts) > 0
