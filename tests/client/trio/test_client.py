"""Keys and buckets over one connection."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from traceback import walk_tb
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from upr_protocol.client import AddressError, Client, RefusedKeysError, WriteResult, connect
from upr_protocol.client.core.bundle_window import BUNDLE_S, BUNDLES_MAX
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.errors import (
    BrokenError,
    ClosedError,
    LocalProtocolError,
    ServerError,
    Status,
    UprError,
)
from upr_protocol.ids import Durability
from upr_protocol.limits import GET_REPLY_KEYS_MAX, IDLE_INTERVAL_S_DEFAULT, REQUESTS_OPEN_MAX
from upr_protocol.wire import Get, Mutate, Stats

MEMORY = Durability.MEMORY
PERSISTED = Durability.PERSISTED

URL = "upr://fake/b"


async def test_an_item_is_written_read_back_and_deleted(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=net.dial, identity="test:keys") as client:
        assert await client.get("k") is None
        write_result = await client.set("k", "v", flags=7, expiry=9)
        item = await client.get(b"k")
        assert item is not None
        assert (item.key, item.value, item.flags, item.expiry) == (b"k", b"v", 7, 9)
        assert (item.cas, item.seq) == (write_result.cas, write_result.seq)
        assert (item.partition, item.history_id) == (
            write_result.partition,
            write_result.history_id,
        )
        again = await client.set("k", b"w", cas=write_result.cas)
        assert again.seq == write_result.seq + 1
        await client.delete("k")
        assert await client.get("k") is None
    assert server.identities == ["test:keys"]


async def test_increments_give_the_new_count(net: FakeNet, autojump_clock: MockClock) -> None:
    async with connect(URL, dial=net.dial) as client:
        assert (await client.increment("n", 5)).count == 5
        assert (await client.increment("n", 5)).count == 10
        assert (await client.increment("m", 5, initial=100)).count == 100
        assert (await client.set("k", "v")).count is None


@pytest.mark.parametrize(
    ("operation", "status"),
    [
        (lambda c: c.add("k", "x"), Status.EXISTS),
        (lambda c: c.replace("missing", "x"), Status.UNSUPPORTED),
        (lambda c: c.delete("missing"), Status.NOT_FOUND),
        (lambda c: c.append("missing", "x"), Status.NOT_FOUND),
        (lambda c: c.set("k", "x", cas=12345), Status.CAS_MISMATCH),
        (lambda c: c.set("", "x"), Status.BAD_KEY),
        (lambda c: c.set("k" * 251, "x"), Status.BAD_KEY),
        (lambda c: c.set("k", bytes(20 * 1024 * 1024 + 1)), Status.TOO_LARGE),
        (lambda c: c.set("k", "x", flags=-1), Status.BAD_ARGUMENT),
        (lambda c: c.touch("k", 1.5), Status.BAD_ARGUMENT),
        (lambda c: c.get(""), Status.BAD_KEY),
    ],
)
async def test_a_refused_change_raises_an_error_with_its_status(
    net: FakeNet, operation: object, status: Status, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=net.dial) as client:
        await client.set("k", "v")
        with pytest.raises(ServerError) as caught:
            await operation(client)  # type: ignore[operator]
        if status is not Status.UNSUPPORTED:  # the fake does not know replace
            assert caught.value.status is status


async def test_a_change_that_cannot_be_encoded_takes_nothing_from_others(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def mistake(client: Client, **wrong: Any) -> None:
        with pytest.raises((ServerError, TypeError)):
            await client.set(**{"key": "wrong", "value": "x", **wrong})

    mistakes: list[dict[str, Any]] = [
        {"cas": 1 << 64},
        {"expiry": 1.5},
        {"value": {}},
        {"value": 5},
    ]
    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as nursery:
        for wrong in mistakes:
            nursery.start_soon(client.set, "right", "1")
            nursery.start_soon(partial(mistake, client, **wrong))
    assert server.contents() == {b"right": b"1"}


async def test_keys_that_the_server_cannot_read_are_told_beside_the_others(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    keys = [b"%d" % index for index in range(40)]
    for key in keys[::2]:
        server.put(key, key)
    server.damaged_keys = set(keys[1:20:2])
    server.get_items_max = 3
    async with connect(URL, dial=net.dial) as client:
        with pytest.raises(RefusedKeysError, match="and 9 more") as caught:
            await client.get_many(keys)
        assert set(caught.value.statuses) == server.damaged_keys
        assert [item and item.key for item in caught.value.items] == [
            None if index % 2 else key for index, key in enumerate(keys)
        ]
        partition = server.partition_of(b"1")
        placed = [key for key in keys if server.partition_of(key) is partition]
        with pytest.raises(RefusedKeysError) as caught:
            await client.get_from(partition.id, placed, 0)
        assert set(caught.value.statuses) == server.damaged_keys & set(placed)
        assert await client.get(b"0") is not None


async def test_get_many_keeps_the_order_of_keys_across_several_answers(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.get_items_max = 7
    keys = [b"key-%d" % index for index in range(100)]
    for key in keys[::2]:
        server.put(key, b"value of " + key)
    async with connect(URL, dial=net.dial) as client:
        items = await client.get_many([*keys, keys[0]])
        assert await client.get_many([]) == []
    assert [item and item.value for item in items] == [
        None if index % 2 else b"value of key-%d" % index for index in [*range(100), 0]
    ]


async def test_get_many_splits_more_keys_than_one_request_takes(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    key_counts: list[int] = []

    def refuse(message: object) -> None:
        if isinstance(message, Get):
            key_counts.append(len(message.keys))

    server.refuse = refuse
    async with connect(URL, dial=net.dial) as client:
        keys = [b"%d" % index for index in range(5 * GET_REPLY_KEYS_MAX)]
        assert await client.get_many(keys) == [None] * len(keys)
    assert max(key_counts) == GET_REPLY_KEYS_MAX
    assert sum(key_counts) == len(keys)


async def test_buckets_are_created_listed_and_deleted(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    async with connect("upr://fake", dial=net.dial) as client:
        await client.create_bucket("c", 16, 1000)
        rows = [(b.name, b.partition_count, b.quota_bytes) for b in await client.list_buckets()]
        assert rows == [("b", 4, 0), ("c", 16, 1000)]
        with pytest.raises(ServerError) as caught:
            await client.create_bucket("c")
        assert caught.value.status is Status.BUCKET_EXISTS
        await client.delete_bucket("c")
        with pytest.raises(ServerError) as caught:
            await client.delete_bucket("c")
        assert caught.value.status is Status.NO_BUCKET
        assert await client.stats() == {"fake": True}
        with pytest.raises(LocalProtocolError, match="names a bucket"):
            await client.get("k")


async def test_partitions_and_seqnos_tell_every_partition(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.put(b"k", b"v")
    partition = server.partition_of(b"k").id
    async with connect(URL, dial=net.dial) as client:
        infos = client.partitions()
        assert [info.partition for info in infos] == [0, 1, 2, 3]
        assert all(info.is_held for info in infos)
        assert infos[partition].high_seq == 1
        (numbers,) = await client.seqnos([partition])
        assert (numbers.partition, numbers.high_seq) == (partition, 1)
        assert len(await client.seqnos()) == 4
        write_result = await client.set("k", "w")
        assert await client.await_durable(write_result, Durability.MEMORY) == write_result.seq


async def test_connecting_to_a_missing_bucket_fails_at_once(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(ServerError) as caught:
        async with connect("upr://fake/other", dial=net.dial):
            pass
    assert caught.value.status is Status.NO_BUCKET
    assert net.open == 0


async def test_an_invalid_url_raises_an_address_error(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(AddressError):
        async with connect("http://fake/b", dial=net.dial):
            pass


async def test_connecting_to_a_closed_port_fails(net: FakeNet, autojump_clock: MockClock) -> None:
    net.down = True
    with pytest.raises(BrokenError, match="cannot connect to upr://fake:12000/b"):
        async with connect(URL, dial=net.dial):
            pass


async def test_a_host_that_is_not_known_is_said_in_words(autojump_clock: MockClock) -> None:
    async def dial(address: object) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(BrokenError, match=r"/b: Name or service not known$"):
        async with connect(URL, dial=dial):
            pass


async def test_connecting_to_a_silent_server_times_out(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def dial(address: object) -> trio.abc.Stream:
        own_end, _peer_end = trio.testing.memory_stream_pair()
        await trio.lowlevel.checkpoint()
        return own_end

    with pytest.raises(BrokenError, match="did not answer in time"):
        async with connect(URL, dial=dial, connect_timeout_s=3):
            pass
    assert trio.current_time() > 0


async def test_a_peer_that_speaks_another_protocol_is_rejected(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    async def dial(address: object) -> trio.abc.Stream:
        own_end, peer_end = trio.testing.memory_stream_pair()
        await peer_end.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return own_end

    with pytest.raises(UprError, match="not a UPR frame"):
        async with connect(URL, dial=dial):
            pass


async def test_requests_of_several_tasks_share_the_connection(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def work(client: Client, name: str) -> None:
        for index in range(20):
            await client.increment("shared")
            await client.set(f"{name}-{index}", name)

    async with connect(URL, dial=net.dial) as client:
        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(work, client, f"task-{index}")
        item = await client.get("shared")
        assert client.statistics().open_requests == 0
    assert item is not None
    assert item.value == b"160"
    assert net.dialled == 1


async def test_a_lost_connection_ends_open_requests(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.held = {Stats}
    async with connect(URL, dial=net.dial) as client:
        with pytest.RaisesGroup(BrokenError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.stats)
                await trio.testing.wait_all_tasks_blocked()
                net.cut()
        with pytest.raises(BrokenError):
            await client.get("k")
    assert net.open == 0


async def test_leaving_ends_open_requests_of_other_tasks(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    end_event = trio.Event()

    async def ask(client: Client) -> None:
        with pytest.raises(ClosedError):
            await client.stats()
        end_event.set()

    server.held = {Stats}
    async with connect(URL, dial=net.dial) as client:
        net.nursery.start_soon(ask, client)
        await trio.testing.wait_all_tasks_blocked()
    await end_event.wait()
    with pytest.raises(ClosedError):
        await client.get("k")


async def test_a_cancelled_request_leaves_the_connection_good(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=net.dial) as client:
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.get("k")
        with trio.move_on_after(0.001):
            server.held = {Get}
            await client.get("k")
        server.held = set()
        await client.set("k", "v")
        item = await client.get("k")
        assert item is not None
        assert item.value == b"v"


async def test_an_exception_of_the_body_comes_out_as_it_is(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with connect(URL, dial=net.dial):
            raise ZeroDivisionError
    assert net.open == 0


async def test_a_change_waits_for_credit(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.credit_bytes = 0

    async def pay() -> None:
        await trio.sleep(20)
        server.grant(1 << 20)

    async with connect(URL, dial=net.dial, credit_timeout_s=30) as client:
        net.nursery.start_soon(pay)
        began_at = trio.current_time()
        await client.set("k", "v")
        assert trio.current_time() - began_at == pytest.approx(20)


async def test_a_change_fails_when_no_credit_arrives_in_time(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.credit_bytes = 0
    async with connect(URL, dial=net.dial, credit_timeout_s=30) as client:
        with pytest.raises(ServerError, match="over its memory quota") as caught:
            await client.set("k", "v")
        assert caught.value.status is Status.TEMPORARY_FAILURE
        assert await client.get("k") is None
    assert server.contents() == {}


async def test_credit_that_is_used_up_by_other_changes_is_waited_for_no_longer(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    # A frame may overshoot, so this lets one bundle pass, and a bundle has one level.
    server.credit_bytes, server.pays = 1, False
    ended: dict[str, tuple[float, str]] = {}

    async def change(client: Client, key: str, after_s: float, durability: Durability) -> None:
        await trio.sleep(after_s)
        try:
            await client.set(key, "v", durability=durability)
            ended[key] = trio.current_time() - began_at, "set"
        except ServerError as error:
            ended[key] = trio.current_time() - began_at, error.status.name

    async with connect(URL, dial=net.dial, credit_timeout_s=30) as client:
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, client, "a", 0, MEMORY)
            nursery.start_soon(change, client, "b", 0.001, PERSISTED)
            nursery.start_soon(change, client, "c", 10, MEMORY)
            nursery.start_soon(change, client, "d", 20, PERSISTED)
            await trio.sleep(35)
            server.grant(1 << 20)
    assert {key: (round(ended_at), outcome) for key, (ended_at, outcome) in ended.items()} == {
        "a": (0, "set"),
        "b": (30, "TEMPORARY_FAILURE"),
        "c": (35, "set"),
        "d": (35, "set"),
    }
    assert sorted(server.contents()) == [b"a", b"c", b"d"]


async def test_an_error_that_many_callers_get_does_not_grow(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """Each raise of one and the same exception adds to its traceback."""
    server.held = {Stats, Mutate}
    frame_counts: list[int] = []

    async def fail(request: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(BrokenError) as caught:
            await request()
        frame_counts.append(sum(1 for _ in walk_tb(caught.value.__traceback__)))

    async with connect(URL, dial=net.dial) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(fail, client.stats)
                nursery.start_soon(fail, partial(client.set, "k", "v"))
            await trio.testing.wait_all_tasks_blocked()
            net.cut()
        for _ in range(50):
            await fail(client.stats)
    assert len(frame_counts) == 150
    assert max(frame_counts) < 20


async def test_an_idle_connection_stays_open(net: FakeNet, autojump_clock: MockClock) -> None:
    async with connect(URL, dial=net.dial) as client:
        await trio.sleep(100 * IDLE_INTERVAL_S_DEFAULT)
        await client.set("k", "v")
    assert net.dialled == 1


async def test_a_connection_to_a_server_that_falls_silent_times_out(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async def swallow(stream: trio.abc.Stream) -> None:
        await trio.sleep_forever()

    async with connect(URL, dial=net.dial, idle_interval_s=5) as client:
        for connection in server.connections:
            connection.session.send = lambda message: None  # type: ignore[method-assign]
        began_at = trio.current_time()
        with pytest.raises(BrokenError, match="idle timeout"):
            await client.stats()
        assert 9.9 < trio.current_time() - began_at < 15.1


async def test_more_requests_than_may_be_open_wait_for_their_turn(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer wakes as many as there is room for: 16,000 tasks took 8.5 s when it woke all."""
    has_room = vars(RequestChannel)["_has_room"].fget
    looks = 0

    def look(channel: RequestChannel) -> bool:
        nonlocal looks
        looks += 1
        return bool(has_room(channel))

    monkeypatch.setattr(RequestChannel, "_has_room", property(look))
    count = 3 * REQUESTS_OPEN_MAX
    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(client.get, "k")
    assert looks < 5 * count


async def test_requests_that_cannot_be_sent_leave_their_turn_to_others(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.held = {Stats}
    began_at = trio.current_time()

    async def create_badly(client: Client) -> None:
        with pytest.raises(LocalProtocolError):
            await client.create_bucket("c", 1 << 20)

    async def give_up(client: Client) -> None:
        with trio.move_on_after(1):
            await client.get("k")

    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as nursery:
        with trio.move_on_after(5):
            async with trio.open_nursery() as waiting:
                for _ in range(REQUESTS_OPEN_MAX - 2):
                    waiting.start_soon(client.stats)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(client.get, "k")
                for _ in range(5):
                    nursery.start_soon(give_up, client)
                    nursery.start_soon(create_badly, client)
                    nursery.start_soon(client.get, "k")
    # Nobody had to wait until something else woke the writer.
    assert trio.current_time() - began_at < 10


async def test_more_changes_than_may_be_open_wait_for_credit_and_for_their_turn(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.credit_bytes = 0
    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as nursery:
        for _ in range(6000):
            nursery.start_soon(client.set, "k", "v")
        await trio.testing.wait_all_tasks_blocked()
        server.grant(8 << 20)


async def test_credit_is_not_spent_by_reading(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.credit_bytes = 0
    server.put(b"k", b"v")
    async with connect(URL, dial=net.dial) as client:
        assert await client.get("k") is not None


async def test_a_client_reports_a_refused_batch(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.refuse = lambda m: Status.NOT_MY_PARTITION if isinstance(m, Mutate) else None
    async with connect(URL, dial=net.dial) as client:
        with pytest.raises(ServerError) as caught:
            await client.set("k", "v")
        assert caught.value.status is Status.NOT_MY_PARTITION


async def test_changes_of_many_tasks_ride_together(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    results: dict[int, WriteResult | ServerError] = {}
    async with connect(URL, dial=net.dial) as client:
        await client.set("there", "1")

        async def change(index: int) -> None:
            try:
                if index % 3:
                    results[index] = await client.increment(b"counter-%d" % (index % 5))
                elif index % 2:
                    results[index] = await client.add("there", "2")
                else:
                    results[index] = await client.set(b"key-%d" % index, "v", durability=PERSISTED)
            except ServerError as error:
                results[index] = error

        async with trio.open_nursery() as nursery:
            for index in range(60):
                nursery.start_soon(change, index)
        (connection,) = server.connections
        # The first alone, and the others in a bundle of each durability.
        assert connection.counts[Mutate] == 3
    counts: defaultdict[int, list[int]] = defaultdict(list)
    for index, result in results.items():
        if index % 3:
            assert isinstance(result, WriteResult)
            assert result.count is not None
            assert result.partition == server.partition_of(b"counter-%d" % (index % 5)).id
            counts[index % 5].append(result.count)
        elif index % 2:
            assert isinstance(result, ServerError)
            assert (result.status, "'there'" in str(result)) == (Status.EXISTS, True)
        else:
            assert isinstance(result, WriteResult)
            assert server.contents()[b"key-%d" % index] == b"v"
    assert {key: sorted(values) for key, values in counts.items()} == {
        key: list(range(1, 9)) for key in range(5)
    }


async def test_changes_gather_while_many_bundles_have_no_answer(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """And no longer than for a moment, nor behind bundles of another level."""
    server.held = {Mutate}
    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as nursery:
        (connection,) = server.connections
        keys = count()

        async def changes(key_count: int, durability: Durability = MEMORY) -> None:
            for _ in range(key_count):
                key = b"%d" % next(keys)
                nursery.start_soon(partial(client.set, key, "v", durability=durability))
            await trio.testing.wait_all_tasks_blocked()

        for bundles in range(1, BUNDLES_MAX + 1):
            await changes(1)
            assert connection.counts[Mutate] == bundles
        for _ in range(5):
            await changes(2)
        assert connection.counts[Mutate] == BUNDLES_MAX
        await changes(1, PERSISTED)
        assert connection.counts[Mutate] == BUNDLES_MAX + 1
        await trio.sleep(0.9 * BUNDLE_S)
        assert connection.counts[Mutate] == BUNDLES_MAX + 1
        await trio.sleep(0.2 * BUNDLE_S)
        assert connection.counts[Mutate] == BUNDLES_MAX + 2
        for _ in range(BUNDLES_MAX):
            await changes(1)
        bundles = connection.counts[Mutate]
        assert bundles < 2 * BUNDLES_MAX + 2
        server.release()
        await trio.testing.wait_all_tasks_blocked()
        assert connection.counts[Mutate] == bundles + 1
    assert len(server.contents()) == next(keys)


async def test_a_cancelled_change_takes_nothing_from_others(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    async with connect(URL, dial=net.dial) as client, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            for index in range(5):
                nursery.start_soon(client.set, b"key-%d" % index, "v")
            scope.cancel()
            await client.set("cancelled", "v")
        assert scope.cancelled_caught
    keys = {b"key-%d" % index for index in range(5)}
    assert keys <= server.contents().keys() <= keys | {b"cancelled"}
