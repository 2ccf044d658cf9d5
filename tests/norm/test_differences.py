"""Finite differences agree with right gradients, and find wrong ones."""

import numpy as np
import pytest

from layernorm_cli import layer_norm_backward
from layernorm_cli.norm.backward import Gradients
from layernorm_cli.norm.differences import gradient_errors
from layernorm_cli.norm.spec import Norm

from .oracle import rows_like


def case(kind="layer", shape=(9, 24)):
    x, dy = rows_like("normal", *shape), rows_like("normal", *shape, 1)
    norm = Norm(kind, 1e-5, np.linspace(0.5, 2, shape[1]), np.ones(shape[1]))
    return x, dy, norm, layer_norm_backward(x, dy, norm.gamma, kind=kind)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shape", [(1, 3), (9, 24), (2, 1000)])
def test_right_gradients(kind, shape):
    assert max(gradient_errors(*case(kind, shape), directions=3)) < 1e-9


@pytest.mark.parametrize("scale", [1e-6, 1e5])
def test_steps_are_in_units_of_the_row(scale):
    x, dy, norm, _ = case()
    x *= scale
    norm = norm._replace(eps=1e-20)
    found = layer_norm_backward(x, dy, norm.gamma, eps=norm.eps)
    assert gradient_errors(x, dy, norm, found, 3).dx < 1e-9


@pytest.mark.parametrize("field", Gradients._fields)
def test_wrong_gradients(field):
    x, dy, norm, found = case()
    wrong = found._replace(**{field: getattr(found, field) * 1.001})
    errors = gradient_errors(x, dy, norm, wrong, directions=5)
    for name in Gradients._fields:
        assert (getattr(errors, name) > 1e-5) == (name == field)


def test_one_wrong_element_shows():
    x, dy, norm, found = case()
    found.dx[3, 4] += 0.1
    assert gradient_errors(x, dy, norm, found, directions=5).dx > 1e-5


def test_a_seed_gives_the_same_directions():
    assert gradient_errors(*case(), directions=2, seed=7) == gradient_errors(*case(), 2, 7)


def test_no_rows():
    x, dy, norm, found = case(shape=(0, 4))
    assert np.isnan(gradient_errors(x, dy, norm, found, 2)).all()
