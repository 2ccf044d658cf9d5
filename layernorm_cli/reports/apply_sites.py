"""What every site of a checkpoint did to its tensor, as a table, json, jsonl, csv or markdown."""

from __future__ import annotations

import csv
import io

from ..results import ApplySitesResult, SiteRows
from .strict_json import to_json
from .tables import Table, number

__all__ = ["sites_csv", "sites_json", "sites_jsonl", "sites_table"]

COLUMNS = ("site", "rows", "norm", "eps", "mean before", "var before", "mean after", "var after")


def sites_json(result: ApplySitesResult) -> str:
    """Return the whole result as one JSON object on indented lines."""
    fields = result._asdict()
    del fields["warnings"]  # they go to standard error
    return to_json(fields, indent=2) + "\n"


def sites_jsonl(result: ApplySitesResult) -> str:
    """Return one site a line as JSON."""
    return "".join(to_json(site) + "\n" for site in result.sites)


def sites_csv(result: ApplySitesResult) -> str:
    """Return one site a line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([SiteRows._fields, *result.sites])
    return out.getvalue()


def sites_table(result: ApplySitesResult) -> Table:
    """Return one row a site: the averages over its rows."""
    rows = [
        (
            site.site,
            str(site.rows),
            site.kind,
            f"{site.eps:g}",
            number(site.mean_before),
            number(site.var_before),
            number(site.mean_after),
            number(site.var_after),
        )
        for site in result.sites
    ]
    above = [
        f"{result.input}: {len(rows)} sites of {result.params}, tensors named {result.match}; "
        f"engine {result.backend}",
        "mean and var are averages over the rows",
    ]
    if result.output is not None:
        above.append(f"output {result.output}")
    return Table(COLUMNS, rows, above, align="lrlrrrrr")
