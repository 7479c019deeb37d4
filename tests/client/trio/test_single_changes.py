"""Single changes of many tasks at once, whose connections are cut anywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import attrs
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kit.effort import effort
from tests.kit.fake_net import ENDLESS, FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.scheduler import seeded_scheduler
from upr_protocol.client import Client, WriteResult, connect
from upr_protocol.client.core.batcher import BUNDLE_MUTATIONS
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.ids import Durability
from upr_protocol.wire import Message, Mutate

URL = "upr://fake/b"
KEYS = [b"a", b"b", b"c", b"d", b"counter-e"]
LEVELS = [(Durability.MEMORY, 0), (Durability.PERSISTED, 0), (Durability.REPLICATED, 1)]

Step = tuple[str, bytes, tuple[Durability, int]]

steps = st.tuples(
    st.sampled_from(["set", "increment", "delete", "add"]),
    st.sampled_from(KEYS),
    st.sampled_from(LEVELS),
)


@attrs.define
class Made:
    """One change that a task asked for, and what it was told.

    Attributes:
        task: The task.
        operation: What it asked for.
        key: The key.
        value: A value that no other change has.
        outcome: The result, the refusal, or None when the connection was lost.
    """

    task: int
    operation: str
    key: bytes
    value: bytes
    outcome: WriteResult | ServerError | None = None


async def make(client: Client, change: Made, level: tuple[Durability, int]) -> WriteResult:
    options: dict[str, Any] = {"durability": level[0], "copies": level[1]}
    if change.operation == "increment":
        return await client.increment(b"n-" + change.key, **options)
    if change.operation == "delete":
        return await client.delete(change.key, **options)
    if change.operation == "add":
        return await client.add(change.key, change.value, **options)
    return await client.set(change.key, change.value, **options)


async def run_task(
    client: Client, task: int, plan: Sequence[Step], made_changes: list[Made]
) -> None:
    for operation, key, level in plan:
        change = Made(task, operation, key, b"value %d" % len(made_changes))
        made_changes.append(change)
        try:
            change.outcome = await make(client, change, level)
        except ServerError as error:
            change.outcome = error
        except BrokenError:
            return


def check(server: FakeServer, made_changes: Sequence[Made]) -> None:
    """Compares what the tasks were told with what the server did."""
    made_at: dict[tuple[int, int], Made] = {}
    last_seq: defaultdict[tuple[int, int], int] = defaultdict(int)
    for change in made_changes:
        if not isinstance(change.outcome, WriteResult):
            continue
        result = change.outcome
        place = (int(result.partition), int(result.seq))
        assert place not in made_at, "two changes were told the same number"
        made_at[place] = change
        task_and_partition = (change.task, int(result.partition))
        assert result.seq > last_seq[task_and_partition], "a task's changes lost their order"
        last_seq[task_and_partition] = int(result.seq)
        (mutation,) = [
            mutation
            for mutation in server.partitions[result.partition].history
            if mutation.seq == result.seq
        ]
        if change.operation == "increment":
            assert mutation.value == b"%d" % (result.count or 0)
        else:
            expected = b"" if change.operation == "delete" else change.value
            assert (mutation.key, mutation.value) == (change.key, expected)
    values = [m.value for partition in server.partitions for m in partition.history]
    for change in made_changes:
        if change.operation in ("set", "add"):
            count = values.count(change.value)
            if isinstance(change.outcome, WriteResult):
                assert count == 1
            elif change.outcome is None:
                assert count <= 1, "a change whose connection was lost was made twice"
            else:
                assert count == 0, "a refused change was made"
                assert change.outcome.status is Status.EXISTS
    applied = sum(partition.applied for partition in server.partitions)
    answered = len(made_at)
    unknown = sum(change.outcome is None for change in made_changes)
    assert answered <= applied <= answered + unknown


@settings(max_examples=effort(60, 1000))
@given(
    plans=st.lists(st.lists(steps, min_size=1, max_size=8), min_size=1, max_size=10),
    budgets=st.lists(st.tuples(st.integers(300, 3000), st.integers(300, 6000)), max_size=3),
    credit_bytes=st.sampled_from([1 << 20, 200]),
    seed=st.integers(0, 2**32),
)
def test_each_single_change_has_the_effect_that_its_task_is_answered(
    plans: list[list[Step]], budgets: list[tuple[int, int]], credit_bytes: int, seed: int
) -> None:
    server = FakeServer()
    server.credit_bytes = credit_bytes
    made_changes: list[Made] = []

    async def main() -> None:
        async with trio.open_nursery() as servers:
            net = FakeNet(servers, server)
            net.budgets = iter([*budgets, (ENDLESS, ENDLESS)])
            for _ in range(len(budgets) + 1):
                try:
                    async with (
                        connect(URL, dial=net.dial) as client,
                        trio.open_nursery() as tasks,
                    ):
                        for index, plan in enumerate(plans):
                            tasks.start_soon(run_task, client, index, plan, made_changes)
                except BrokenError:
                    continue  # it was cut during the handshake
            servers.cancel_scope.cancel()

    with seeded_scheduler(seed):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    check(server, made_changes)


async def test_the_levels_of_waiting_changes_take_turns(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """A level with thousands of changes does not keep the others waiting."""
    server.credit_bytes = 0
    levels: list[tuple[Durability, int]] = []

    def hear(message: Message) -> None:
        if isinstance(message, Mutate):
            levels.append((message.durability, message.bundle.chunk.count))

    async def change(client: Client, index: int, durability: Durability) -> None:
        await client.set(b"%d-%d" % (durability, index), b"v", durability=durability)

    server.refuse = hear
    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as tasks:
        for index in range(5000):
            tasks.start_soon(change, client, index, Durability.MEMORY)
        await trio.testing.wait_all_tasks_blocked()
        for index in range(3):
            tasks.start_soon(change, client, index, Durability.PERSISTED)
        await trio.testing.wait_all_tasks_blocked()
        assert not levels
        server.grant(1 << 20)
    assert levels[:3] == [
        (Durability.MEMORY, BUNDLE_MUTATIONS),
        (Durability.PERSISTED, 3),
        (Durability.MEMORY, BUNDLE_MUTATIONS),
    ]
    assert sum(count for _, count in levels) == len(server.contents()) == 5003
