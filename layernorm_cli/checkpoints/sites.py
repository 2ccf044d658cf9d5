"""Find the norms among the tensors of a checkpoint, and say what each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..norm.dtypes import DTYPES
from ..results import Excluded
from ..tensorfiles.sharded import StoredTensor
from .config import Config, Section, eps_in, sections_for
from .families import Family, Rule, family_row, rule_for
from .names import BIAS_OF, Name, is_norm_name, natural_key, not_a_layer_norm, parse_name

__all__ = ["Site", "find_norms"]

RUNNING = {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance"}
FLOATS = {dtype.name for dtype in DTYPES.values() if dtype.kind == "f"}
UNKNOWN = "unknown"


class Site(NamedTuple):
    """One norm: its name as the file has it, less the parameter's; its gain and bias by their names.

    kind is layer, rms or unknown; eps None where nothing says what it is; gamma_scale is the factor
    of a gain in float8, if it has one. path is the name for rules: dots, and no wrappers.
    """

    site: str
    path: str
    kind: str
    width: int
    eps: float | None
    eps_source: str | None
    gamma: str
    beta: str | None
    gamma_offset: int
    dtype: str
    file: str
    gamma_scale: str | None = None


class _Module(NamedTuple):
    name: Name
    gain: str
    bias: str | None


def find_norms(
    tensors: Mapping[str, StoredTensor], config: Config | None
) -> tuple[list[Site], list[Excluded]]:
    """Return the layer and rms norms among tensors in natural order, and what only looks like one."""
    sites, excluded = [], []
    for module in _modules(tensors):
        reason = _why_not(module, tensors, config)
        if reason is None:
            sites.append(_site(module, tensors, config))
        elif reason:
            excluded.append(Excluded(module.name.module, reason))
    excluded += _lone_parameters(tensors)
    sites.sort(key=lambda site: natural_key(site.site))
    excluded.sort(key=lambda item: natural_key(item.name))
    return sites, excluded


def _modules(tensors: Mapping[str, StoredTensor]) -> list[_Module]:
    """Modules with a gain: a floating vector, or a matrix of them in a module that is called a norm."""
    modules = []
    for gain, tensor in tensors.items():
        name = parse_name(gain)
        if name is None or name.part not in BIAS_OF or not name.module or tensor.dtype not in FLOATS:
            continue
        ndim = len([n for n in tensor.shape if n > 1])
        if (
            len(tensor.shape) == 0
            or 0 in tensor.shape
            or ndim > 2
            or (ndim == 2 and not is_norm_name(name.path))
        ):
            continue
        stem = gain[: gain.rindex(name.part)]
        end = gain[len(stem) + len(name.part) :]
        biases = (f"{stem}{bias}{end}" for bias in BIAS_OF[name.part])
        modules.append(_Module(name, gain, next((bias for bias in biases if bias in tensors), None)))
    return modules


def _why_not(module: _Module, tensors: Mapping[str, StoredTensor], config: Config | None) -> str | None:
    """Why a module is no site; '' for modules that nobody would take for one; None for sites."""
    name = module.name
    prefix = name.module + name.separator
    if any(prefix + statistic in tensors for statistic in RUNNING):
        return "a batch norm: running statistics beside it"
    what = not_a_layer_norm(name.path, name.part) or _not_in_family(name.path, config)
    gain = tensors[module.gain].shape
    bias = None if module.bias is None else tensors[module.bias].shape
    if what is not None or bias == gain:
        return what
    if is_norm_name(name.path):
        return None if bias is None else f"its bias has shape {bias}, its gain {gain}"
    return "a gain alone, in a module that is not called a norm" if bias is None else ""


def _not_in_family(path: str, config: Config | None) -> str | None:
    """What the family says that a module is instead of a layer norm."""
    for section in [] if config is None else sections_for(config, path):
        row = _row(section)
        rule = None if row is None else rule_for(row, path, section.fields)
        if rule is not None and rule.not_a is not None:
            return rule.not_a
    return None


def _site(module: _Module, tensors: Mapping[str, StoredTensor], config: Config | None) -> Site:
    gain, path = tensors[module.gain], module.name.path
    sections = [] if config is None else sections_for(config, path)
    rows = [(section, row) for section in sections if (row := _row(section))]
    rules = [rule for section, row in rows if (rule := rule_for(row, path, section.fields))]
    kind = _kind(module, sections, rows, rules)
    eps, source = _eps(kind, sections, rows, rules)
    offsets = [rule.offset for rule in rules if rule.offset is not None]
    offsets += [row.offset for _, row in rows if row.kind == kind]
    scales = (f"{module.gain}{suffix}" for suffix in ("_scale_inv", "_scale"))
    return Site(
        site=module.name.module,
        path=path,
        kind=kind,
        width=gain.shape[-1],
        eps=eps,
        eps_source=source,
        gamma=module.gain,
        beta=module.bias,
        gamma_offset=offsets[0] if offsets else 0,
        dtype=gain.dtype,
        file=gain.file,
        gamma_scale=next((scale for scale in scales if scale in tensors), None),
    )


def _row(section: Section) -> Family | None:
    return None if section.family is None else family_row(section.family)


def _kind(
    module: _Module,
    sections: list[Section],
    rows: list[tuple[Section, Family]],
    rules: list[Rule],
) -> str:
    stated = next((rule.kind for rule in rules if rule.kind), None)
    if stated is not None:
        return stated
    if module.bias is not None:
        return "layer"
    if "rms" in module.name.path.rsplit(".", 1)[-1].lower():
        return "rms"
    for section in sections:
        row = _row(section)
        kind = (row.kind if row else None) or section.kind
        if kind is not None:
            return kind
    return UNKNOWN


def _eps(
    kind: str, sections: list[Section], rows: list[tuple[Section, Family]], rules: list[Rule]
) -> tuple[float | None, str | None]:
    for rule in rules:
        if rule.eps is not None:
            return rule.eps, "family"
    for section in sections:
        found = eps_in(section, kind)
        if found is not None:
            return found[1], f"config.json: {found[0]}"
        row = _row(section)
        if row is not None and row.eps is not None:
            return row.eps, f"family {section.family}"
    return None, None


def _lone_parameters(tensors: Mapping[str, StoredTensor]) -> list[Excluded]:
    """Biases of modules that are called norms, where the gain is missing."""
    lone = []
    for bias, tensor in tensors.items():
        name = parse_name(bias)
        if name is None or name.part in BIAS_OF or not name.module or len(tensor.shape) != 1:
            continue
        place = bias.rindex(name.part)
        end = bias[place + len(name.part) :]
        gains = [gain for gain, biases in BIAS_OF.items() if name.part in biases]
        beside = (f"{bias[:place]}{gain}{end}" for gain in gains)
        if is_norm_name(name.path) and not any(gain in tensors for gain in beside):
            lone.append(Excluded(name.module, f"a bias without a gain: {bias}"))
    return lone
