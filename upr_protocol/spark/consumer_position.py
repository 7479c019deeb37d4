"""Where a named stream stands, as the server lists it for its operators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from upr_protocol.errors import UprError
from upr_protocol.limits import LEASE_TIME_TO_LIVE_S_MAX
from upr_protocol.spark.driver_client import DriverClient
from upr_protocol.spark.offset import StreamOffset

_log = logging.getLogger(__name__)

AGAIN_AFTER_S: Final = LEASE_TIME_TO_LIVE_S_MAX / 2
"""When an unchanged position is put again: before its lease lapses."""

AGAIN_AFTER_REFUSAL_S: Final = 60.0
"""When a refused position is put again. A stream looks for changes many times a second."""


class ConsumerPosition:
    """Puts a stream's position at the server, each time that it has changed, and before the server
    forgets it. The position is only shown to people: the stream goes on when it is refused.

    A position is a lease that holds nothing. A lease keeps its ranges, so each position is a lease
    of its own, of two that take turns: while one is put, the other one is there. Their IDs follow
    from the name, so that a query that is started again replaces what it has put before.

    Args:
        driver: The server.
        name: The consumer's name.
        clock: Gives the time, in seconds.
    """

    def __init__(
        self, driver: DriverClient, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver = driver
        self._name = name
        self._lease_ids = [_lease_id(name, index) for index in range(2)]
        self._clock = clock
        self._seqs: dict[int, int] = {}
        """What was put last, or refused."""
        self._again_s = 0.0
        """When the same is put again."""
        self._refusal = ""
        """Why it was refused last; empty when it was not."""

    def put_offset(self, offset: StreamOffset) -> None:
        """Puts where the stream stands, once the server has it on disk: for each partition that it
        reads, the number up to which everything was read.

        Raises:
            PipelineError: The server cannot be asked how much it has on disk.
        """
        seqs: dict[int, int] = {
            partition: min(offset.partition_offset(partition).seq, row.persisted_seq)
            for partition, row in self._driver.seqnos().items()
        }
        now = self._clock()
        if seqs == self._seqs and now < self._again_s:
            return
        self._seqs = seqs
        try:
            self._driver.put_position(self._lease_ids[0], self._name, seqs)
        except UprError as error:
            self._again_s = now + AGAIN_AFTER_REFUSAL_S
            if str(error) != self._refusal:
                self._refusal = str(error)
                _log.warning(
                    "the server does not list where the stream %r is, which goes on: %s",
                    self._name,
                    error,
                )
            return
        self._driver.release_lease(self._lease_ids[1])
        self._lease_ids.reverse()
        self._again_s = now + AGAIN_AFTER_S
        self._refusal = ""


def _lease_id(name: str, index: int) -> int:
    digest = blake2b(f"{index} {name}".encode(), digest_size=8, person=b"upr consumer").digest()
    return int.from_bytes(digest, "little") | 1
