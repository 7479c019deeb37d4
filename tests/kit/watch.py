"""How much memory something takes, looked at again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

WATCH_S: Final = 0.02


class Watch:
    """See the module.

    Args:
        look: How much it takes now.

    Attributes:
        empty_bytes: What it took in the beginning.
        peak_bytes: The most that was seen.
    """

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self.empty_bytes = self.peak_bytes = look()

    async def run(self) -> None:
        """Looks, again and again."""
        while True:
            self.peak_bytes = max(self.peak_bytes, self._look())
            await trio.sleep(WATCH_S)

    @property
    def more_bytes(self) -> int:
        """How much more than in the beginning it took at most."""
        return self.peak_bytes - self.empty_bytes
