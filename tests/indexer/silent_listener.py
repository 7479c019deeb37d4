"""A listener for slices of which a test wants to hear nothing."""

from __future__ import annotations

from upr_server.indexer.slices import (
    CatalogReport,
)


class NoListener:
    """A listener that ignores what slices report."""

    def slice_restarted(self, index: int) -> None:
        pass

    def catalog_read(self, index: int, report: CatalogReport) -> None:
        pass
