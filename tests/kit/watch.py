"""Measures how much memory something needs, again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

WATCH_S: Final = 0.02


class Watch:
    """See the module.

    Args:
        look: Returns how much memory it uses now.

    Attributes:
        empty_bytes: The use at the beginning.
        peak_bytes: The highest use that was measured.
    """

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self.empty_bytes = self.peak_bytes = look()

    async def run(self) -> None:
        """Measures again and again."""
        while True:
            self.peak_bytes = max(self.peak_bytes, self._look())
            await trio.sleep(WATCH_S)

    @property
    def more_bytes(self) -> int:
        """How much higher the peak is than the use at the beginning."""
        return self.peak_bytes - self.empty_bytes
