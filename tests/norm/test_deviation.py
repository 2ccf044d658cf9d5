import ml_dtypes
import numpy as np
import pytest

from layernorm_cli import layer_norm
from layernorm_cli.norm.closeness import closeness
from layernorm_cli.norm.deviation import deviation, distance, merged, no_deviation
from layernorm_cli.norm.dtypes import DTYPES
from layernorm_cli.norm.forward import row_kernel
from layernorm_cli.norm.row_pairs import Block
from layernorm_cli.norm.spec import Norm

FLOAT32 = DTYPES["float32"]
LAYER = Norm()


def measured(x, y, dtype=FLOAT32, norm=LAYER, start=0, **bounds):
    close = closeness(FLOAT32, dtype, x.shape[1], **bounds)
    block = Block(np.arange(start, start + len(x)), x.astype("f8"), None, y.astype("f8"))
    return deviation(block, row_kernel(norm, x.shape[1]), norm, dtype, close)


@pytest.fixture
def rows():
    x = np.random.default_rng(0).standard_normal((50, 9)).astype("f4")
    return x, layer_norm(x).astype("f4")


def test_a_right_result(rows):
    x, y = rows
    found = measured(x, y)
    assert (found.elements, found.exact, found.wrong, found.wrong_rows) == (450, 450, 0, 0)
    assert found.max_ulp == 0
    assert 0 < found.max_abs == np.abs(y - layer_norm(x)).max() < 2e-7


def test_where_it_is_wrong(rows):
    x, y = rows
    y[7, 3] += 0.5
    y[7, 4] += 0.25
    y[30, 3] -= 0.125
    found = measured(x, y, start=100)
    assert (found.wrong, found.wrong_rows, found.exact) == (3, 2, 447)
    assert [row for _, _, row in found.worst][:2] == [107, 130]
    assert found.worst[0][:2] == (True, pytest.approx(0.5, rel=1e-6))
    np.testing.assert_allclose(found.features[[3, 4]], [0.5, 0.25], 1e-6)
    assert found.features.argsort()[-2:].tolist() == [4, 3]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_ulps_count_steps(rows, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = rows[0]
    y = np.ones((50, 9), kind)
    truth = layer_norm(x).astype(kind)
    y[:] = truth
    for _ in range(3):
        y[4, 4] = np.nextafter(y[4, 4], np.array(np.copysign(9, truth[4, 4]), kind))
    found = measured(x, y, DTYPES[dtype])
    assert (found.max_ulp, found.exact) == (3, 449)


def test_nan_and_inf(rows):
    x, y = rows
    x[3, 2], x[5, 1] = np.nan, np.inf
    y[3] = y[5] = np.nan
    found = measured(x, y)
    assert (found.wrong, found.nonfinite_rows, found.exact) == (0, 2, 450)
    y[3, 2] = 0
    found = measured(x, y)
    assert (found.wrong, found.max_abs, found.worst[0][2]) == (1, np.inf, 3)
    y[3, 2] = np.nan
    y[20, 0] = np.nan
    y[21, 1] = np.inf
    found = measured(x, y)
    assert (found.wrong, found.wrong_rows, found.max_ulp) == (2, 2, np.inf)


def test_engines_leave_zeros_beside_an_inf_in_rms_norms():
    x = np.array([[1, np.inf, 2], [np.nan, np.inf, 1]], "f4")
    beta = np.array([0.5, 1, 0])
    norm = Norm("rms", beta=beta)
    y = np.array([[0.5, np.nan, 0], [np.nan] * 3])
    assert measured(x, y, norm=norm).wrong == 0
    y[0, 0] = 0.625
    assert measured(x, y, norm=norm).wrong == 1
    y[0] = [0.5, 1, 0]
    assert measured(x, y, norm=norm).wrong == 1
    y[0], y[1] = np.nan, [0.5, np.nan, 0]
    assert measured(x, y, norm=norm).wrong == 2


def test_the_users_bounds(rows):
    x, y = rows
    y += 1e-3
    assert measured(x, y).wrong == 450
    assert measured(x, y, atol=1.1e-3).wrong == 0
    found = measured(x, layer_norm(x).astype("f4") * np.float32(1 + 2.0**-22), rtol=0.0, atol=0.0)
    assert found.wrong > 0
    assert found.beyond == 0


def test_huge_rows_are_not_let_off():
    x = 1e200 * np.random.default_rng(0).standard_normal((4, 6))
    norm, close = Norm(), closeness(DTYPES["float64"], DTYPES["float64"], 6)
    for y, wrong in ((layer_norm(x), 0), (1.001 * layer_norm(x), 24), (x, 24)):
        block = Block(np.arange(4), x, None, y)
        assert deviation(block, row_kernel(norm, 6), norm, DTYPES["float64"], close).wrong == wrong


def test_merged_blocks_are_the_whole(rows):
    x, y = rows
    y[::7] += 0.01 * np.arange(8, dtype="f4")[:, None]
    parts = no_deviation(9)
    for start in range(0, 50, 8):
        parts = merged(parts, measured(x[start : start + 8], y[start : start + 8], start=start))
    for name, part, whole in zip(parts._fields, parts, measured(x, y), strict=True):
        if name == "squares":
            assert part == pytest.approx(whole)
        else:
            np.testing.assert_array_equal(np.array(part), np.array(whole))


def test_distance():
    y = np.array([np.nan, np.nan, 1, np.inf, np.inf, -np.inf, 2])
    truth = np.array([np.nan, 1, np.nan, 1e39, 1, 1e39, 1.5])
    expected = [0, np.inf, np.inf, 0, np.inf, np.inf, 0.5]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(distance(y, truth, FLOAT32), expected)
