"""What the name of a tensor says: its module, its part in it, and what kind of module that is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

__all__ = [
    "Name",
    "clean_path",
    "is_norm_name",
    "natural_key",
    "not_a_layer_norm",
    "parse_name",
    "sites_meant",
]

# What a gain and the bias beside it are called, by the libraries that write checkpoints.
BIAS_OF = {
    "weight": ("bias",),
    "gamma": ("beta",),
    "scale": ("bias", "offset", "shift"),
    "g": ("b",),
    "w": ("b",),
    "gain": ("bias",),
    "a_2": ("b_2",),
}
BIASES = {bias for biases in BIAS_OF.values() for bias in biases}

# Wrappers of torch that put their own name into those of the tensors.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

# A fused module holds the norm before it: linear_qkv.layer_norm_weight.
FUSED = re.compile(r"(.*?(?:norm|ln)\d*)_(weight|bias|gamma|beta|scale)", re.IGNORECASE)

OPTIMIZER = re.compile(
    r"exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|momentum|adam_?[mv]|adam(_\d+)?|"
    r"optimizer|optimizer_state|opt_state|optim|param_states|master_weights?"
)

# Modules that have parameters like a layer norm's, told by a word of their name.
_DECOYS = (
    (
        re.compile(r"^(bn|batch_?norm(alization)?|frozen_?bn)\d*[a-z]?$|_bn\d*$|batch_?norm"),
        "a batch norm",
    ),
    (re.compile(r"^(gn|group_?norm)\d*$|_gn\d*$|group_?norm"), "a group norm"),
    (re.compile(r"instance_?norm"), "an instance norm"),
    (re.compile(r"^grn\d*$|global_response"), "a global response norm (GRN)"),
    (re.compile(r"^ls_?\d*$|layer_?scale|^gamma_\d$|^lambda_\d$|^lambda\d$"), "a layer scale"),
    (re.compile(r"^(act|activation|prelu|snake)\d*$|_act$"), "an activation's parameter"),
    (re.compile(r"no_?norm|^(affine|lab)$"), "an affine map without statistics"),
)


class Name(NamedTuple):
    """A tensor's name taken apart: the module as stored, its separator, the leaf; path for rules.

    part is the gain's spelling or the bias's; path is the module without wrappers, with dots.
    """

    module: str
    separator: str
    part: str
    path: str


@cache
def parse_name(name: str) -> Name | None:
    """Take a tensor's name apart, None where its last part is no gain or bias.

    >>> parse_name("module.h.0.ln_1.weight")
    Name(module='module.h.0.ln_1', separator='.', part='weight', path='h.0.ln_1')
    >>> parse_name("encoder/LayerNorm/gamma:0").path, parse_name("qkv.layer_norm_bias").module
    ('encoder.LayerNorm', 'qkv.layer_norm')
    """
    module, separator, leaf = _split(re.sub(r":\d+$", "", name))
    if leaf in BIAS_OF or leaf in BIASES:
        return Name(module, separator, leaf, clean_path(module))
    fused = FUSED.fullmatch(leaf)
    if fused is None or (fused[2] not in BIAS_OF and fused[2] not in BIASES):
        return None
    whole = f"{module}{separator}{fused[1]}"
    return Name(whole, "_", fused[2], clean_path(whole))


def clean_path(module: str) -> str:
    """Return a module's name with dots, without the wrappers' names.

    >>> clean_path("_orig_mod.module.encoder/layer_0")
    'encoder.layer_0'
    """
    return ".".join(part for part in re.split(r"[./]", module) if part and part not in WRAPPERS)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key by which h.2 comes before h.10."""
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in pieces if piece]


def is_norm_name(path: str) -> bool:
    """Return whether the module at this path, or the list that it is an item of, is called a norm.

    >>> [is_norm_name(p) for p in ("h.0.ln_1", "layernorm", "norms.0", "h.0.attn", "normal")]
    [True, True, True, False, False]
    """
    return _is_called_norm(_own_name(path))


@cache  # the layers of a model are alike
def _is_called_norm(component: str) -> bool:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", component)
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", spaced)]
    return any(
        ("norm" in word and word not in ("normal", "normed")) or word in ("ln", "lnf", "rms")
        for word in words
    )


def not_a_layer_norm(path: str, part: str) -> str | None:
    """Return what a module is instead of a layer norm, where its name or its parameter's says so.

    >>> not_a_layer_norm("stages.0.blocks.1.grn", "gamma")
    'a global response norm (GRN)'
    """
    if any(map(_is_optimizers, path.split("."))):
        return "optimizer state"
    if (what := _decoy(_own_name(path))) is not None:
        return what
    if part == "gamma" and not is_norm_name(path):
        return "a layer scale, or another gain: its module is not called a norm"
    return None


@cache
def _is_optimizers(component: str) -> bool:
    return OPTIMIZER.fullmatch(component.lower()) is not None


@cache
def _decoy(component: str) -> str | None:
    own = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", component).lower()
    return next((what for pattern, what in _DECOYS if pattern.search(own)), None)


def sites_meant(text: str, sites: Iterable[str]) -> list[str]:
    """Return the sites that a name means: the one of that name, or all that end in it.

    >>> sites_meant("h.0.ln_1", ["transformer.h.0.ln_1", "transformer.h.10.ln_1"])
    ['transformer.h.0.ln_1']
    """
    sites = list(sites)
    if text in sites:
        return [text]
    return [site for site in sites if site.endswith((f".{text}", f"/{text}"))]


def _split(name: str) -> tuple[str, str, str]:
    cut = max(name.rfind("."), name.rfind("/"))
    return (name[:cut], name[cut], name[cut + 1 :]) if cut >= 0 else ("", "", name)


def _own_name(path: str) -> str:
    """The last part of a path that is not a number: norms for norms.0."""
    return next((part for part in reversed(path.split(".")) if not part.isdecimal()), "")
