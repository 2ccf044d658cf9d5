"""Every row of the table of engines goes through the suite."""

import importlib

import pytest
from norm.oracle import needs_extended

from layernorm_cli.backends import ENGINES, is_installed

from .suite import suite_of

MARKERS = {"onnxruntime": "onnx"}


def pytest_generate_tests(metafunc):
    if metafunc.cls is not None:
        for name, values in metafunc.cls.axes().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)


def load_late(name, engine):
    """The engine's prepare function, imported when it is first called: collecting tests imports none."""

    def prepare(norm, width, device):
        return importlib.import_module(engine.module).prepare(norm, width, device)

    return prepare


def marked_suite(name, engine):
    suite = suite_of(name, engine, load_late(name, engine))
    marks = [needs_extended, pytest.mark.skipif(not is_installed(engine), reason=f"no {engine.package}")]
    if engine.extra:
        marks.append(getattr(pytest.mark, MARKERS.get(engine.extra, engine.extra)))
    suite.pytestmark = marks
    return suite


globals().update({f"Test{name.title()}": marked_suite(name, engine) for name, engine in ENGINES.items()})
