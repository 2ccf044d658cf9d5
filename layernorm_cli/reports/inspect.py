"""The norms of a checkpoint, as a table, json, jsonl, csv or markdown."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from ..results import Comparison, InspectResult, ParameterStats, SiteInfo
from .strict_json import to_json
from .tables import Table, number

__all__ = ["change_table", "draw_strip", "inspect_csv", "inspect_json", "inspect_jsonl", "inspect_table"]

COLUMNS = (
    "site",
    "role",
    "norm",
    "eps",
    "gamma: mean (std)",
    "least",
    "greatest",
    "outliers",
    "beta: mean (std)",
    "verdict",
    "|gamma| over features",
)
CHANGES = ("site", "gamma moved", "at most", "beta moved", "at most")
BLOCKS = "▁▂▃▄▅▆▇█"
DIGITS = "0123456789"
NOT_STORED = "not stored, apply takes 1e-5 unless --eps says otherwise"
NAMED = 3  # of what is excluded for one reason
KINDS = {"layer": "layer norm", "rms": "rms norm", "unknown": "norm of unknown kind"}
PLACEMENTS = {
    "pre": "pre-norm",
    "post": "post-norm",
    "sandwich": "norms before and after each sublayer",
    "output": "norms on the output of each sublayer",
    "mixed": "pre-norm and post-norm",
}


def inspect_json(result: InspectResult) -> str:
    """Return the whole result as one JSON object on indented lines."""
    fields = result._asdict()
    for name in ("strips", "values", "warnings"):
        del fields[name]
    if result.against is None:
        del fields["against"]
    return to_json(fields, indent=2) + "\n"


def inspect_jsonl(result: InspectResult) -> str:
    """Return one site a line as JSON."""
    return "".join(to_json(site) + "\n" for site in result.sites)


def inspect_csv(result: InspectResult) -> str:
    """Return one site a line, the statistics as columns of their own."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [name for name in SiteInfo._fields if not name.endswith("_stats")]
    stats = [f"{of}_{name}" for of in ("gamma", "beta") for name in ParameterStats._fields]
    writer.writerow([*names, *stats])
    for site in result.sites:
        empty = ("",) * len(ParameterStats._fields)
        values = [getattr(site, name) for name in names]
        both = (*_flat(site.gamma_stats), *(_flat(site.beta_stats) if site.beta_stats else empty))
        writer.writerow(["" if value is None else value for value in (*values, *both)])
    return out.getvalue()


def inspect_table(result: InspectResult, blocks: bool = False) -> Table:
    """Return one row a site; blocks draws the strips of |gamma| in block characters, else in digits."""
    rows = [
        (
            site.site,
            site.role,
            f"{site.kind} {site.width}"
            + (f", gamma + {site.gamma_offset}" if site.gamma_offset else ""),
            "not stored" if site.eps is None else f"{site.eps:g}",
            _mean_and_std(site.gamma_stats),
            number(site.gamma_stats.min),
            number(site.gamma_stats.max),
            str(len(site.gamma_stats.outliers)),
            "none" if site.beta_stats is None else _mean_and_std(site.beta_stats),
            site.verdict,
            draw_strip(strip, BLOCKS if blocks else DIGITS),
        )
        for site, strip in zip(result.sites, result.strips, strict=True)
    ]
    return Table(COLUMNS, rows, list(_above(result)), list(_below(result)), align="lllrrrrrrll")


def change_table(comparison: Comparison) -> Table:
    """Return one row for each site that both checkpoints have."""
    rows = [
        (
            change.site,
            f"{change.gamma_change:.3%}",
            number(change.gamma_max_change),
            "none" if change.beta_change is None else f"{change.beta_change:.3%}",
            "none" if change.beta_max_change is None else number(change.beta_max_change),
        )
        for change in comparison.sites
    ]
    lone = [
        f"only {where}: {', '.join(names)}"
        for where, names in (("there", comparison.missing), ("here", comparison.extra))
        if names
    ]
    return Table(CHANGES, rows, [f"moved from {comparison.checkpoint}"], lone, align="lrrrr")


def draw_strip(values: tuple[float, ...], marks: str) -> str:
    """Return a mark a value, from 0 to the largest of them.

    >>> draw_strip((0.0, 1.0, 2.0), "0123456789")
    '049'
    """
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    return "".join(
        "?" if not math.isfinite(value) else marks[int(value / (top or 1.0) * (len(marks) - 1))]
        for value in values
    )


def _above(result: InspectResult) -> Iterator[str]:
    kinds = Counter(site.kind for site in result.sites)
    counted = ", ".join(
        f"{kinds[k]} {what}{'s' * (kinds[k] != 1)}" for k, what in KINDS.items() if kinds[k]
    )
    placement = PLACEMENTS.get(result.placement or "", "")
    names = [name for name in (result.architecture, result.family) if name]
    model = f" ({', '.join(names)})" if names else ""
    found = ", ".join(part for part in (counted or "no layer norm found", placement) if part)
    yield f"{result.checkpoint}{model}: {found}"
    share = result.norm_parameters / result.parameters if result.parameters else 0.0
    yield (
        f"{result.tensors} tensors, {result.parameters:,} parameters, "
        f"{result.norm_parameters:,} of them in norms ({share:.2%})"
    )
    sources = Counter(site.eps_source for site in result.sites)
    if sources:
        named = (f"{source or NOT_STORED} ({count})" for source, count in sources.items())
        yield "eps: " + "; ".join(named)


def _below(result: InspectResult) -> Iterator[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for item in result.excluded:
        reasons[item.reason].append(item.name)
    for reason, names in reasons.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"not a layer norm, {reason}: {', '.join(names[:NAMED])}{more}"
    for site in result.sites:
        if site.gamma_stats.outliers:
            yield f"outlier features of gamma at {site.site}: {_listed(site.gamma_stats.outliers)}"


def _listed(features: tuple[int, ...], most: int = 12) -> str:
    more = f" and {len(features) - most} more" if len(features) > most else ""
    return ", ".join(map(str, features[:most])) + more


def _mean_and_std(stats: ParameterStats) -> str:
    return f"{stats.mean:.4g} ({stats.std:.3g})".replace("nan", "NaN")


def _flat(stats: ParameterStats) -> tuple[object, ...]:
    return (*stats[:-1], " ".join(map(str, stats.outliers)))
