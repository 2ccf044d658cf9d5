"""Where in the model each norm stands, in words, and whether the model is pre-norm or post-norm."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from .config import Config, sections_for
from .families import family_row
from .sites import Site

__all__ = ["placement_of", "roles_of"]

# Keys of configs that say it, true for pre-norm.
_BEFORE = (
    "do_layer_norm_before",
    "normalize_before",
    "encoder_normalize_before",
    "decoder_normalize_before",
    "do_stable_layer_norm",
    "pre_norm",
)
_NUMBERED = re.compile(r"(?:layers?|blocks?|h|encoderblock|decoderblock|resblocks?)_(\d+)")

# The sublayer that a norm within a layer belongs to, by its path there; the first that matches.
_ON_PARTS = (
    (r"(^|[._])(q|query)_a_?(layer)?norm", "on the compressed queries"),
    (r"(^|[._])kv_a_?(layer)?norm", "on the compressed keys and values"),
    (r"(^|[._])(q|query)_?(layer_?)?(norm|ln)|norm_q$|(norm|ln)_query", "on queries"),
    (r"(^|[._])(k|key)_?(layer_?)?(norm|ln)|norm_k$|(norm|ln)_key", "on keys"),
    (r"(^|[._])(v|value)_?(layer_?)?(norm|ln)|norm_v$", "on values"),
)
_SUBLAYERS = (
    (r"cross_?att|encoder_attn|crossattention|enc_dec|ln_cross|norm_cross|_ca_norm", "cross-attention"),
    (r"conv", "convolution"),
    (r"downsampl", "downsampling"),
    (r"layer\.0\.layer_?norm$", "attention"),
    (r"(ln|norm|layer_?norm)_?2(\.\d+)?$|^intermediate\.layer_?norm$|^ln$", "feed-forward"),
    (r"(^|[._])(pre|post)_?(feed_?forward|mlp|ffn?|moe)", "feed-forward"),
    (r"post_attention_(layer_?)?norm$", "behind attention"),
    (r"self_att|attention|attn|(^|[._])sa_|temporal|operator|linear_qkv", "attention"),
    (r"feed_?forward|ffn?([._]|$)|ff[._]|mlp|channel|linear_fc1|(^|[._])fc", "feed-forward"),
    (
        r"^(final_layer_?norm|full_layer_layer_?norm|output(_query)?\.layer_?norm|output_layer_?norm)$",
        "feed-forward",
    ),
    (r"input_layer_?norm$|layer_?norm_?before$|(ln|norm|layer_?norm)_?(1|0)(\.\d+)?$", "attention"),
    (r"layer_?norm_?after$", "feed-forward"),
)
# The role of a norm outside the layers.
_OUTSIDE = (
    (r"emb", "on the embeddings"),
    (r"pooler", "in the pooler"),
    (r"feature", "on the features"),
    (r"proj|merger|connector", "in the projector"),
    (r"predictions|lm_head|vocab|head", "in the head"),
    (r"(^|\.)(pre[^.]*|ln_pre)$", "before the layers"),
)
_OUT = re.compile(
    r"attention\.output\.|^output(_query)?\.|full_layer_layer_?norm|^post_|\.post_|_out_norm|"
    r"post_(self_)?att|post_(feed_?forward|mlp|ffn?|moe)|^sa_layer_norm|^output_layer_norm|"
    r"albert.*attention\.layernorm$"
)
_PRE = re.compile(r"(^|[._])pre_|before|input_layer_?norm")


class _Place(NamedTuple):
    """Where a site is: the stack of layers, the path within the layer, the layer's number."""

    stack: str
    inner: str


def roles_of(sites: Sequence[Site], config: Config | None) -> dict[str, str]:
    """Return each site's role in words: before attention, final, on queries and so on.

    >>> site = Site("h.0.ln_1", "h.0.ln_1", "layer", 4, 1e-5, "", "", None, 0, "float32", "")
    >>> last = site._replace(site="ln_f", path="ln_f")
    >>> list(roles_of([site, last], None).values())
    ['before attention and the feed-forward', 'final']
    """
    places = {site.site: _place(site.path) for site in sites}
    placements = _stacks(sites, config)
    inners: dict[str, set[str]] = defaultdict(set)
    for place in places.values():
        if place is not None:
            inners[place.stack].add(place.inner)
    inside = {  # all layers are alike
        place: _inside(place.inner, placements[place.stack], inners[place.stack])
        for place in {place for place in places.values() if place is not None}
    }
    return {
        site.site: _outside(site.path.lower(), placements)
        if (place := places[site.site]) is None
        else inside[place]
        for site in sites
    }


def placement_of(sites: Sequence[Site], config: Config | None) -> str | None:
    """Return pre, post, sandwich, output (of each sublayer), mixed; None where there are no layers."""
    found = {placement for placement in _stacks(sites, config).values() if placement}
    return None if not found else found.pop() if len(found) == 1 else "mixed"


def _place(path: str) -> _Place | None:
    parts = path.lower().split(".")
    for index, part in enumerate(parts[:-1]):
        numbered = _NUMBERED.fullmatch(part)
        if part.isdecimal() or numbered:
            stack = ".".join([*parts[:index], *([part[: numbered.start(1)]] if numbered else [])])
            inner = re.sub(r"^(?:\w*(?:layers|blocks)\.\d+\.)+", "", ".".join(parts[index + 1 :]))
            return _Place(stack, inner)
    if parts[-1].isdecimal() and len(parts) > 1:  # lists of norms beside the layers: layer_norm1.0
        return _Place(".".join(parts[:-2]), parts[-2])
    return None


def _stacks(sites: Sequence[Site], config: Config | None) -> dict[str, str | None]:
    """The placement of each stack of layers, None where its norms belong to no sublayer."""
    inners: dict[str, set[str]] = defaultdict(set)
    samples: dict[str, Site] = {}
    for site in sites:
        place = _place(site.path)
        if place is not None:
            inners[place.stack].add(place.inner)
            samples[place.stack] = site
    ends = [site.path.lower() for site in sites if _place(site.path) is None]
    return {
        stack: _placement(
            found,
            # Post-norm models are older than rms norms.
            _has_final(stack, ends) or samples[stack].kind == "rms",
            _stated(config, samples[stack].path),
        )
        for stack, found in inners.items()
    }


def _placement(inners: set[str], has_final: bool, stated: str | None) -> str | None:
    about_sublayers = {inner for inner in inners if _sublayer(inner)}
    if not about_sublayers:
        return "pre" if has_final and any(re.fullmatch(r"(layer_?)?norm", i) for i in inners) else None
    if stated is not None:
        return stated
    behind = {inner for inner in about_sublayers if _OUT.search(inner)}
    before = about_sublayers - behind
    feed_forward = [inner for inner in about_sublayers if _sublayer(inner) == "feed-forward"]
    if feed_forward and any(map(_OUT.search, feed_forward)):
        named_pre = any(map(_PRE.search, before))
        if named_pre:
            return "sandwich"
        return "output" if has_final and all("post" in inner for inner in behind) else "post"
    if has_final or any(map(_PRE.search, before)):
        return "pre"
    return "post" if feed_forward and len(about_sublayers) > 1 else None


def _stated(config: Config | None, path: str) -> str | None:
    for section in [] if config is None else sections_for(config, path):
        side = "decoder" if path.startswith("decoder") else "encoder"
        for key in _BEFORE:
            value = section.fields.get(key)
            if isinstance(value, bool) and (key.split("_")[0] in ("do", "normalize", "pre", side)):
                return "pre" if value else "post"
        row = None if section.family is None else family_row(section.family)
        if row is not None and row.placement is not None:
            return row.placement
    return None


def _has_final(stack: str, ends: Sequence[str]) -> bool:
    return any(_is_final(path, [stack]) for path in ends)


def _is_final(path: str, stacks: Sequence[str]) -> bool:
    """Whether a norm outside the layers stands behind a stack: beside it, or above."""
    parent, _, own = path.rpartition(".")
    if re.search(r"emb|pre_|pooler|^pre|ln_pre", own):
        return False
    above = {stack.rpartition(".")[0] for stack in stacks}
    return any(place == parent or not parent or place.startswith(f"{parent}.") for place in above)


@cache
def _sublayer(inner: str) -> str | None:
    if any(re.search(pattern, inner) for pattern, _ in _ON_PARTS):
        return None
    return next((name for pattern, name in _SUBLAYERS if re.search(pattern, inner)), None)


def _inside(inner: str, placement: str | None, others: set[str]) -> str:
    for pattern, role in _ON_PARTS:
        if re.search(pattern, inner):
            return role
    sublayer = _sublayer(inner)
    numbered = re.fullmatch(r"layer\.(\d)\.layer_?norm", inner)
    if numbered:  # T5: the sublayers have numbers
        last = not any(other > inner for other in others if other.startswith("layer."))
        sublayer = "attention" if numbered[1] == "0" else "feed-forward" if last else "cross-attention"
    if sublayer is None and inner == "layer_norm" and "final_layer_norm" in others:
        sublayer = "attention"
    if sublayer is None:
        return "before the mixer" if re.fullmatch(r"(layer_?)?norm", inner) else "other"
    out = _OUT.search(inner) is not None
    if sublayer == "behind attention":
        split = placement in ("sandwich", "output") and "post_self_attn_layernorm" not in others
        sublayer, out = ("attention", True) if split else ("feed-forward", False)
    the = "" if sublayer in ("attention", "cross-attention") else "the "
    if placement == "post":
        return f"after the {sublayer} residual"
    if out and placement != "pre":
        return f"on the output of {the}{sublayer}"
    if sublayer == "attention" and len([other for other in others if _sublayer(other)]) == 1:
        return "before attention and the feed-forward"
    return f"before {the}{sublayer}"


def _outside(path: str, stacks: Mapping[str, str | None]) -> str:
    for pattern, role in _OUTSIDE:
        if re.search(pattern, path):
            return role
    return "final" if _is_final(path, list(stacks)) or not stacks else "other"
