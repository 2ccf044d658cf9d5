"""A trained GPT-2: what its 25 layer norms made of real activations, as torch computed it."""

import json

import numpy as np
import pytest
from conftest import DATA
from safetensors.numpy import load_file

from layernorm_cli.tasks.apply import ApplyRequest, apply

GPT2 = DATA / "gpt2"
ACTIVATIONS = load_file(GPT2 / "activations.safetensors")
PARAMETERS = {name: load_file(GPT2 / f"{name}.safetensors") for name in ("norms", "norms-bf16")}
SITES = [name.removesuffix(".input") for name in ACTIVATIONS if name.endswith(".input")]
EPS = 1e-5
HALF_ULP = 2.0**-24


def options(site, file):
    return {
        "x": f"{GPT2 / 'activations.safetensors'}#{site}.input",
        "gamma": f"{GPT2 / file}.safetensors#{site}.weight",
        "beta": f"{GPT2 / file}.safetensors#{site}.bias",
    }


class Truth:
    """A site's rows, standardized in long double from float32 input, and torch's output for them."""

    def __init__(self, site):
        x = ACTIVATIONS[f"{site}.input"].astype(np.longdouble)
        self.torch = ACTIVATIONS[f"{site}.output"]
        sd = np.sqrt(x.var(-1, keepdims=True) + np.longdouble(EPS))
        self.xhat = (x - x.mean(-1, keepdims=True)) / sd
        self.size = np.abs(x).mean(-1, keepdims=True) / sd
        self.gamma, self.beta = self.parameters(site, "norms")

    @staticmethod
    def parameters(site, file):
        """The file's own gamma and beta, exactly."""
        names = (f"transformer.{site}.weight", f"transformer.{site}.bias")
        return [PARAMETERS[file][name].astype(np.float32).astype(np.longdouble) for name in names]

    def error_of_torch(self):
        """How far float32 arithmetic may be off, element by element.

        torch rounds a row's mean (its error grows with the row's mean |x|, here over the standard
        deviation), its rstd, and each of the four operations of (x * rstd - mean * rstd) * gamma +
        beta: each by half an ulp of what it works on. Measured over all 76,800 elements the worst
        is 2.9 times that sum, and 2.2 to 2.9 times in each of the 25 sites; so 4 it is.
        """
        return 4 * HALF_ULP * (np.abs(self.gamma) * (np.abs(self.xhat) + self.size) + np.abs(self.beta))


def test_all_sites_are_here():
    config = json.loads((GPT2 / "config.json").read_text())
    names = [f"h.{block}.{norm}" for block in range(config["n_layer"]) for norm in ("ln_1", "ln_2")]
    assert sorted(SITES) == sorted([*names, "ln_f"])
    assert config["layer_norm_epsilon"] == EPS
    for tensors in PARAMETERS.values():
        assert len(tensors) == 2 * len(SITES)


@pytest.mark.parametrize("site", SITES)
def test_float32_parameters(site, here):
    result = apply(ApplyRequest(**options(site, "norms"), output="y.safetensors"))
    assert (result.rows, result.shape, result.output_dtype) == (48, (2, 24, 64), "float32")
    ((name, y),) = load_file("y.safetensors").items()
    assert name == result.tensor == f"{site}.input"
    truth = Truth(site)
    assert (np.abs(y.astype(np.longdouble) - truth.torch) <= truth.error_of_torch()).all()
    exact = truth.xhat * truth.gamma + truth.beta
    assert np.mean(y == exact.astype(np.float32)) > 0.9999
    assert np.mean(truth.torch == exact.astype(np.float32)) < 0.6  # so the bound is torch's, not ours


@pytest.mark.parametrize("site", SITES)
def test_bfloat16_parameters(site, here):
    apply(ApplyRequest(**options(site, "norms-bf16"), output="y.npy"))
    truth = Truth(site)
    gamma, beta = truth.parameters(site, "norms-bf16")
    for rounded, original in ((gamma, truth.gamma), (beta, truth.beta)):
        assert (np.abs(rounded - original) <= 2.0**-9 * 2 ** np.ceil(np.log2(np.abs(original)))).all()
    rounding = np.abs(truth.xhat) * np.abs(gamma - truth.gamma) + np.abs(beta - truth.beta)
    distance = np.abs(np.load("y.npy").astype(np.longdouble) - truth.torch)
    assert (distance <= rounding + truth.error_of_torch()).all()
    assert distance.max() > 100 * truth.error_of_torch().max()  # so it was bfloat16 that was read


@pytest.mark.parametrize(
    ("site", "file"), [("h.0.ln_1", "norms"), ("ln_f", "norms"), ("h.11.ln_2", "norms-bf16")]
)
def test_installed_command(site, file, layernorm):
    refs = options(site, file)
    apply(ApplyRequest(**refs, output="api.npy"))
    done = layernorm(
        *("apply", refs["x"], "--gamma", refs["gamma"], "--beta", refs["beta"]),
        *("-o", "command.npy", "--format", "json"),
    )
    assert (done.code, done.err) == (0, "")
    report = done.json
    assert (report["gamma"], report["beta"]) == (refs["gamma"], refs["beta"])
    assert report["summary"]["nonfinite_rows"] == report["summary"]["constant_rows"] == 0
    with open("api.npy", "rb") as one, open("command.npy", "rb") as other:
        assert one.read() == other.read()


def test_mean_and_var_of_real_rows(here):
    result = apply(ApplyRequest(**options("h.5.ln_1", "norms"), rows=None))
    x = ACTIVATIONS["h.5.ln_1.input"].astype(np.longdouble).reshape(48, 64)
    np.testing.assert_allclose(
        [row.mean_before for row in result.table], x.mean(1).astype("f8"), 0, 1e-15
    )
    np.testing.assert_allclose([row.var_before for row in result.table], x.var(1).astype("f8"), 1e-14)
