"""Nodes of an indexer as processes, which are killed and stopped at random while a client writes.

`python -m tests.indexer.rounds --rounds 200` runs many rounds, and prints how many scans were
answered or refused. Each answer is compared with a scan by brute force of the documents at the
answer's timestamp.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import attrs

from tests.cli.processes import start_server
from tests.indexer.kit import by_brute_force
from tests.indexer.processes import DEADLINE_S, IndexerProcess, indexer_process, workers_of
from tests.indexer.write_log import WriteLog
from tests.kit.ports import free_ports
from tests.kit.process import POLL_S
from upr_protocol.client import BlockingClient, IndexClient, IndexerError
from upr_server.indexer.pure.definition import IndexDefinition

KEYS: Final = [f"k{index}" for index in range(200)]
PARTITIONS: Final = 8
BY_A: Final = IndexDefinition(("a",))
BY_B: Final = IndexDefinition(("b", "a"), "a > `10`")
INDEXES: Final = {"d/a": BY_A, "d/b": BY_B}
DESIGN: Final = {"indexes": {"a": {"key": BY_A.key}, "b": {"key": BY_B.key, "filter": BY_B.filter}}}
REASONS_MAX: Final = 12
CODES: Final = {"slice_missing", "moment_gone", "building", "not_fresh"}


class Load(threading.Thread):
    """Writes until it is ended, and records what was acknowledged.

    Attributes:
        log: The acknowledged changes.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.log = WriteLog()
        self._between = threading.Lock()
        self._url = url
        self._ends = False

    def run(self) -> None:
        rng = random.Random(1)
        with BlockingClient(self._url) as client:
            stored_keys: set[str] = set()
            while not self._ends:
                with self._between:
                    key = rng.choice(KEYS)
                    if key in stored_keys and rng.random() < 0.3:
                        self.log.add(client.delete(key), key, None)
                        stored_keys.remove(key)
                    else:
                        value = json.dumps({"a": rng.randrange(50), "b": rng.choice("xyz")})
                        self.log.add(client.set(key, value), key, value)
                        stored_keys.add(key)
                pause()

    @contextmanager
    def paused(self) -> Iterator[WriteLog]:
        """Pauses between two writes: the log then has all changes that were made."""
        with self._between:
            yield self.log

    def end(self) -> None:
        self._ends = True
        self.join(DEADLINE_S)


def pause(pause_s: float = POLL_S) -> None:
    """Waits a moment before a process is asked again: it does not report changes by itself."""
    threading.Event().wait(pause_s)


@attrs.define(eq=False)
class Node:
    """A node of the indexer, as processes.

    Attributes:
        url: The URL of its HTTP API.
        options: The options of its command line.
        folder: Its data directory.
        process: Its front process; None if the node does not run.
        is_disturbed: Whether one of its processes is stopped.
    """

    url: str
    options: Sequence[str]
    folder: Path
    process: IndexerProcess | None = None
    is_disturbed: bool = False
    _stack: ExitStack = attrs.field(factory=ExitStack)
    _stopped: list[int] = attrs.field(factory=list)

    def start(self, bucket: str) -> None:
        self.process = self._stack.enter_context(
            indexer_process(bucket, self.folder, *self.options, workers=None)
        )

    @property
    def answers(self) -> bool:
        """Whether its front process can be asked."""
        return self.process is not None and self.process.process.pid not in self._stopped

    def pids(self) -> list[int]:
        """Its front process, and its workers'."""
        assert self.process is not None
        return [self.process.process.pid, *workers_of(self.process)]

    def stop(self, pids: Sequence[int]) -> None:
        """Stops processes, so that they hang."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            self._stopped.append(pid)
        self.is_disturbed = True

    def go_on(self) -> None:
        """Lets the stopped processes continue."""
        for pid in self._stopped:
            # A worker that hung may have been killed.
            if Path(f"/proc/{pid}/exe").exists():
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()
        self.is_disturbed = False

    def kill(self) -> None:
        """Ends it as a crash would."""
        assert self.process is not None
        self.go_on()
        self.process.kill()
        self.process = None
        self._stack.close()

    def close(self) -> None:
        self.go_on()
        self._stack.close()


@attrs.define
class Outcome:
    """Counts of what happened in the rounds.

    Nodes are away if they do not run, or if one of their processes is stopped.

    Attributes:
        answers: By the number of nodes away, how many answers were right.
        refused: By the number of nodes away and the error's code, how many scans were refused.
        longest_s: By the number of nodes away, the longest time until an answer.
        events: How often each thing was done to a node.
        reasons: By the number of nodes away and the error's text without numbers, how many scans
            were refused.
    """

    answers: Counter[int] = attrs.field(factory=Counter)
    refused: Counter[tuple[int, str]] = attrs.field(factory=Counter)
    longest_s: dict[int, float] = attrs.field(factory=dict)
    events: Counter[str] = attrs.field(factory=Counter)
    reasons: Counter[tuple[int, str]] = attrs.field(factory=Counter)


class Rounds:
    """Disturbs nodes, and scans them.

    Args:
        bucket: The bucket's URL.
        nodes: The nodes.
        load: Writes documents.
        rng: The random number generator.

    Attributes:
        outcome: What happened so far.
    """

    def __init__(self, bucket: str, nodes: Sequence[Node], load: Load, rng: random.Random) -> None:
        self.outcome = Outcome()
        self._bucket = bucket
        self._nodes = nodes
        self._load = load
        self._rng = rng

    def disturb(self) -> None:
        """Kills or stops a node or a worker, or ends an earlier disturbance."""
        rng = self._rng
        node = rng.choice(self._nodes)
        if node.process is None:
            event = "start"
            node.start(self._bucket)
        elif node.is_disturbed:
            event = "go on"
            node.go_on()
        elif sum(other.answers for other in self._nodes) > 1:
            event = rng.choice(["kill", "stop all", "stop front", "stop worker", "kill worker"])
            front, *workers = node.pids()
            if event == "kill":
                node.kill()
            elif event == "stop all":
                node.stop([front, *workers])
            elif event == "stop front":
                node.stop([front])
            elif workers:
                worker = rng.choice(workers)
                if event == "stop worker":
                    node.stop([worker])
                else:
                    os.kill(worker, signal.SIGKILL)
        else:
            event = "nothing"
        self.outcome.events[event] += 1

    def scan(self) -> None:
        """Scans at a node that runs: the answer must be right, or an error that names the missing
        slice."""
        rng, outcome = self._rng, self.outcome
        chosen_node = rng.choice([node for node in self._nodes if node.answers])
        away = sum(node.process is None or node.is_disturbed for node in self._nodes)
        with self._load.paused() as log:
            newest = log.newest()
        name = rng.choice(list(INDEXES))
        is_now, is_paged = rng.random() < 0.5, rng.random() < 0.3
        began_at = time.monotonic()
        try:
            with IndexClient(chosen_node.url) as client:
                entries, timestamps = _entries(client, name, is_now=is_now, is_paged=is_paged)
        except IndexerError as error:
            if not _is_expected(error):
                raise
            outcome.refused[away, error.code] += 1
            outcome.reasons[away, re.sub(r"http://[^ ;,:]*:\d+|\d+", "N", str(error))] += 1
            return
        took_s = time.monotonic() - began_at
        with self._load.paused() as log:
            contents = log.contents_at(timestamps)
        assert entries == by_brute_force(INDEXES[name], contents)
        if is_now:
            assert all(timestamps[partition][1] >= seq for partition, seq in newest.items())
        outcome.answers[away] += 1
        outcome.longest_s[away] = max(took_s, outcome.longest_s.get(away, 0.0))

    def restore(self) -> None:
        """Ends all disturbances, waits until every copy is ready, and checks a scan of each
        node."""
        for node in self._nodes:
            if node.process is None:
                node.start(self._bucket)
            node.go_on()
        for node in self._nodes:
            until_ready(node)
            for name in INDEXES:
                with self._load.paused() as log, IndexClient(node.url) as client:
                    entries, timestamps = _entries(client, name, is_now=True, is_paged=False)
                    assert {p: seq for p, (_, seq) in timestamps.items()}.items() >= (
                        log.newest().items()
                    )
                    assert entries == by_brute_force(INDEXES[name], log.contents_at(timestamps))


def _entries(
    client: IndexClient, name: str, *, is_now: bool, is_paged: bool
) -> tuple[list[tuple[list[object], str]], dict[int, tuple[str, int]]]:
    """All entries of an index at one moment, and its timestamps."""
    page = client.scan(
        name,
        limit=20 if is_paged else 10_000,
        consistency="now" if is_now else "any",
        timeout_s=5,
        timestamps=True,
        hold_s=30 if is_paged else 0,
    )
    timestamps = page.timestamps
    entries = [(entry.key, entry.id) for entry in page.entries]
    while page.continuation:
        page = client.scan(
            name, limit=20, hold_s=30, moment=page.moment, continuation=page.continuation
        )
        entries += [(entry.key, entry.id) for entry in page.entries]
    if page.moment:
        client.release(page.moment)
    return entries, timestamps


def _is_expected(error: IndexerError) -> bool:
    """Whether nodes that are away may cause this error, and it names the missing slice."""
    names_slice = "slice " in str(error) and "http://127.0.0.1:" in str(error)
    return error.code in CODES and (error.code != "slice_missing" or names_slice)


def until_ready(node: Node) -> None:
    """Waits until a node sees every copy of every slice ready."""
    while True:
        with IndexClient(node.url) as client:
            rows = client.indexes()
        copies = [copy for row in rows for part in row["slices"] for copy in part["replicas"]]
        if len(rows) == len(INDEXES) and all(copy["state"] == "ready" for copy in copies):
            return
        pause(0.1)


@contextmanager
def running(folder: Path, replicas: int, seed: int, slices: int = 3) -> Iterator[Rounds]:
    """A server, three nodes that are ready, and a thread that writes."""
    rng = random.Random(seed)
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(3)]
    with ExitStack() as stack:
        server = stack.enter_context(start_server())
        with BlockingClient(server.url) as client:
            client.create_bucket("b", PARTITIONS)
        bucket = f"{server.url}b"
        nodes = []
        for place, url in enumerate(urls):
            options = (
                *("--nodes", ",".join(urls), "--node", str(place), "--log-level", "error"),
                *("--listen", url.removeprefix("http://"), "--replicas", str(replicas)),
                *("--slices", str(slices)),
            )
            node = Node(url, options, folder / str(place))
            stack.callback(node.close)
            node.start(bucket)
            nodes.append(node)
        with IndexClient(urls[0]) as asking:
            asking.create("d", DESIGN)
        load = Load(bucket)
        load.start()
        stack.callback(load.end)
        for node in nodes:
            until_ready(node)
        yield Rounds(bucket, nodes, load, rng)


def main() -> None:
    """Runs rounds, and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--settle", action="store_true", help="let all nodes come back before the next round"
    )
    arguments = parser.parse_args()
    began_at = time.monotonic()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running(Path(folder), arguments.replicas, arguments.seed) as rounds,
    ):
        for number in range(1, arguments.rounds + 1):
            rounds.disturb()
            for _ in range(4):
                rounds.scan()
                pause(0.5 * rounds._rng.random())
            if arguments.settle:
                rounds.restore()
            if number % 10 == 0:
                sys.stderr.write(f"{number} rounds, {time.monotonic() - began_at:.0f} s\n")
        rounds.restore()
        outcome = rounds.outcome
    lines = [f"{arguments.rounds} rounds, {arguments.replicas} replicas, seed {arguments.seed}"]
    lines += [f"  {event}: {count}" for event, count in sorted(outcome.events.items())]
    for away in sorted({*outcome.answers, *(key for key, _ in outcome.refused)}):
        refused = {code: n for (key, code), n in sorted(outcome.refused.items()) if key == away}
        lines.append(
            f"  nodes away {away}: {outcome.answers[away]} answers, all right, the longest after "
            f"{outcome.longest_s.get(away, 0.0):.1f} s; refused {refused}"
        )
    lines += [
        f"  refused {count} times with {away} away: {reason}"
        for (away, reason), count in outcome.reasons.most_common(REASONS_MAX)
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
