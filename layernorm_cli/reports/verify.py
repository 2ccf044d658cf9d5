"""What verify found, as a table, json, jsonl, csv or markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..results import SiteVerdict, VerifyResult, VerifySitesResult
from .strict_json import to_json
from .tables import Table, number

if TYPE_CHECKING:
    from ..norm.verification import Verdict

__all__ = ["verify_table", "verify_text"]

COLUMNS = ("Y compared with", "max abs error", "eps", "explains Y")
SITE_COLUMNS = ("site", "rows", "match", "max abs error", "max ulp", "exact", "eps", "what it is")
CSV_COLUMNS = ("variant", "max_abs_error", "eps", "explains")
SITE_CSV_COLUMNS = (
    "site",
    "rows",
    "match",
    "max_abs_error",
    "max_ulp_error",
    "exact_fraction",
    "eps",
    "best",
)
KINDS = {"layer": "layer norm", "rms": "rms norm"}


def verify_text(result: VerifyResult | VerifySitesResult, form: str) -> str:
    """Return the result as json, jsonl or csv: a line a site, or in csv a line a variant."""
    if isinstance(result, VerifySitesResult):
        return _sites_text(result, form)
    if form == "csv":
        verdict = result.verdict
        itself = ("as stated", verdict.max_abs_error, verdict.eps, verdict.match)
        return _csv(CSV_COLUMNS, [itself, *verdict.variants])
    return to_json(_fields(result), indent=2 if form == "json" else None) + "\n"


def verify_table(result: VerifyResult | VerifySitesResult) -> Table:
    """Return the answer, how far Y is off and where, and what was tried; or a row a site."""
    if isinstance(result, VerifySitesResult):
        return _sites_table(result)
    verdict = result.verdict
    rows = [
        (one.variant, number(one.max_abs_error), f"{one.eps:.6g}", "yes" if one.explains else "no")
        for one in verdict.variants
    ]
    itself = ("the norm as stated", number(verdict.max_abs_error), f"{verdict.eps:.6g}", _yes(verdict))
    others = "; ".join(verdict.equally_good)
    ties = [f"these rows do not tell it apart from: {others}"] if others else []
    above = [_answer(verdict), *ties, *_about(result), *_errors(verdict)]
    return Table(COLUMNS, [itself, *rows], above, _below(verdict), align="lrrl")


def _sites_text(result: VerifySitesResult, form: str) -> str:
    sites = [_site_fields(site) for site in result.sites]
    if form == "csv":
        return _csv(SITE_CSV_COLUMNS, [[site[name] for name in SITE_CSV_COLUMNS] for site in sites])
    if form == "jsonl":
        return "".join(to_json(site) + "\n" for site in sites)
    fields: dict[str, object] = {**result._asdict(), "sites": sites}
    del fields["warnings"]  # they go to standard error
    return to_json(fields, indent=2) + "\n"


def _sites_table(result: VerifySitesResult) -> Table:
    rows = [
        (
            site.site,
            str(site.verdict.rows),
            _yes(site.verdict),
            number(site.verdict.max_abs_error),
            number(site.verdict.max_ulp_error),
            _percent(site.verdict.exact_fraction),
            f"{site.verdict.eps:g}",
            "" if site.verdict.match else site.verdict.best or "no known mistake",
        )
        for site in result.sites
    ]
    wrong = sum(not site.verdict.match for site in result.sites)
    answer = (
        f"yes: the outputs of all {len(rows)} sites are the norms of their inputs"
        if result.match
        else f"no: the outputs of {wrong} of {len(rows)} sites are not the norms of their inputs"
    )
    above = [answer, f"{result.input}, with the sites of {result.params}"]
    below = [f"{site.site}: {note}" for site in result.sites for note in site.verdict.notes]
    return Table(SITE_COLUMNS, rows, above, below, align="lrlrrrrl")


def _fields(result: VerifyResult) -> dict[str, object]:
    fields = {**result.verdict._asdict(), **result._asdict()}
    del fields["warnings"], fields["verdict"]  # warnings go to standard error
    return fields


def _site_fields(site: SiteVerdict) -> dict[str, object]:
    fields = {**site._asdict(), **site.verdict._asdict()}
    del fields["verdict"]
    return fields


def _csv(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return out.getvalue()


def _yes(verdict: Verdict) -> str:
    return "yes" if verdict.match else "no"


def _percent(fraction: float) -> str:
    """A fraction in percent that says 100 only of all."""
    text = f"{100 * fraction:.2f}"
    return "99.99 %" if text == "100.00" and fraction < 1 else f"{text} %"


def _answer(verdict: Verdict) -> str:
    what = f"the {KINDS[verdict.kind]} of X"
    if verdict.match:
        return f"yes: Y is {what} with eps {verdict.eps:g}"
    if verdict.best is None:
        one = verdict.wrong_rows == 1
        if 0 < verdict.wrong_rows < verdict.rows:
            some = f"{verdict.wrong_rows} of {verdict.rows} rows of Y {'is' if one else 'are'}"
        else:
            some = "Y is"
        return f"no: {some} not {what} with eps {verdict.eps:g}; no known mistake explains it"
    return f"no: Y is {what} but for this: {verdict.best}"


def _about(result: VerifyResult) -> list[str]:
    verdict = result.verdict
    parameters = ", ".join(
        f"{name} {ref}" for name, ref in (("gamma", result.gamma), ("beta", result.beta)) if ref
    )
    offset = f" + {result.gamma_offset:g}" if result.gamma_offset else ""
    residual = f" + {result.residual}" if result.residual else ""
    return [
        f"X {result.input}{_tensor(result.tensor)}{residual}: {result.input_dtype} {verdict.shape}; "
        f"Y {result.output}{_tensor(result.output_tensor)}: {verdict.dtype}",
        f"{KINDS[verdict.kind]} over axis {result.axis}, eps {verdict.eps:g} ({result.eps_source}), "
        f"{parameters or 'no gamma, no beta'}{offset}",
    ]


def _tensor(name: str | None) -> str:
    return f" ({name})" if name else ""


def _errors(verdict: Verdict) -> list[str]:
    lines = [
        f"max error {number(verdict.max_abs_error)}, {number(verdict.max_ulp_error)} ulp; "
        f"{_percent(verdict.exact_fraction)} correctly rounded",
    ]
    if verdict.wrong_elements:
        lines.append(
            f"out of tolerance: {verdict.wrong_elements} element{'s' * (verdict.wrong_elements != 1)} "
            f"in {verdict.wrong_rows} of {verdict.rows} rows"
        )
    if verdict.worst_rows:
        worst = ", ".join(f"{_index(row)}: {number(error)}" for row, error in verdict.worst_rows)
        lines.append(f"worst rows     {worst}")
    if verdict.worst_features:
        worst = ", ".join(f"{_index(at)}: {number(error)}" for at, error in verdict.worst_features)
        lines.append(f"worst features {worst}")
    return lines


def _index(index: tuple[int, ...]) -> str:
    return str(index[0]) if len(index) == 1 else str(index)


def _below(verdict: Verdict) -> list[str]:
    lines = list(verdict.notes)
    if verdict.inferred_eps is not None:
        lines.append(f"eps as the rows tell it: {verdict.inferred_eps:.6g}")
    if verdict.nonfinite_rows:
        lines.append(f"rows with NaN or inf: {verdict.nonfinite_rows}")
    if verdict.variants and verdict.tried_rows < verdict.rows:
        lines.append(
            f"variants were tried on {verdict.tried_rows} rows, and what explains Y was tested on all"
        )
    return lines
