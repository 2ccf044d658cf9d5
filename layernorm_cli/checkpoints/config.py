"""What the config.json beside a checkpoint says of its norms."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Config", "Section", "eps_in", "make_config", "sections_for"]

EPS_KEY = re.compile(r"(layer_?norm|rms_?norm|norm|ln|rms)_?(eps|epsilon)|eps|epsilon")
KIND_KEY = re.compile(r"norm(alization)?(_type|_class|_layer|_mode)?|layer_?norm_type|(use_)?rms_?norm")

# Words in the names of nested configs, and in the paths of the modules that they describe.
_MEANT = {
    "vision": {"vision", "visual", "vit", "image", "img", "vpm", "video"},
    "text": {"text", "language", "llm", "lm"},
    "audio": {"audio", "speech", "apm"},
    "backbone": {"backbone", "pixel"},
}


class Section(NamedTuple):
    """One config, with its place in config.json: '' for the whole, 'vision_config.' for a nested one.

    eps has the keys that state one for norms; kind is the kind of norm that it states, or None.
    """

    place: str
    fields: dict[str, object]
    eps: dict[str, float]
    kind: str | None

    @property
    def family(self) -> str | None:
        """The family of models, or None."""
        found = self.fields.get("model_type") or self.fields.get("_class_name")
        return found if isinstance(found, str) else None


class Config(NamedTuple):
    """All of config.json: the whole, and the configs nested in it."""

    whole: Section
    nested: tuple[Section, ...]

    @property
    def architecture(self) -> str | None:
        """The class of the model, or None."""
        names = self.whole.fields.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        name = self.whole.fields.get("_class_name")
        return name if isinstance(name, str) else None


def make_config(fields: dict[str, object]) -> Config:
    """Return the config with the nested ones in it found."""
    return Config(_section("", fields), tuple(_nested("", fields)))


def sections_for(config: Config, path: str) -> list[Section]:
    """Return the configs that may speak of the module at path, the most specific first.

    >>> config = make_config({"text_config": {"norm_eps": 1e-6}, "vision_config": {"norm_eps": 1e-5}})
    >>> [section.place for section in sections_for(config, "vision_model.encoder.layers.0.layer_norm1")]
    ['vision_config.', '']
    """
    if not config.nested:
        return [config.whole]
    parts = [part.lower() for part in path.split(".")[:-1]]
    found = []
    for section in config.nested:
        places = [_place_in(parts, word) for word in section.place.rstrip(".").split(".")]
        if None not in places:
            found.append(([-(place or 0) for place in places[::-1]], -len(places), section))
    found.sort(key=lambda entry: (entry[1], entry[0], "backbone" in entry[2].place))
    chosen = [section for *_, section in found]
    if not chosen:  # a text model whose modules bear no prefix
        chosen = [s for s in config.nested if s.place in ("text_config.", "llm_config.")]
    return [*chosen, config.whole]


def eps_in(section: Section, kind: str) -> tuple[str, float] | None:
    """Return where a config states an eps for norms of this kind, and that eps; None if it does not."""
    if not section.eps:
        return None
    words = ("rms",) if kind == "rms" else ("layer", "ln")
    key = min(section.eps, key=lambda key: (not any(word in key for word in words), "norm" not in key))
    return section.place + key, section.eps[key]


def _section(place: str, fields: dict[str, object]) -> Section:
    eps = {
        key: float(value)
        for key, value in fields.items()
        if EPS_KEY.fullmatch(key)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    }
    return Section(place, fields, eps, _stated_kind(fields))


def _stated_kind(fields: dict[str, object]) -> str | None:
    """The kind of norms that a config states outright, or by having an rms_norm_eps."""
    for key, value in fields.items():
        if KIND_KEY.fullmatch(key):
            if "rms" in str(value).lower() or ("rms" in key and value is True):
                return "rms"
            if re.search(r"layer_?norm|^ln$", str(value).lower()):
                return "layer"
    if any(re.fullmatch(r"rms_?norm_eps(ilon)?", key) for key in fields):
        return "rms"
    return None


def _nested(place: str, fields: dict[str, object]) -> Iterator[Section]:
    for key, value in fields.items():
        if isinstance(value, dict) and (key.endswith("_config") or key in ("encoder", "decoder")):
            yield _section(f"{place}{key}.", value)
            yield from _nested(f"{place}{key}.", value)


def _place_in(parts: list[str], key: str) -> int | None:
    """How deep in a path a nested config's name is met first; None where it is not."""
    word = re.sub(r"_(config|model)$", "", key).removesuffix("_config")
    meant = next((words for stem, words in _MEANT.items() if word.startswith(stem)), {word})
    for index, part in enumerate(parts):
        if part == word or not meant.isdisjoint(part.split("_")):
            return index
    return None
