"""Engines: who computes. One file each, found through one table, imported only when asked for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, cast

from ..errors import MissingEngine, UsageError
from ..norm.backward import BackwardKernel
from ..norm.forward import Kernel
from ..norm.spec import Norm

__all__ = [
    "ENGINES",
    "Engine",
    "Prepare",
    "PrepareBackward",
    "all_engines",
    "choose_engine",
    "is_installed",
    "load_prepare",
    "load_prepare_backward",
]

Prepare = Callable[[Norm, int, str], Kernel]
"""prepare(norm, width, device) returns a kernel for one worker; every engine's module has one."""

PrepareBackward = Callable[[Norm, int, str], BackwardKernel]
"""prepare_backward(norm, width, device) returns a backward kernel for one worker."""

REALS = ("float64", "float32", "float16", "bfloat16")
ALL = (*REALS, "float8_e4m3fn", "float8_e5m2", "integers", "bool")
ENTRY_POINTS = "layernorm_cli.backends"
AUTO_ELEMENTS = 1 << 30  # about where numba's start-up has paid for itself


class Engine(NamedTuple):
    """What the table says of an engine.

    module has its prepare function; package is what must be installed, extra installs it. exact
    engines round correctly and give the same bits always, others compute as their package does, in
    x's own precision. backward: it has prepare_backward too. processes: workers that share no
    interpreter are faster, since its calls are short, and safe, since it starts no threads.
    """

    module: str
    package: str
    extra: str | None = None
    exact: bool = False
    dtypes: tuple[str, ...] = REALS
    kinds: tuple[str, ...] = ("layer", "rms")
    devices: tuple[str, ...] = ("cpu",)
    backward: bool = False
    processes: bool = False

    @property
    def install(self) -> str:
        """The line that installs it."""
        return f"pip install 'layernorm[{self.extra}]'" if self.extra else "pip install layernorm"


ENGINES = {
    "numpy": Engine(
        "layernorm_cli.backends.numpy", "numpy", exact=True, dtypes=ALL, backward=True, processes=True
    ),
    "numba": Engine(
        "layernorm_cli.backends.numba",
        "numba",
        "numba",
        exact=True,
        dtypes=ALL,
        backward=True,
        processes=True,
    ),
    "torch": Engine(
        "layernorm_cli.backends.torch", "torch", "torch", devices=("cpu", "cuda"), backward=True
    ),
    "onnxruntime": Engine(
        "layernorm_cli.backends.onnxruntime",
        "onnxruntime",
        "onnxruntime",
        dtypes=("float64", "float32", "float16"),
    ),
    "jax": Engine("layernorm_cli.backends.jax", "jax", "jax"),
}


def all_engines() -> dict[str, Engine]:
    """Return the table, with the engines that other packages have registered as entry points."""
    from importlib.metadata import entry_points

    others = {}
    for point in entry_points(group=ENTRY_POINTS):
        with contextlib.suppress(
            ImportError, AttributeError
        ):  # a broken package is not ours to break on
            others[point.name] = cast(Engine, point.load())
    return {**others, **ENGINES}


def is_installed(engine: Engine) -> bool:
    """Return whether the engine's package is there, without importing it."""
    return importlib.util.find_spec(engine.package) is not None


def choose_engine(name: str, elements: int) -> tuple[str, Engine]:
    """Return an engine by name; auto is numba where it is installed and the work repays its start.

    Raises UsageError for a name that no engine has, MissingEngine for a package that is not there.
    """
    if name == "auto":
        name = "numba" if elements >= AUTO_ELEMENTS and is_installed(ENGINES["numba"]) else "numpy"
    engine = ENGINES.get(name) or all_engines().get(name)
    if engine is None:
        names = ", ".join(("auto", *all_engines()))
        raise UsageError(f"backend {name!r}", "no such engine", names)
    if not is_installed(engine):
        raise MissingEngine(f"backend {name}", "not installed", None, engine.install)
    return name, engine


def load_prepare(name: str, engine: Engine, kind: str, dtype: str, device: str) -> Prepare:
    """Import the engine, and return its prepare function.

    Raises UsageError where the engine cannot do this kind, dtype or device, MissingEngine where it
    or its package does not import.
    """
    return cast(Prepare, _load(name, engine, kind, dtype, device).prepare)


def load_prepare_backward(
    name: str, engine: Engine, kind: str, dtype: str, device: str
) -> PrepareBackward:
    """Import the engine, and return its prepare_backward function; Raises as load_prepare."""
    if not engine.backward:
        others = ", ".join(other for other, row in all_engines().items() if row.backward)
        raise UsageError(f"backend {name}", "has no backward pass", others, "--backend numpy")
    return cast(PrepareBackward, _load(name, engine, kind, dtype, device).prepare_backward)


def _load(name: str, engine: Engine, kind: str, dtype: str, device: str) -> ModuleType:
    for what, asked, offered in (
        ("kind", kind, engine.kinds),
        ("dtype", "integers" if "int" in dtype else dtype, engine.dtypes),
        ("device", device, engine.devices),
    ):
        if asked not in offered:
            raise UsageError(
                f"backend {name}", f"cannot do {what} {asked}", ", ".join(offered), "--backend numpy"
            )
    try:
        return importlib.import_module(engine.module)
    except ImportError as error:
        raise MissingEngine(
            f"backend {name}", f"does not import: {error}", None, engine.install
        ) from None
