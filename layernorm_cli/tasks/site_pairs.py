"""Which tensors of a file are the inputs or outputs of a checkpoint's sites; shared by the commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..checkpoints.names import natural_key, sites_meant
from ..checkpoints.sites import Site
from ..errors import UsageError

__all__ = ["PLACE", "check_pattern", "pair_sites"]

PLACE = "{site}"


def check_pattern(option: str, pattern: str) -> None:
    """Raise UsageError unless a pattern has one place for a site's name."""
    if pattern.count(PLACE) != 1:
        raise UsageError(f"{option} {pattern}", f"{pattern.count(PLACE)} times {PLACE}", f"{PLACE} once")


def pair_sites(
    sites: Sequence[Site], tensors: Iterable[str], match: str
) -> tuple[list[tuple[Site, str]], list[Site]]:
    """Return each site with the tensor that match names for it, and the sites without one.

    A file may call a site by the end of its name in the checkpoint (h.0.ln_1 for transformer.h.0.ln_1),
    or by more than it.
    """
    before, after = match.split(PLACE)
    names = {
        name[len(before) : len(name) - len(after)]: name
        for name in tensors
        if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
    }
    by_site: dict[str, str] = {}
    for short, name in names.items():
        meant = sites_meant(short, (site.site for site in sites))
        if len(meant) == 1:
            by_site.setdefault(meant[0], name)
    for site in sites:  # names that say more than the checkpoint does
        if site.site not in by_site:
            longer = sites_meant(site.site, names)
            if len(longer) == 1:
                by_site[site.site] = names[longer[0]]
    pairs = [(site, by_site[site.site]) for site in sites if site.site in by_site]
    pairs.sort(key=lambda pair: natural_key(pair[0].site))
    return pairs, [site for site in sites if site.site not in by_site]
