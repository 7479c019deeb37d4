"""Where a named stream stands, as the server lists it for its operators."""

from __future__ import annotations

from hashlib import blake2b

from upr_protocol.spark.driver_client import DriverClient
from upr_protocol.spark.offset import Offset


class ConsumerPosition:
    """Puts a stream's position at the server, each time that it has changed.

    A position is a lease that holds nothing. A lease keeps its ranges, so each position is a lease
    of its own, of two that take turns: while one is put, the other one is there. Their IDs follow
    from the name, so that a query that is started again replaces what it has put before.

    Args:
        driver: The server.
        name: The consumer's name.
    """

    def __init__(self, driver: DriverClient, name: str) -> None:
        self._driver = driver
        self._name = name
        self._lease_ids = [_lease_id(name, index) for index in range(2)]
        self._seqs: dict[int, int] = {}

    def put(self, offset: Offset) -> None:
        """Puts where the stream stands, once the server has it on disk: for each partition that it
        reads, the number up to which everything was read.

        Raises:
            PipelineError: The server cannot be asked.
            ServerError: The server refused it.
        """
        seqs: dict[int, int] = {
            partition: min(offset.at(partition).seq, row.persisted_seq)
            for partition, row in self._driver.numbers().items()
        }
        if seqs == self._seqs:
            return
        self._driver.put_position(self._lease_ids[0], self._name, seqs)
        self._driver.release(self._lease_ids[1])
        self._lease_ids.reverse()
        self._seqs = seqs


def _lease_id(name: str, index: int) -> int:
    digest = blake2b(f"{index} {name}".encode(), digest_size=8, person=b"upr consumer").digest()
    return int.from_bytes(digest, "little") | 1
