"""A checkpoint opened: its sites by name, their parameters exactly."""

import json

import ml_dtypes
import numpy as np
import pytest
from conftest import DATA
from safetensors.numpy import load_file, save_file

from layernorm_cli import find_sites
from layernorm_cli.checkpoints.survey import find_site, read_parameters, survey
from layernorm_cli.errors import InputError

NORMS = DATA / "gpt2" / "norms.safetensors"


def test_gpt2():
    sites = find_sites(str(NORMS))
    assert len(sites) == 25
    assert [site.site for site in sites[:3]] == [
        f"transformer.h.{n}" for n in ("0.ln_1", "0.ln_2", "1.ln_1")
    ]
    assert {(site.kind, site.eps, site.width) for site in sites} == {("layer", 1e-5, 64)}


@pytest.mark.parametrize("name", ["transformer.h.3.ln_2", "h.3.ln_2", "3.ln_2"])
def test_a_site_by_its_name_or_the_end_of_it(name):
    assert find_site(survey(str(NORMS)), name).site == "transformer.h.3.ln_2"


@pytest.mark.parametrize(("name", "found"), [("ln_1", "12 sites"), ("ln_9", "no such site")])
def test_names_that_mean_none_or_many(name, found):
    with pytest.raises(InputError, match=found) as caught:
        find_site(survey(str(NORMS)), name)
    assert "transformer.h.0.ln_1" in str(caught.value)


@pytest.mark.parametrize("file", ["norms", "norms-bf16"])
def test_parameters_are_exact(file):
    path = DATA / "gpt2" / f"{file}.safetensors"
    found = survey(str(path))
    truth = load_file(path)
    read = list(read_parameters(found, found.sites))
    assert [site for site, _ in read] == list(found.sites)
    for site, parameters in read:
        np.testing.assert_array_equal(parameters.gamma, truth[site.gamma].astype("f8"))
        np.testing.assert_array_equal(parameters.beta, truth[site.beta].astype("f8"))


def test_the_scale_of_float8_is_applied(here):
    gamma = np.array([1, 2, -1, 0.5]).astype(ml_dtypes.float8_e4m3fn)
    header = {
        "ln.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
        "ln.weight_scale_inv": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    text = json.dumps(header).encode()
    data = gamma.tobytes() + np.float32(0.5).tobytes()
    (here / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = survey("m.safetensors")
    ((_, parameters),) = read_parameters(found, found.sites)
    np.testing.assert_array_equal(parameters.gamma, [0.5, 1, -0.5, 0.25])
    assert "ln.weight_scale_inv" in found.warnings[0]


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_config_that_is_none_is_warned_of(text, here):
    save_file({"ln.weight": np.ones(4, "f4"), "ln.bias": np.ones(4, "f4")}, "model.safetensors")
    (here / "config.json").write_bytes(text.encode("latin1"))
    found = survey("model.safetensors")
    assert (found.config, len(found.sites)) == (None, 1)
    assert "config.json" in found.warnings[0]
