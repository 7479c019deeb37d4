"""Design documents that were read before the stream has brought them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

from upr_protocol.concurrency import Notifier
from upr_server.indexer.catalog import CATALOG_BYTES_MAX, DESIGN_OVERHEAD_BYTES


@attrs.frozen(eq=False)
class _PendingDesign:
    """A design document that was read from the server. Each reading is an object of its own, even
    if the text is the same: `run` removes only what it has waited for."""

    text: bytes | None
    nbytes: int


class DesignOverlay:
    """Design documents that take precedence over the catalog, for as long as it may lack them.

    It holds one entry a design document at most, and waits for one barrier for all of them. So it
    does not grow while the stream pauses. All together are no longer than a slice's catalog may be:
    they take memory, and are parsed again with each change.

    Args:
        wait_for_catalog: Waits until the catalog has all that was acknowledged before the call.
        on_change: Called when an entry was added or removed.
    """

    def __init__(
        self, wait_for_catalog: Callable[[], Awaitable[object]], on_change: Callable[[], None]
    ) -> None:
        self._wait_for_catalog = wait_for_catalog
        self._on_change = on_change
        self._designs: dict[str, _PendingDesign] = {}
        self._nbytes = 0
        """Of all in `_designs`."""
        self._added = Notifier()

    @property
    def texts(self) -> dict[str, bytes | None]:
        """The text of each design document; None for a deleted one.

        Read this before the catalog: what has left the overlay by then is in the catalog. In the
        other order it might be in neither.
        """
        return {name: design.text for name, design in self._designs.items()}

    def put(self, name: str, text: bytes | None) -> bool:
        """Adds a design document that was just read from the server; None if it is deleted.

        Returns:
            Whether there was room for it. If not, the stream brings it.
        """
        nbytes = DESIGN_OVERHEAD_BYTES + len(name) + len(text or b"")
        previous = self._designs.get(name)
        added_bytes = nbytes - (0 if previous is None else previous.nbytes)
        if added_bytes > 0 and self._nbytes + added_bytes > CATALOG_BYTES_MAX:
            return False
        self._nbytes += added_bytes
        self._designs[name] = _PendingDesign(text, nbytes)
        self._added.notify()
        self._on_change()
        return True

    async def run(self) -> None:
        """Removes what the catalog has, for ever."""
        while True:
            await self._added.wait_until(lambda: bool(self._designs))
            designs = dict(self._designs)
            await self._wait_for_catalog()
            for name, design in designs.items():
                # A later reading waits for a barrier of its own.
                if self._designs[name] is design:
                    del self._designs[name]
                    self._nbytes -= design.nbytes
            self._on_change()

    def check_invariants(self) -> None:
        """For tests: the bytes are those of the documents, and no more than there may be."""
        assert self._nbytes == sum(design.nbytes for design in self._designs.values())
        assert self._nbytes <= CATALOG_BYTES_MAX
