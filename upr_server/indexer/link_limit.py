"""How many links other nodes may have to a node of an indexer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_protocol.errors import UprError
from upr_server.indexer.host_limit import HostLimit

LINKS_FACTOR_MIN: Final = 2
"""A node allows so many times the links that the others need, at least: a link whose node has
vanished ends after a while, and that node may open it again before. All may come from one host."""

LINKS_FACTOR: Final = 4
"""By default it allows so many times."""


class TooManyLinksError(UprError):
    """Other nodes, or those of one host, have as many links as they may.

    Attributes:
        retry_after_s: When to ask again.
    """

    retry_after_s = 1.0


class LinkLimit:
    """Counts the links to a node, and those of each host.

    Args:
        links_max: How many there may be, half of them from one host.
    """

    def __init__(self, links_max: int) -> None:
        self._links = HostLimit(links_max)

    def __len__(self) -> int:
        return len(self._links)

    @contextmanager
    def link_of(self, host: str) -> Iterator[None]:
        """Counts a link for as long as the context. O(hosts).

        Args:
            host: Where it comes from.

        Raises:
            TooManyLinksError: There are too many.
        """
        links = self._links
        if links.is_full:
            raise TooManyLinksError(
                f"other nodes have {links.total_max} links to this one, as many as its setting "
                "links_max allows"
            )
        if links.is_full_for(host):
            raise TooManyLinksError(
                f"{host} has {links.host_max} links to this node, as many as one host may have: "
                f"half of its setting links_max, {links.total_max}"
            )
        with links.counted(host):
            yield
