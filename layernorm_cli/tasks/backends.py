"""layernorm backends: which engines there are, and which are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..backends import Engine, all_engines, is_installed
from ..results import BackendInfo

__all__ = ["backends"]

EXACT, FOREIGN = "correctly rounded", "as its package computes"


def backends() -> tuple[BackendInfo, ...]:
    """Return what there is to know of each engine, without importing any.

    >>> backends()[0].backend
    'numpy'
    """
    own_first = sorted(all_engines().items(), key=lambda item: item[0] != "numpy")
    return tuple(
        BackendInfo(
            backend=name,
            version=_version(engine),
            exactness=EXACT if engine.exact else FOREIGN,
            kinds=engine.kinds,
            dtypes=engine.dtypes,
            devices=engine.devices,
            install=engine.install,
        )
        for name, engine in own_first
    )


def _version(engine: Engine) -> str | None:
    if not is_installed(engine):
        return None
    try:
        return version(engine.package)
    except PackageNotFoundError:
        return "unknown"
