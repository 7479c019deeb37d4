"""Design documents that are known before the stream has brought them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

from upr_server.indexer.bell import Bell


@attrs.frozen(eq=False)
class _Told:
    """What was told of a design document; one that is told again is another, whatever it says."""

    text: bytes | None


class Overlay:
    """What lies over the catalog, for as long as the catalog may be behind it.

    There is at most one entry a design document, and one barrier on its way for all of them: so it
    does not grow while the stream stands still.

    Args:
        passed: Waits until the catalog has all that was acknowledged before the call.
        on_change: Called when something else lies over the catalog.
    """

    def __init__(
        self, passed: Callable[[], Awaitable[object]], on_change: Callable[[], None]
    ) -> None:
        self._passed = passed
        self._on_change = on_change
        self._told: dict[str, _Told] = {}
        self._bell = Bell()

    @property
    def texts(self) -> dict[str, bytes | None]:
        """By design document its text; None of one that was deleted.

        Look here before you look into the catalog. What has gone from here by then is in the
        catalog; the other way round it might be in neither.
        """
        return {design: told.text for design, told in self._told.items()}

    def put(self, design: str, text: bytes | None) -> None:
        """A design document was read from the server just now; None when there is none."""
        self._told[design] = _Told(text)
        self._bell.ring()
        self._on_change()

    async def run(self) -> None:
        """Lets go of what the catalog has, for ever."""
        while True:
            await self._bell.until(lambda: bool(self._told))
            told = dict(self._told)
            await self._passed()
            for design, each in told.items():
                # What came since waits for a barrier of its own.
                if self._told[design] is each:
                    del self._told[design]
            self._on_change()
