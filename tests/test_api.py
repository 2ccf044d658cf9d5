"""The public names, and the errors."""

import importlib
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
from conftest import environment

import layernorm_cli
from layernorm_cli import errors, explain, layer_norm, open_tensor, row_stats
from layernorm_cli.errors import Interrupted, LayernormError, PipeClosed, UsageError, printable

PUBLIC = {
    "Explanation",
    "Gradients",
    "LayernormError",
    "RowStats",
    "Tensor",
    "__version__",
    "explain",
    "layer_norm",
    "layer_norm_backward",
    "open_tensor",
    "row_stats",
}


def test_all_is_what_can_be_imported():
    assert set(layernorm_cli.__all__) >= PUBLIC
    assert (
        sorted(layernorm_cli.__all__) == sorted(set(layernorm_cli.__all__)) == sorted(dir(layernorm_cli))
    )
    namespace = {}
    exec("from layernorm_cli import *", namespace)
    assert set(layernorm_cli.__all__) == set(namespace) - {"__builtins__"}


@pytest.mark.parametrize("name", layernorm_cli.__all__)
def test_each_name(name):
    value = getattr(layernorm_cli, name)
    if name == "__version__":
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*", value)
        return
    assert value.__name__ == name
    assert len(pydoc.getdoc(value).splitlines()[0]) > 20
    module = inspect.getmodule(value)
    assert name in module.__all__
    assert getattr(module, name) is value


def test_no_other_name():
    with pytest.raises(AttributeError, match="'layernorm_cli' has no attribute 'nosuch'"):
        layernorm_cli.nosuch  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("layernorm_cli.nosuch")


def test_version_is_the_installed_one():
    assert layernorm_cli.__version__ == version("layernorm")


def test_names_work_in_a_fresh_process(here):
    np.save("x.npy", [[1.0, 3.0]])
    script = (
        "import layernorm_cli as l\n"
        "with l.open_tensor('x.npy') as t: print(l.layer_norm(t.read(), eps=0).tolist())\n"
        "print(l.row_stats([[1.0, 3.0]]).var.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment(), check=True
    )
    assert done.stdout == b"[[-1.0, 1.0]]\n[1.0]\n"


def test_readme_in_three_lines(here):
    x = np.random.default_rng(0).normal(0, 1, (3, 5)).astype("f4")
    np.save("x.npy", x)
    with open_tensor("x.npy") as tensor:
        assert (tensor.name, tensor.shape, tensor.dtype.name) == (None, (3, 5), "float32")
        y = layer_norm(tensor.read(), eps=0)
    assert y.dtype == np.float64
    stats = row_stats(y, eps=0)
    np.testing.assert_allclose(stats.mean, 0, atol=1e-15)
    np.testing.assert_allclose(stats.var, 1, 1e-15)


@pytest.mark.parametrize("call", [explain, layer_norm, row_stats])
@pytest.mark.parametrize(
    ("x", "options", "mention"),
    [
        (1.0, {}, "0-d"),
        (np.zeros((2, 0)), {}, "zero width"),
        ([[1, 2]], {"axis": 2}, "axis 2"),
        ([[1, 2]], {"eps": -1.0}, "eps -1.0"),
        ([[1, 2]], {"eps": float("nan")}, "eps nan"),
        ([[1, 2]], {"kind": "batch"}, "'batch'"),
        ([["a"]], {}, "<U1"),
        ([[1j]], {}, "complex128"),
    ],
)
def test_errors_of_arrays_are_usage_errors(call, x, options, mention):
    with pytest.raises(UsageError, match=re.escape(mention)):
        call(x, **options)


ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type)
    and issubclass(value, BaseException)
    and value.__module__ == errors.__name__
]


def drawn_tree():
    """Class -> (parent, exit code) as the docstring draws it."""
    tree, parents = {}, []
    for line in errors.__doc__.splitlines():
        match = re.match(r"([│├└─ ]*)([A-Z]\w+)(?: +exit (.+?)(?:  .*)?)?$", line)
        if match and (match[1] or match[2] in ("LayernormError", "BaseException")):
            depth = len(match[1]) // 4
            parents[depth:] = [match[2]]
            tree[match[2]] = (parents[depth - 1] if depth else None, match[3])
    return tree


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_tree_of_errors(error):
    parent, code = drawn_tree()[error.__name__]
    if error is LayernormError:
        assert error.__base__ is Exception
        return
    assert error.__base__.__name__ == parent
    if error is Interrupted:
        assert (code.split()[0], error(15).exit_code) == ("128", 143)
    else:
        assert str(error.exit_code) == code.strip()


def test_tree_has_every_error():
    assert {error.__name__ for error in ERRORS} == set(drawn_tree()) - {"BaseException"}
    assert {error.__name__ for error in ERRORS} <= set(errors.__all__)
    assert not issubclass(PipeClosed, Exception)


@pytest.mark.parametrize(
    "error", [e for e in ERRORS if issubclass(e, LayernormError)], ids=lambda e: e.__name__
)
def test_messages(error):
    full = error("x\n.npy", "found \x1b", "expected", "hint")
    assert str(full) == "x\\n.npy: found \\x1b\n  expected: expected\n  try: hint"
    assert str(error("", "found")) == "found"
    copy = pickle.loads(pickle.dumps(full))
    assert (type(copy), str(copy)) == (error, str(full))
    assert (copy.where, copy.found, copy.expected, copy.hint) == (
        "x\n.npy",
        "found \x1b",
        "expected",
        "hint",
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü中", "plain ü中"),
        ("\x00\x1b\x7f\x9b", "\\x00\\x1b\\x7f\\x9b"),
        ("\r\n\t", "\\r\\n\\t"),
        ("\udcff", "\\udcff"),
        ("\u202e\u2028", "\\u202e\\u2028"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
