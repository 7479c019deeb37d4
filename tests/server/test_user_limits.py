"""The limits of a user at a node, on a network in memory and with a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from tests.kit.memory_network import HOST, MemoryNetwork
from tests.kit.placed_keys import key_in
from tests.server.users import RIGHTS, VERIFIER
from upr_protocol.client import (
    Address,
    Client,
    Credentials,
    Security,
    connect,
    consume,
    publisher,
)
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.users import BYTES_A_SECOND_MIN, Limits, User, Users, UsersError
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.net.frame_budget import FrameBudget, UnfinishedFrame
from upr_server.net.handlers import leases
from upr_server.net.user_usage import BURST_S, DEBT_MAX_S, ByteRate, UserUsage
from upr_server.storage.records import LeaseRecord
from upr_server.storage.simulated import SimulatedStore

PARTITIONS: Final = 4
MIB: Final = 1024 * 1024
VALUE: Final = b"v" * 64 * 1024
SOON_S: Final = 0.1


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    return MemoryNetwork(monkeypatch)


@asynccontextmanager
async def server_with(**limits: int) -> AsyncIterator[Server]:
    """A server with bob, who has these limits, and eve, who has none."""
    config = ServerConfig(
        listen=f"{HOST}:71", buckets=(BucketConfig("b", PARTITIONS),), shutdown_deadline_s=0.1
    )
    users = (User("bob", VERIFIER, RIGHTS, Limits(**limits)), User("eve", VERIFIER, RIGHTS))
    async with running_server(config, SimulatedStore()) as server:
        server.users.users = Users(1, {user.name: user for user in users})
        yield server


def address(user: str) -> Address:
    return Address.parse(f"upr://{HOST}:71/b", Security(credentials=Credentials(user, "pencil")))


def keys(count: int) -> list[bytes]:
    return [key_in(n % PARTITIONS, PARTITIONS, b"%d-" % n) for n in range(count)]


async def publish(user: str, nbytes: int) -> float:
    """Publishes `nbytes` bytes, and returns how many seconds that took."""
    began = trio.current_time()
    async with publisher(address(user)) as sink:
        for key in keys(nbytes // len(VALUE)):
            await sink.set(key, VALUE)
    return trio.current_time() - began


async def read(user: str, **options: Any) -> float:
    """Reads the bucket, to its end if `options` has one, and returns how many seconds that took."""
    began = trio.current_time()
    async with consume(address(user), **options) as consumer:
        async for _ in consumer:
            pass
    return trio.current_time() - began


async def test_connections_over_the_limit_are_refused_with_the_users_name(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with server_with(connections=2) as server, AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(connect(address("bob")))
        with pytest.raises(ServerError, match="user bob has 2 connections at") as caught:
            async with connect(address("bob"), retry_timeout_s=0):
                pass
        assert caught.value.status is Status.TOO_MANY
        for _ in range(5):
            await stack.enter_async_context(connect(address("eve")))
        await stack.aclose()
        await trio.sleep(1)
        assert not server.connections.connections
        async with connect(address("bob")) as client:
            await client.set("k", "v")


async def test_streams_over_the_limit_are_refused_with_the_users_name(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    # A consumer opens streams until the limit is reached.
    async with server_with(streams=PARTITIONS) as server, trio.open_nursery() as nursery:
        nursery.start_soon(read, "bob")
        await trio.sleep(1)
        with pytest.raises(ServerError, match="user bob has 4 streams"):
            await read("bob")
        (connection,) = server.connections.connections
        assert len(connection.session.streams) == PARTITIONS
        nursery.cancel_scope.cancel()
    async with server_with(streams=PARTITIONS + 1):
        await read("bob", end="now")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, "bob")
            await trio.sleep(1)
            with pytest.raises(ServerError, match="user bob has 5 streams") as caught:
                await read("bob")
            assert caught.value.status is Status.LIMIT_REACHED
            nursery.cancel_scope.cancel()


async def test_leases_over_the_limit_are_refused_until_others_lapse(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with server_with(leases=2) as server, connect(address("bob")) as client:
        seconds = 0.0
        for connection in server.connections.connections:
            connection.context.time = lambda: seconds

        async def acquire(lease_id: int) -> None:
            ranges = [(PartitionId(0), SeqNo(0), SeqNo(0))]
            await client.acquire_lease(ranges, time_to_live_s=60, owner="bob", lease_id=lease_id)

        await acquire(1)
        await acquire(2)
        # A client asks again for a lease if the first answer was lost.
        await acquire(2)
        with pytest.raises(ServerError, match="user bob has 2 leases") as caught:
            await acquire(3)
        assert caught.value.status is Status.LIMIT_REACHED
        await client.release_lease(1)
        await acquire(3)
        with pytest.raises(ServerError, match="user bob has 2 leases"):
            await acquire(4)
        seconds = 61.0
        await acquire(4)
        # A lapsed lease counts again when it is renewed.
        await client.renew_lease(2, time_to_live_s=60)
        with pytest.raises(ServerError, match="user bob has 2 leases"):
            await client.renew_lease(3, time_to_live_s=60)


async def test_leases_count_from_before_the_limit_and_in_each_bucket(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """Leases from before the limit count, too. Each bucket may have a lease of the same ID."""
    async with server_with() as server, connect(address("bob")) as client:
        await client.acquire_lease(
            [(PartitionId(0), SeqNo(0), SeqNo(0))], time_to_live_s=60, owner="bob", lease_id=1
        )
        (connection,) = server.connections.connections
        usage = connection.context.log_in.usage
        assert usage is not None
        await server.users.apply_change(lambda users: users.with_limits("bob", Limits(leases=1)))
        now = connection.context.time()
        with usage.acquiring_lease("b", 1, now):
            pass
        with (
            pytest.raises(ServerError, match="user bob has 1 leases"),
            usage.acquiring_lease("c", 1, now),
        ):
            pass


async def test_a_lease_counts_though_its_client_leaves_while_it_is_written(
    network: MemoryNetwork, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with(leases=1) as server:
        (disk,) = server.catalog.disks.values()

        async def never(*_: object) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(disk.leases, "acquire", never)
        with trio.move_on_after(1):
            async with connect(address("bob")) as client:
                (connection,) = server.connections.connections
                await client.acquire_lease(
                    [(PartitionId(0), SeqNo(0), SeqNo(0))],
                    time_to_live_s=60,
                    owner="bob",
                    lease_id=1,
                )
        await trio.sleep(1)
        assert not server.connections.connections
        usage = connection.context.log_in.usage
        assert usage is not None
        with (
            pytest.raises(ServerError, match="user bob has 1 leases"),
            usage.acquiring_lease("b", 2, connection.context.time()),
        ):
            pass


async def test_leases_without_a_known_id_are_counted_one_by_one(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """The server was to draw the IDs, and the clients left before they received them."""
    async with server_with(leases=2) as server, connect(address("bob")):
        (connection,) = server.connections.connections
        usage = connection.context.log_in.usage
        assert usage is not None
        now = connection.context.time()
        for _ in range(2):
            with usage.acquiring_lease("b", 0, now):
                usage.note_lease("b", 0, now + 60)
        with (
            pytest.raises(ServerError, match="user bob has 2 leases"),
            usage.acquiring_lease("b", 0, now),
        ):
            pass


async def acquire_lease(client: Client, lease_id: int) -> None:
    ranges = [(PartitionId(0), SeqNo(0), SeqNo(0))]
    await client.acquire_lease(ranges, time_to_live_s=60, owner="bob", lease_id=lease_id)


def usage_of_bob(server: Server) -> UserUsage:
    return server.connections.resources.log_ins.usages.usage_of("bob")


async def test_leases_of_a_deleted_bucket_no_longer_count(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with server_with(leases=3) as server, connect(address("bob")) as client:
        now = server.connections.resources.time()
        await acquire_lease(client, 1)
        usage_of_bob(server).note_lease("b", 0, now + 60)
        usage_of_bob(server).note_lease("c", 1, now + 60)
        with pytest.raises(ServerError, match="user bob has 3 leases"):
            await acquire_lease(client, 2)
        await server.catalog.delete_bucket("b")
        await server.catalog.create_bucket("b", PARTITIONS, 8 * MIB)
        async with connect(address("bob")) as later:
            for lease_id in (1, 2):
                await acquire_lease(later, lease_id)
            with pytest.raises(ServerError, match="user bob has 3 leases"):
                await acquire_lease(later, 3)


async def test_a_lease_that_another_user_releases_no_longer_counts(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """Otherwise it would count until it lapses, which may take a day."""
    async with (
        server_with(leases=1),
        connect(address("bob")) as client,
        connect(address("eve")) as other,
    ):
        await acquire_lease(client, 1)
        await other.release_lease(1)
        await acquire_lease(client, 2)
        with pytest.raises(ServerError, match="user bob has 1 leases"):
            await acquire_lease(client, 3)


async def test_a_lease_that_is_granted_while_its_bucket_is_deleted_does_not_count(
    network: MemoryNetwork, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_with(leases=1) as server, connect(address("bob")) as client:
        (disk,) = server.catalog.disks.values()
        acquire = disk.leases.acquire

        async def acquire_late(*arguments: Any) -> LeaseRecord:
            granted = await acquire(*arguments)
            await server.catalog.delete_bucket("b")
            return granted

        async def sizes_of_none(*_: object) -> list[int]:
            raise ServerError(Status.NO_BUCKET)

        monkeypatch.setattr(disk.leases, "acquire", acquire_late)
        monkeypatch.setattr(leases, "_sizes", sizes_of_none)
        with pytest.raises(ServerError) as caught:
            await acquire_lease(client, 1)
        assert caught.value.status is Status.NO_BUCKET
        with usage_of_bob(server).acquiring_lease("b", 2, server.connections.resources.time()):
            pass


async def test_connections_of_a_removed_user_end_though_its_answers_are_delayed(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with server_with(bytes_out=MIB) as server, connect(address("bob")) as client:
        (connection,) = server.connections.connections
        usage = connection.context.log_in.usage
        assert usage is not None
        usage.pause_after_writing(30 * MIB, trio.current_time())
        await client.set("k", "v")
        await trio.sleep(1)
        await server.users.apply_change(lambda users: users.without_user("bob"))
        await trio.sleep(5)
        assert not server.connections.connections


async def test_a_client_whose_answers_are_delayed_does_not_lose_its_connection(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    """A client treats a server as dead if it sends nothing for 40 seconds."""
    async with server_with(bytes_out=MIB) as server, connect(address("bob")) as client:
        (connection,) = server.connections.connections
        usage_of_bob(server).pause_after_writing(60 * MIB, trio.current_time())
        # The answers after this one are delayed.
        await client.set("k", "v")
        began = trio.current_time()
        await client.set("k", "v")
        assert 50 < trio.current_time() - began < 61
        assert list(server.connections.connections) == [connection]


async def test_the_servers_own_pause_does_not_count_against_a_frame(
    autojump_clock: MockClock,
) -> None:
    frame = UnfinishedFrame(FrameBudget(), "address", lambda _reason: None)
    frame.set_held_bytes(1, trio.current_time(), is_new=True)
    await frame.pause(60)
    assert frame.lag_s(trio.current_time()) == 0
    await trio.sleep(1)
    assert frame.lag_s(trio.current_time()) == 1


@pytest.mark.parametrize("publishers", [1, 4])
async def test_a_user_who_writes_more_than_its_limit_waits_and_others_do_not(
    network: MemoryNetwork, autojump_clock: MockClock, publishers: int
) -> None:
    """The user may have several connections. Other users' requests are answered at once."""
    nbytes = 8 * MIB
    async with server_with(bytes_in=MIB), connect(address("eve")) as client:
        took: list[float] = []

        async def write() -> None:
            took.append(await publish("bob", nbytes // publishers))

        async with trio.open_nursery() as nursery:
            for _ in range(publishers):
                nursery.start_soon(write)
            for number in range(6):
                await trio.sleep(1)
                assert len(took) < publishers, "bob still writes"
                began = trio.current_time()
                await client.set(f"k{number}", "v")
                assert trio.current_time() - began < SOON_S
            assert await publish("eve", nbytes) < 1
        assert 7.5 < max(took) < 9.5


async def test_a_user_who_reads_more_than_its_limit_waits_and_others_do_not(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with server_with(bytes_out=MIB):
        await publish("eve", 8 * MIB)
        took: dict[str, float] = {}

        async def measure(user: str) -> None:
            took[user] = await read(user, end="now")

        async with trio.open_nursery() as nursery:
            for user in ("bob", "eve"):
                nursery.start_soon(measure, user)
        assert took["eve"] < 1
        assert 7 < took["bob"] < 9.5


async def test_a_change_of_limits_counts_at_once(
    network: MemoryNetwork, autojump_clock: MockClock
) -> None:
    async with server_with(connections=1) as server, connect(address("bob")):
        await server.users.apply_change(
            lambda users: users.with_limits("bob", Limits(connections=2))
        )
        async with connect(address("bob")):
            pass


def test_a_user_waits_for_bytes_over_its_limit_a_second() -> None:
    rate = ByteRate()
    assert rate.pause_s(10**12, 0, 0.0) == 0
    # A burst, and then the limit.
    assert rate.pause_s(int(BURST_S * MIB), MIB, 100.0) == 0
    assert rate.pause_s(MIB, MIB, 100.0) == 1
    assert rate.pause_s(MIB, MIB, 101.0) == 1
    assert rate.pause_s(0, MIB, 200.0) == 0
    # The pause is bounded.
    assert rate.pause_s(10**12, MIB, 200.0) == DEBT_MAX_S


def test_invalid_limits_are_refused() -> None:
    for limits, sentence in (
        (Limits(connections=-1), "a limit is 0 to"),
        (Limits(bytes_in=BYTES_A_SECOND_MIN - 1), "at least 1,048,576 a second"),
    ):
        with pytest.raises(UsersError, match=sentence):
            Users(1, {"bob": User("bob", None, RIGHTS)}).with_limits("bob", limits)
