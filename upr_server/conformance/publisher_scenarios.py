"""What a client must do that publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from upr_protocol.chunk import CounterDelta
from upr_protocol.errors import Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Cas, Operation, PartitionId, SeqNo
from upr_protocol.wire import Credit, Mutate, MutateReply, Refusal, RunResult
from upr_server.conformance.client_scenario import Accept, ClientScenario, Task, require
from upr_server.conformance.scripted_server import HISTORY, PARTITION_COUNT, ScriptedServer


def _publish(*operations: tuple[str, str, str]) -> Task:
    return {
        "task": "publish",
        "bucket": "flights",
        "partition_count": PARTITION_COUNT,
        "operations": [
            {"operation": operation, "key": key, "value": value}
            for operation, key, value in operations
        ],
    }


class _Store:
    """What a scripted server has made of bundles: runs by token, and rows in their order."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []
        self._results: dict[tuple[bytes, int, int], RunResult] = {}
        self._high = 0

    def check(self, request: Mutate) -> None:
        """Holds a bundle to the rules that only a server can know."""
        require(any(request.writer), "the runs have no writer, so they cannot be sent again")
        for run, chunk in zip(request.bundle.runs, request.bundle.run_chunks(), strict=True):
            require(run.counter > 0, "the counter of a run is 0")
            for key in chunk.check_published():
                partition = partition_of(key, PARTITION_COUNT)
                require(partition == run.partition, f"{key!r} is in partition {partition}")

    def apply(self, request: Mutate) -> MutateReply:
        """Makes what is new of a bundle, and answers all of it."""
        self.check(request)
        results = []
        for run, chunk in zip(request.bundle.runs, request.bundle.run_chunks(), strict=True):
            token = (request.writer, run.partition, run.counter)
            if token not in self._results:
                first_seq = self._high + 1
                self._high += run.row_count
                self.rows += [(row.key.decode(), row.value.decode("latin1")) for row in chunk]
                self._results[token] = RunResult(
                    PartitionId(run.partition), Status.OK, HISTORY,
                    SeqNo(first_seq), SeqNo(self._high), Cas(first_seq),
                )  # fmt: skip
            results.append(self._results[token])
        return MutateReply(0, tuple(results), opaque=request.opaque)


_SETS: Final = [("SET", f"key-{row}", f"value-{row}") for row in range(40)]


def _check_sets(outcome: Any) -> None:
    statuses = [result["status"] for result in outcome["results"]]
    require(statuses == [0] * len(_SETS), f"the statuses are {statuses}")
    seqs = sorted(int(result["seq"]) for result in outcome["results"])
    require(seqs == list(range(1, len(_SETS) + 1)), f"the numbers are {seqs}")


def _check_made_once(store: _Store) -> None:
    rows = sorted(store.rows)
    expected = sorted((key, value) for _, key, value in _SETS)
    require(rows == expected, f"{len(rows)} rows were made of {len(expected)}, or other ones")


async def _serve_bundles(
    script: ScriptedServer, store: _Store, count: int, credit: int = 0
) -> None:
    """Answers bundles until so many rows were made."""
    while len(store.rows) < count:
        request = await script.expect(Mutate)
        await script.send(store.apply(request))
        if script.session.credit.remaining_bytes <= 0 and credit:
            await script.send(Credit(credit))


async def _play_publish(accept: Accept) -> None:
    script, store = await accept(), _Store()
    await script.open_bucket()
    await _serve_bundles(script, store, len(_SETS))
    _check_made_once(store)
    await script.expect_end()


async def _play_credit(accept: Accept) -> None:
    # The credit is for a frame or two. It goes below 0, so the next frame must wait.
    script, store = await accept(), _Store()
    await script.open_bucket(credit=100)
    await _serve_bundles(script, store, len(_SETS), credit=3000)
    _check_made_once(store)
    await script.expect_end()


async def _play_lost_answer(accept: Accept) -> None:
    script, store = await accept(), _Store()
    await script.open_bucket()
    unanswered = await script.expect(Mutate)
    store.apply(unanswered)
    await script.cut_connection()
    script = await accept()
    await script.open_bucket()
    request = await script.expect(Mutate)
    require(request.writer == unanswered.writer, "the runs come again from another writer")
    before = dict(zip(unanswered.bundle.runs, unanswered.bundle.run_chunks(), strict=True))
    again = dict(zip(request.bundle.runs, request.bundle.run_chunks(), strict=True))
    tokens = {(run.partition, run.counter) for run in again}
    oldest = {(run.partition, run.counter) for run in before}
    require(bool(tokens & oldest), "the runs without an answer do not come first")
    for run, chunk in again.items():
        if (run.partition, run.counter) in oldest:
            require(before.get(run) == chunk, f"the run {run} has other contents than before")
    await script.send(store.apply(request))
    await _serve_bundles(script, store, len(_SETS))
    _check_made_once(store)
    await script.expect_end()


async def _play_refused_runs(accept: Accept) -> None:
    script, store = await accept(), _Store()
    await script.open_bucket()
    first_request = await script.expect(Mutate)
    store.check(first_request)
    if len(first_request.bundle.runs) == 1:
        busy = Refusal("try again", opaque=first_request.opaque, status=Status.TEMPORARY_FAILURE)
        await script.send(busy)
    else:
        results = tuple(
            RunResult(PartitionId(run.partition), Status.TEMPORARY_FAILURE)
            for run in first_request.bundle.runs
        )
        await script.send(MutateReply(0, results, opaque=first_request.opaque))
    lowest = {run.partition: run.counter for run in first_request.bundle.runs}
    while len(store.rows) < len(_SETS):
        request = await script.expect(Mutate)
        for run in request.bundle.runs:
            lowest_counter = lowest.pop(run.partition, run.counter)
            require(
                run.counter == lowest_counter,
                f"run {run.counter} overtakes the refused {lowest_counter}",
            )
        await script.send(store.apply(request))
    _check_made_once(store)
    await script.expect_end()


async def _play_failed_rows(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    row_count, result, seq = 0, {}, 0
    while row_count < 3:
        request = await script.expect(Mutate)
        _Store().check(request)
        failures, counters, results, row = [], [], [], 0
        for run, chunk in zip(request.bundle.runs, request.bundle.run_chunks(), strict=True):
            first_seq = seq + 1
            for mutation in chunk:
                row_count += 1
                if mutation.op is Operation.ADD:
                    failures.append((row, int(Status.EXISTS)))
                else:
                    seq += 1
                    result[mutation.key] = seq
                if mutation.op is Operation.INCREMENT:
                    delta = CounterDelta.decode(mutation.value)
                    require(
                        (delta.delta, delta.initial, bool(delta.create)) == (5, 5, True),
                        f"the delta is {delta}",
                    )
                    counters.append((row, 12))
                row += 1
            last_seq = seq if seq >= first_seq else 0
            results.append(
                RunResult(
                    PartitionId(run.partition), Status.OK, HISTORY,
                    SeqNo(first_seq if last_seq else 0), SeqNo(last_seq),
                    Cas(first_seq if last_seq else 0),
                )
            )  # fmt: skip
        reply = MutateReply(
            0, tuple(results), tuple(failures), tuple(counters), opaque=request.opaque
        )
        await script.send(reply)
    await script.expect_end()


def _check_failed_rows(outcome: Any) -> None:
    add_result, counter_result, set_result = outcome["results"]
    require(add_result["status"] == Status.EXISTS, f"the ADD has the status {add_result['status']}")
    require(
        (counter_result["status"], counter_result["counter"]) == (0, "12"),
        f"the counter is {counter_result}",
    )
    require(set_result["status"] == 0, f"the SET has the status {set_result['status']}")
    require(add_result["seq"] is None, "a row that failed has a number")


PUBLISHER_SCENARIOS: Final[Mapping[str, ClientScenario]] = {
    "publish": ClientScenario(
        "publishes each key to its partition, with a writer and counters",
        _publish(*_SETS),
        _play_publish,
        _check_sets,
    ),
    "credit": ClientScenario(
        "sends only while its credit is above 0",
        _publish(*_SETS),
        _play_credit,
        _check_sets,
    ),
    "lost-answer": ClientScenario(
        "sends runs again whose answer was lost, with the same tokens and contents",
        _publish(*_SETS),
        _play_lost_answer,
        _check_sets,
    ),
    "refused-runs": ClientScenario(
        "sends runs again that were refused for a passing reason, before later ones",
        _publish(*_SETS),
        _play_refused_runs,
        _check_sets,
    ),
    "failed-rows": ClientScenario(
        "tells failed rows from the others, and reads the new values of counters",
        _publish(("ADD", "a", "1"), ("INCREMENT", "n", "5"), ("SET", "b", "2")),
        _play_failed_rows,
        _check_failed_rows,
    ),
}
"""By name, in the order in which they are played."""
