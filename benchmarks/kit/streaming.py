"""What B3, B4, B5 and B9 share: consumers and plain sockets that move as many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Spread
from benchmarks.kit.processes import UprServer, Worker
from benchmarks.kit.work import CHUNK_MUTATIONS, PARTITIONS

Ran = dict[str, Any]

WARM_UPS: Final = 5
"""Rounds of all sides that warm up. The first of a server and its consumer take up to a half longer
than later ones: new memory for sockets and bodies is slow where a host has to give it."""


def filler(server: UprServer, keys: int) -> Worker:
    """A client that makes its chunks on the way."""
    return Worker(
        "publish",
        url=server.url,
        certificate=server.certificate,
        connections=1,
        prepare=False,
        seed=1,
        keys=keys,
        partitions=PARTITIONS,
        chunk_mutations=CHUNK_MUTATIONS,
    )


def fill(server: UprServer, keys: int) -> None:
    """Sets each of so many keys once."""
    with filler(server, keys) as publisher:
        publisher.answer()
        publisher.ask(fill=True)


class Consumers:
    """Consumers, each in a process of its own.

    Args:
        server: What they stream.
        count: How many there are.
        stack: Ends them.
    """

    def __init__(self, server: UprServer, count: int, stack: ExitStack) -> None:
        self._server = server
        self._workers = [
            stack.enter_context(Worker("consume", url=server.url, certificate=server.certificate))
            for _ in range(count)
        ]
        for worker in self._workers:
            worker.answer()

    def stream(self, mutations: int | None, count: int | None = None) -> Ran:
        """They stream the bucket from its beginning, at once.

        Args:
            mutations: How many there are; None when nobody knows.
            count: How many of the consumers; by default all.

        Raises:
            CannotMeasureError: One did not see as many mutations as there are.
        """
        self._server.lap()
        workers = self._workers[:count]
        for worker in workers:
            worker.tell({})
        answers = [worker.answer() for worker in workers]
        for answer in answers:
            if mutations is not None and answer["mutations"] != mutations:
                raise CannotMeasureError(
                    f"a consumer saw {answer['mutations']:,} mutations, not {mutations:,}"
                )
        return {
            **together(answers),
            "mutations": sum(answer["mutations"] for answer in answers),
            "chunks": sum(answer["chunks"] for answer in answers),
            "bytes": sum(answer["bytes"] for answer in answers),
            "bytes_each": answers[0]["bytes"],
            "processor_s": {
                **self._server.lap(),
                "consumer": sum(answer["processor_s"] for answer in answers),
            },
        }


class Sockets:
    """A process that sends into plain sockets, and processes that receive.

    Args:
        count: How many receive.
        stack: Ends them.
    """

    def __init__(self, count: int, stack: ExitStack) -> None:
        self._sender = stack.enter_context(Worker("socket-send", receivers=count))
        port = self._sender.answer()["port"]
        self._receivers = [
            stack.enter_context(Worker("socket-receive", port=port)) for _ in range(count)
        ]
        for receiver in self._receivers:
            receiver.answer()

    def move(self, nbytes: int) -> Ran:
        """Moves so many bytes to each."""
        self._sender.tell({"bytes": nbytes})
        for receiver in self._receivers:
            receiver.tell({"bytes": nbytes})
        answers = [receiver.answer() for receiver in self._receivers]
        self._sender.answer()
        return {**together(answers), "bytes": nbytes * len(answers)}


def together(answers: Sequence[Ran]) -> Ran:
    """From when the first began to when the last ended."""
    started_at = min(answer["begun"] for answer in answers)
    return {"seconds": max(answer["ended"] for answer in answers) - started_at}


def rate(ran: Ran, unit: str = "mutations") -> float:
    """How many a second."""
    rate: float = ran[unit] / ran["seconds"]
    return rate


def rates(runs: Sequence[Ran], unit: str = "mutations") -> Spread:
    """Of all runs."""
    return Spread.of([rate(ran, unit) for ran in runs])


def server_cost(ran: Ran) -> str:
    """The server's processor time, by byte and by chunk, as a row says it."""
    return (
        f"{_server(ran, 'bytes') * 1e9:.2f} ns of the server's processor a byte, "
        f"{_server(ran, 'chunks') * 1e6:.0f} µs a chunk"
    )


def _server(ran: Ran, unit: str) -> float:
    """Seconds of the server's processor time for each of `unit` that it sent."""
    seconds_each: float = ran["processor_s"]["server"] / ran[unit]
    return seconds_each


def processor_details(runs: Sequence[Ran]) -> dict[str, Any]:
    """Processor time of all processes."""
    return {
        **{
            f"{role}_ns_per_mutation": Spread.of(
                [run["processor_s"][role] / run["mutations"] * 1e9 for run in runs]
            ).to_json()
            for role in runs[0]["processor_s"]
        },
        **{
            f"{role}_busy": round(
                Spread.of([run["processor_s"][role] / run["seconds"] for run in runs]).median, 2
            )
            for role in runs[0]["processor_s"]
        },
        "server_ns_per_byte": Spread.of([_server(run, "bytes") * 1e9 for run in runs]).to_json(),
        "server_us_per_chunk": Spread.of([_server(run, "chunks") * 1e6 for run in runs]).to_json(),
        "bytes_per_run": runs[0]["bytes"],
    }
