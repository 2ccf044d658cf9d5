"""layernorm backends"""

from __future__ import annotations

from ..errors import UsageError
from . import options as o

__all__ = ["EXAMPLES", "backends"]

EXAMPLES = ("layernorm backends", "layernorm backends --format json")


def backends(format: o.Format = o.FormatName.table, debug: o.Debug = False) -> None:
    """List the engines.

    Prints version, how exact the results are, dtypes, devices, and how to install each.
    """
    from ..reports.backends import backends_json, backends_table
    from ..reports.tables import draw_markdown
    from ..tasks.backends import backends as run
    from .terminal import print_table, write

    infos = run()
    if format == o.FormatName.table:
        print_table(backends_table(infos))
    elif format == o.FormatName.markdown:
        write(draw_markdown(backends_table(infos)))
    elif format == o.FormatName.json:
        write(backends_json(infos))
    else:
        raise UsageError("--format", f"no {format.value} of the engines", "table, json or markdown")
