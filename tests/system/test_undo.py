"""A failover loses changes that consumers have. They undo these, and get nothing else again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from tests.cli.processes import Line, Upr
from tests.kit.mirror import apply_mutation
from tests.spark.server import BlockingServer, blocking_server
from upr_protocol.chunk import Mutation
from upr_protocol.client import (
    BarrierReached,
    BlockingClient,
    BlockingRollbackConsumer,
    ChunkReceived,
    LocalCopyReader,
    Undone,
)
from upr_protocol.ids import Durability, Operation

ROWS: Final = 2_000
LOST: Final = 100
LATER: Final = 10
PARTITIONS: Final = 4

Items = dict[bytes, bytes]


class Copy:
    """What a blocking consumer has.

    Attributes:
        rows: How many rows it was sent.
        undone: What it undid.
    """

    def __init__(self, consumer: BlockingRollbackConsumer) -> None:
        self._consumer = consumer
        self._items: dict[bytes, tuple[int, bytes]] = {}
        self.rows = 0
        self.undone: list[Undone] = []

    def catch_up(self) -> None:
        """Receives everything that there is."""
        self._consumer.barrier(b"%d" % self.rows)
        for event in self._consumer:
            if isinstance(event, BarrierReached):
                return
            if isinstance(event, ChunkReceived):
                self.rows += len(event.chunk)
                for mutation in event.chunk:
                    apply_mutation(self._items, mutation)
            elif isinstance(event, Undone):
                self.undone.append(event)
                for key, item in event.documents.items():
                    self._items.pop(key, None)
                    if item is not None:
                        self._items[key] = item.seq, bytes(item.value)

    @property
    def contents(self) -> Items:
        return {key: value for key, (_, value) in self._items.items()}


class Tail:
    """`upr tail --state`, and what it prints."""

    def __init__(self, process: Upr, output: Path) -> None:
        self._process = process
        self._output = output

    def until(self, rows: int) -> list[Line]:
        """Its lines, once it has printed so many changes."""
        assert self._process.stdout is not None
        lines: list[Line] = []
        while sum(line["event"] == "mutation" for line in lines) < rows:
            lines.append(json.loads(self._process.stdout.readline()))
        return lines

    def end(self) -> Items:
        """Stops it; gives what its copy has."""
        self._process.stopped()
        with closing(LocalCopyReader(self._output)) as reader:
            return {item.key: bytes(item.value) for item in reader.items()}


@contextmanager
def tailing(url: str, folder: Path) -> Iterator[Tail]:
    process = Upr("tail", url, "--state", str(folder))
    try:
        yield Tail(process, folder)
    finally:
        process.end()


def write(url: str, numbers: range, value: bytes, durability: Durability, copies: int = 0) -> None:
    with BlockingClient(url, durability=durability, copies=copies) as client:
        client.apply(Mutation(Operation.SET, b"key %d" % number, value) for number in numbers)


def upr(*args: str) -> None:
    Upr(*args).finished()


def fail_over(active: BlockingServer, replica: BlockingServer) -> None:
    """The replica was stopped when the last changes came. It takes over without them."""
    active.kill()
    replica.start()
    upr("failover", replica.url("b"), "--all-of", "a")


def test_consumers_undo_what_a_failover_lost_and_nothing_is_sent_again(tmp_path: Path) -> None:
    with blocking_server("--node", "a") as active, blocking_server("--node", "b") as replica:
        active.create_bucket("b", PARTITIONS)
        upr("replicas", "add", active.url("b"), f"b=127.0.0.1:{replica.port}")
        url = f"upr://127.0.0.1:{active.port},127.0.0.1:{replica.port}/b"
        write(url, range(ROWS), b"old", Durability.REPLICATED_AND_PERSISTED, copies=1)
        with (
            tailing(url, tmp_path / "copy") as tail,
            BlockingRollbackConsumer(url, tmp_path / "keys", resume=tmp_path / "resume") as stream,
        ):
            copy = Copy(stream)
            tail.until(ROWS)
            copy.catch_up()
            replica.stop()
            write(active.url("b"), range(LOST), b"never had", Durability.MEMORY)
            tail.until(LOST)
            copy.catch_up()
            assert copy.rows == ROWS + LOST
            copy.rows = 0
            fail_over(active, replica)
            write(url, range(ROWS, ROWS + LATER), b"later", Durability.PERSISTED)
            copy.catch_up()
            lines = tail.until(LATER)
            expected = {b"key %d" % number: b"old" for number in range(ROWS)}
            expected |= {b"key %d" % number: b"later" for number in range(ROWS, ROWS + LATER)}
            assert copy.contents == expected
            assert tail.end() == expected
    # The keys whose changes were lost were read again, and the streams went on behind them.
    lost_items = {f"key {number}" for number in range(LOST)}
    undone_by_tail = [line for line in lines if line["event"] == "undone"]
    assert {
        document["key"] for line in undone_by_tail for document in line["documents"]
    } == lost_items
    assert {key.decode() for event in copy.undone for key in event.documents} == lost_items
    assert all(line["restarts_from"] > 0 for line in undone_by_tail)
    assert all(event.to > 0 for event in copy.undone)
    assert copy.rows == LATER
