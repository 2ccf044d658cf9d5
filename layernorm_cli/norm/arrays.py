"""Layer normalization of arrays in memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .dtypes import dtype_of
from .forward import RowStats, row_kernel
from .spec import DEFAULT_EPS, Norm, make_norm

__all__ = ["layer_norm", "normalized_axis", "row_stats"]


def normalized_axis(shape: tuple[int, ...], axis: int) -> int:
    """Return axis counted from the front; the axes from it to the last one are normalized together.

    Raises UsageError for a 0-d or zero-width shape and an axis that it does not have.
    """
    if not shape:
        raise UsageError("", "a 0-d tensor has no axis to normalize", "1 dimension or more")
    if not -len(shape) <= axis < len(shape):
        raise UsageError(
            f"axis {axis}", f"not an axis of shape {shape}", f"{-len(shape)} to {len(shape) - 1}"
        )
    axis %= len(shape)
    if math.prod(shape[axis:]) == 0:
        raise UsageError(
            "", f"shape {shape} has rows of zero width: nothing to normalize", "rows of 1 or more"
        )
    return axis


def layer_norm(
    x: npt.ArrayLike,
    gamma: npt.ArrayLike | None = None,
    beta: npt.ArrayLike | None = None,
    eps: float = DEFAULT_EPS,
    axis: int = -1,
    *,
    kind: str = "layer",
    gamma_offset: float = 0,
) -> npt.NDArray[np.float64]:
    """Normalize x over its axes from axis to the last one, and return the unrounded float64 result.

    x: (..., d), any real dtype; gamma, beta: shape x.shape[axis:], or None for 1 and 0. Statistics
    and the result are float64: y = (x - mean) / sqrt(var + eps) * (gamma + gamma_offset) + beta, var
    being divided by d. kind "rms" leaves the mean in, and var is the mean square. A row with a NaN
    or an inf is all NaN.

    Raises UsageError for shapes, dtypes or an eps that cannot be used.

    Sources: Ba, Kiros, Hinton, "Layer Normalization" (arXiv 1607.06450); Zhang, Sennrich, "Root Mean
    Square Layer Normalization" (arXiv 1910.07467); ONNX LayerNormalization-17;
    torch.nn.functional.layer_norm.

    >>> layer_norm([2, 6, -2, 4], eps=0).round(4)
    array([-0.169 ,  1.1832, -1.5213,  0.5071])
    """
    array = np.asarray(x)
    dtype_of(array)
    axis = normalized_axis(array.shape, axis)
    norm = make_norm(kind, eps, gamma, beta, gamma_offset, array.shape[axis:])
    y = np.empty(array.shape)
    width = math.prod(array.shape[axis:])
    row_kernel(norm, width)(array.reshape(-1, width), y.reshape(-1, width))
    return y


def row_stats(
    x: npt.ArrayLike, eps: float = DEFAULT_EPS, axis: int = -1, *, kind: str = "layer"
) -> RowStats:
    """Return mean, var and rstd = 1 / sqrt(var + eps) of each row of x, in float64.

    x: (..., d), any real dtype. The rows are the leading axes in C order: each field is
    (x[..., 0].size,) for axis -1. var is divided by d; for kind "rms" it is the mean square.

    Raises UsageError for shapes, dtypes or an eps that cannot be used.

    >>> stats = row_stats([[2, 6, -2, 4]])
    >>> float(stats.mean[0]), float(stats.var[0])
    (2.5, 8.75)
    """
    array = np.asarray(x)
    dtype_of(array)
    axis = normalized_axis(array.shape, axis)
    width = math.prod(array.shape[axis:])
    norm: Norm = make_norm(kind, eps)
    return row_kernel(norm, width)(array.reshape(-1, width), None)
