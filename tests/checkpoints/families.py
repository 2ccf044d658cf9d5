"""Families of models as the tests read them: a small checkpoint's tensors, its config, the truth."""

import json
import math

import numpy as np
from conftest import DATA
from safetensors.numpy import save_file

from layernorm_cli.checkpoints.config import make_config
from layernorm_cli.checkpoints.sites import find_norms
from layernorm_cli.tensorfiles.sharded import StoredTensor

FAMILIES = sorted(path.stem for path in (DATA / "families").glob("*.json"))


def read(name):
    return json.loads((DATA / "families" / f"{name}.json").read_text())


def stored(shapes, dtype="float32"):
    """Tensors of these shapes, as a file would hold them."""
    return {name: StoredTensor("model.safetensors", dtype, tuple(s), 0) for name, s in shapes.items()}


def norms_of(name, rename=lambda name: name):
    """The sites found in a family's checkpoint, its tensors renamed."""
    family = read(name)
    shapes = {rename(tensor): shape for tensor, shape in family["tensors"].items()}
    return find_norms(stored(shapes), make_config(family["config"]))


def found_in(shapes, config=None):
    """Sites and exclusions among tensors of these shapes."""
    return find_norms(stored(shapes), None if config is None else make_config(config))


def write(name, folder):
    """Write a family's checkpoint: its norms perturbed, all else zero."""
    family = read(name)
    rng = np.random.default_rng(0)
    norms = {site[key] for site in family["sites"] for key in ("gamma", "beta")}
    tensors = {
        tensor: (rng.normal(1, 0.1, shape) if tensor in norms else np.zeros(shape)).astype("f4")
        for tensor, shape in family["tensors"].items()
        if math.prod(shape) < 1 << 20
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(family["config"]))
    return family, tensors
