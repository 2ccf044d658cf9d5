"""layernorm bench: engines side by side, each in a process of its own: speed, memory, exactness."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..backends import all_engines, choose_engine, is_installed, load_prepare
from ..errors import LayernormError, UsageError
from ..norm.dtypes import DTYPES, DType, numpy_dtype
from ..norm.rounding import round_into, widen_into
from ..norm.spec import DEFAULT_EPS, Norm
from ..results import BenchCase, BenchResult, Exactness
from ..tensorfiles.reader import open_tensor
from ..tensorfiles.rows import split

__all__ = ["BenchRequest", "bench"]

Array = npt.NDArray[np.generic]
LongDouble = npt.NDArray[np.longdouble]

CHECKED_ROWS = 256
EXACT_BAR = 0.9999  # of the results of an exact engine on each distribution
FOREIGN_BAR = 16  # roundings that the error of another engine may have, on standard normal rows
NORMAL = "N(0, 1)"


class BenchRequest(NamedTuple):
    """What to measure: on rows of a file, or on so many generated ones; no backends: all installed.

    file: whole processes from file to file, against cp, instead of passes in memory.
    """

    x: str | None = None
    backends: tuple[str, ...] = ()
    rows: int | None = None
    width: int = 768
    dtype: DType = DTYPES["float32"]
    kind: str = "layer"
    eps: float = DEFAULT_EPS
    device: str = "cpu"
    repeat: int = 5
    file: bool = False


def bench(request: BenchRequest) -> BenchResult:
    """Measure engines one after the other, and return what each took and how exact it was.

    In memory an engine has one thread, and its time is set against copying x to y. From file to file
    it runs as the command does, and its time is set against cp in the same round.

    Raises UsageError, InputError, MissingEngine.
    """
    if not DTYPES[request.dtype.name].in_numpy and request.file:
        raise UsageError("--file", f"npy files cannot hold {request.dtype.name}", "--dtype float32")
    names = request.backends or tuple(n for n, e in all_engines().items() if is_installed(e))
    for name in names:
        choose_engine(name, 0)
    if request.x is not None:
        with open_tensor(request.x) as x:
            rows, width = split(x.shape, len(x.shape) - 1)
            if rows * width == 0:
                raise UsageError(request.x, f"shape {x.shape} has nothing to measure", "rows")
            request = request._replace(dtype=x.dtype, width=width, rows=min(rows, request.rows or rows))
    rows = request.rows or max(1, (1 << 24) // request.width)
    request = request._replace(rows=rows)
    cases = []
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            case = process.submit(_measure, request, name).result()
        if request.file and case.wrong is None:
            case = _measure_files(request, case)
        cases.append(case)
    source = request.x or f"standard normal rows of {request.dtype.name}"
    how = "file to file, against cp" if request.file else "in memory, one thread, against a copy"
    return BenchResult(
        f"{source}: {rows} rows of {request.width}, {how}; median of {request.repeat}", tuple(cases)
    )


def _measure(request: BenchRequest, name: str) -> BenchCase:
    """Check and time one engine in memory; runs in a process of its own."""
    _, engine = choose_engine(name, 0)
    prepare = load_prepare(name, engine, request.kind, request.dtype.name, request.device)
    norm = Norm("rms" if request.kind == "rms" else "layer", request.eps)
    kernel = prepare(norm, request.width, request.device)
    checks = tuple(
        _exactness(distribution, x, kernel, request)
        for distribution, x in _distributions(request).items()
    )
    wrong = _out_of_bounds(checks, engine.exact, request.dtype)
    seconds = ratio = speed = None
    x = _rows(request)
    y = np.empty_like(x)
    if wrong is None and not request.file:
        seconds = _median(lambda: kernel(x, y), request.repeat)
        ratio = seconds / _median(lambda: np.copyto(y, x), request.repeat)
        speed = 2 * x.nbytes / seconds / 1e9
    return BenchCase(
        backend=name,
        dtype=request.dtype.name,
        shape=x.shape,
        seconds=seconds,
        gb_per_s=speed,
        ratio_to_copy=ratio,
        exact_fraction=min(check.exact_fraction for check in checks),
        max_abs_error=max(check.max_abs_error for check in checks),
        peak_rss_mb=_peak_rss_mb(),
        wrong=wrong,
        distributions=checks,
    )


def _median(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first warms up


def _rows(request: BenchRequest) -> Array:
    if request.x is not None:
        with open_tensor(request.x) as tensor:
            return tensor.rows(len(tensor.shape) - 1).read_rows(0, request.rows or 1)
    rng = np.random.default_rng(0)
    return _rounded(rng.standard_normal((request.rows or 1, request.width)), request.dtype)


def _rounded(values: npt.NDArray[np.float64], dtype: DType) -> Array:
    rows = np.empty(values.shape, numpy_dtype(dtype))
    if dtype.kind == "f":
        round_into(values, rows)
    else:
        np.copyto(rows, np.rint(values), casting="unsafe")
    return rows


def _distributions(request: BenchRequest) -> dict[str, Array]:
    """Rows that are easy and hard to normalize, as far as the dtype can hold them."""
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((CHECKED_ROWS, request.width))
    outlier = np.where(np.arange(request.width) == request.width // 2, 3000.0, 1.0)
    values = {
        NORMAL: normal,
        "mean 1e4": normal + 1e4,
        "mean 1e6, sd 0.1": 0.1 * normal + 1e6,
        "one feature 3000x": normal * outlier,
        "1e-4 x N(0, 1)": 1e-4 * normal,
        "1e20 x N(0, 1)": 1e20 * normal,
    }
    with np.errstate(over="ignore"):
        rows = {name: _rounded(value.copy(), request.dtype) for name, value in values.items()}
    return {name: x for name, x in rows.items() if np.isfinite(x.astype(np.float64)).all()}


def _exactness(
    distribution: str, x: Array, kernel: Callable[[Array, Array | None], object], request: BenchRequest
) -> Exactness:
    y_dtype = x.dtype if request.dtype.kind == "f" else np.dtype(np.float64)
    y, right = np.empty(x.shape, y_dtype), np.empty(x.shape, y_dtype)
    kernel(x, y)
    exact = _reference(x, request.kind, request.eps)
    round_into(exact.astype(np.float64), right)
    with np.errstate(invalid="ignore"):
        error = np.abs(y.astype(np.longdouble) - exact)
    same = float((y == right).mean())
    worst = float(error.max()) if np.isfinite(error).all() else math.inf
    return Exactness(distribution, same, worst)


def _reference(x: Array, kind: str, eps: float) -> LongDouble:
    """The norm in long double; the centred row is centred again, since its mean rounds too."""
    wide = np.empty(x.shape)
    widen_into(x, wide)
    centred = wide.astype(np.longdouble)
    if kind == "layer":
        for _ in range(2):
            centred = centred - centred.mean(axis=1, keepdims=True)
    var = (centred * centred).mean(axis=1, keepdims=True)
    result: LongDouble = centred / np.sqrt(var + np.longdouble(eps))
    return result


def _out_of_bounds(checks: tuple[Exactness, ...], exact: bool, dtype: DType) -> str | None:
    if exact and dtype.name != "float64" and dtype.kind == "f":
        worst = min(checks, key=lambda check: check.exact_fraction)
        if worst.exact_fraction < EXACT_BAR:
            return f"{worst.exact_fraction:.4%} correctly rounded on {worst.distribution}"
        return None
    rounding = {8: 2.0**-53, 4: 2.0**-24, 2: 2.0**-11 if dtype.in_numpy else 2.0**-8}
    bound = FOREIGN_BAR * 4 * rounding.get(dtype.itemsize, 2.0**-8)
    normal = next(check for check in checks if check.distribution == NORMAL)
    if not normal.max_abs_error <= bound:
        return f"off by {normal.max_abs_error:.3g} on {NORMAL}, more than {bound:.3g}"
    return None


def _peak_rss_mb(process: int | str = "self") -> float:
    """The most memory that a process has had in use so far, in megabytes; 0 where it cannot be told.

    Not ru_maxrss: at the start of a program that still counts what started it.
    """
    try:
        with open(f"/proc/{process}/status") as status:
            kilobytes = next(line.split()[1] for line in status if line.startswith("VmHWM"))
        return int(kilobytes) / 1024
    except (OSError, StopIteration):
        return 0


def _measure_files(request: BenchRequest, case: BenchCase) -> BenchCase:
    """Time the command from file to file, in turn with cp."""
    with tempfile.TemporaryDirectory(prefix="layernorm-") as folder:
        x, y = os.path.join(folder, "x.npy"), os.path.join(folder, "y.npy")
        np.save(x, _rows(request))
        command = [sys.executable, "-m", "layernorm_cli", "apply", x, "-o", y, "-q"]
        command += ["--backend", case.backend, "--kind", request.kind, "--eps", repr(request.eps)]
        command += ["--device", request.device]
        ours, copies, peak = [], [], 0.0
        for _ in range(request.repeat + 1):
            copies.append(_timed(["cp", x, y])[0])
            os.unlink(y)
            seconds, memory = _timed(command)
            os.unlink(y)
            ours.append(seconds)
            peak = max(peak, memory)
        size = 2 * os.path.getsize(x)
    ratio = statistics.median(a / b for a, b in zip(ours[1:], copies[1:], strict=True))
    seconds = statistics.median(ours[1:])
    return case._replace(
        seconds=seconds, gb_per_s=size / seconds / 1e9, ratio_to_copy=ratio, peak_rss_mb=peak
    )


def _timed(command: list[str]) -> tuple[float, float]:
    """Seconds of a command, and the memory in megabytes of its first process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = [0.0]

    def watch() -> None:
        while (memory := _peak_rss_mb(process.pid)) and process.returncode is None:
            peak[0] = memory
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    errors = process.communicate()[1]
    seconds = time.perf_counter() - start
    watcher.join()
    if process.returncode:
        reason = errors.decode(errors="replace").strip()
        raise LayernormError(command[0], "failed", None, reason[:200] or None)
    return seconds, peak[0]
