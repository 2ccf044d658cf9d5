"""The jax engine: the textbook formula, compiled, in x's own dtype (half precision through float32)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ..norm.forward import Kernel
from ..norm.spec import Norm
from .foreign import foreign_kernel, parameters

__all__ = ["prepare"]

Array = npt.NDArray[np.generic]


def prepare(norm: Norm, width: int, device: str = "cpu") -> Kernel:
    """Return a kernel for one worker."""
    jax.config.update("jax_enable_x64", True)  # else float64 is cut to float32

    def formula(x: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
        wide = x.astype(gamma.dtype)
        if norm.kind == "layer":
            wide = wide - wide.mean(axis=-1, keepdims=True)
        var = jnp.square(wide).mean(axis=-1, keepdims=True)
        eps = jnp.asarray(norm.eps, gamma.dtype)
        return (wide * jax.lax.rsqrt(var + eps) * gamma + beta).astype(x.dtype)

    compute = jax.jit(formula)

    def run(x: Array) -> Array:
        compute_dtype = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            return np.asarray(compute(x, *parameters(norm, width, compute_dtype)))

    return foreign_kernel(norm, width, run)
