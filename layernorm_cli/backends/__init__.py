"""Engines: who computes. One file each, found through one table, imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from ..errors import MissingEngine, UsageError
from ..norm.forward import Kernel
from ..norm.spec import Norm

__all__ = ["ENGINES", "Engine", "load_engine"]


class Engine(Protocol):
    """What an engine's module offers."""

    HOLDS_GIL: bool
    """Whether its calls are so short that threads wait for each other, and processes serve better."""

    prepare: Callable[[Norm, int], Kernel]
    """prepare(norm, width) returns a kernel for one worker."""


class _Entry(NamedTuple):
    module: str
    needs: str | None = None


ENGINES = {"numpy": _Entry("layernorm_cli.backends.numpy")}
PLANNED = ("numba", "torch", "onnxruntime", "jax")


def load_engine(name: str) -> tuple[str, Engine]:
    """Return an engine's name and module; auto is numpy.

    Raises UsageError for a name that no engine has, MissingEngine for one that is not there.
    """
    name = "numpy" if name == "auto" else name
    if name in PLANNED:
        raise MissingEngine(f"backend {name}", "not part of this version", "numpy", "--backend numpy")
    if name not in ENGINES:
        raise UsageError(f"backend {name!r}", "no such engine", ", ".join(("auto", *ENGINES)))
    return name, cast(Engine, importlib.import_module(ENGINES[name].module))
