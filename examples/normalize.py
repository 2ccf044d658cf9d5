"""Layer normalization in memory: python normalize.py"""

import numpy as np

from layernorm_cli import layer_norm, row_stats

x, gamma, beta = np.load("x.npy"), np.load("gamma.npy"), np.load("beta.npy")
y = layer_norm(x, gamma, beta, eps=1e-5)
print(f"x {x.dtype} {x.shape} -> y {y.dtype} {y.shape}")

before, after = row_stats(x), row_stats(layer_norm(x))
for row in range(3):
    print(f"row {row}: mean {before.mean[row]:8.4f}, var {before.var[row]:9.4f}", end="  ->  ")
    print(f"mean {after.mean[row]:8.1e}, var {after.var[row]:.6f}")
