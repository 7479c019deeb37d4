"""Flipped bits in the files of real servers: what is refused, what is served, and how a replica
mends it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import pytest

from tests.kit.mirror import Mirror, assert_same, server_contents
from tests.kit.process import UPR, UPR_SERVER, ServerProcess, run, server_process
from tests.storage.record_damage import flip, records
from upr_protocol.client import (
    Client,
    Consumer,
    PublishError,
    RefusedKeysError,
    connect,
    consume,
    publisher,
)
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, PartitionId, PartitionState
from upr_server.storage.records import BUCKET as BUCKET_RECORD
from upr_server.storage.records import CHUNK, LEASE, PARTITION, TOKEN, partition_key

BUCKET: Final = "planes"
PARTITIONS: Final = 4
DAMAGED: Final = PartitionId(2)
LOGGED: Final = ("damaged record; the rest is served; run upr-server check", "damaged record")
DAMAGED_BUCKET: Final = "damaged bucket; the others are served; run upr-server check"
STREAM_LOGGED: Final = (*LOGGED, "backfill failed")
REFUSED_PARTITION: Final = "damaged partition; the others are served; run upr-server check"
LOST_LEASE: Final = "damaged lease; it is lost"


def some_items(prefix: str) -> dict[bytes, bytes]:
    names = [f"{prefix}-{index}" for index in range(400)]
    return {name.encode(): f"the value of {name}.".encode() for name in names}


FIRST, SECOND, THIRD = some_items("first"), some_items("second"), some_items("third")
"""Each in a chunk of its own in every partition. The second is damaged."""


def in_partition(items: Mapping[bytes, bytes], partition: int = DAMAGED) -> dict[bytes, bytes]:
    return {key: items[key] for key in items if partition_of(key, PARTITIONS) == partition}


async def write(server: ServerProcess, items: Mapping[bytes, bytes], bucket: str = BUCKET) -> None:
    async with publisher(server.url(bucket), durability=Durability.PERSISTED) as sink:
        for key, value in items.items():
            await sink.set(key, value)


def flip_a_bit(data: Path) -> None:
    """Flips one bit in a value of `SECOND`, in the damaged partition's log. The index goes, so that
    the server meets the damage when it builds another."""
    path = data / "buckets" / BUCKET / "log" / "data.mdb"
    value = next(iter(in_partition(SECOND).values()))
    content = bytearray(path.read_bytes())
    assert content.count(value) == 1
    content[content.index(value)] ^= 4
    path.write_bytes(content)
    (data / "buckets" / BUCKET / "index" / "data.mdb").unlink()


async def stream(server: ServerProcess, partitions: list[int]) -> dict[bytes, bytes]:
    """What a consumer receives until it has everything, or until the server can send no more."""
    mirror = Mirror()
    # Which error it is depends on whether it came within the time for retries.
    with suppress(UprError):
        async with consume(
            server.url(BUCKET), partitions=partitions, end="now", retry_timeout_s=1
        ) as consumer:
            async for event in consumer:
                mirror.apply(event)
    return mirror.contents


async def assert_new(client: Client, key: bytes) -> None:
    item = await client.get(key)
    assert item is not None
    assert item.value == b"new"


async def test_a_flipped_bit_costs_only_the_damaged_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with server_process(data_dir=data) as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        for items in FIRST, SECOND, THIRD:
            await write(server, items)
    flip_a_bit(data)
    all_items = {**FIRST, **SECOND, **THIRD}
    async with server_process(data_dir=data, errors=STREAM_LOGGED) as server:
        async with connect(server.url(BUCKET)) as client:
            intact = {
                key: value
                for key, value in all_items.items()
                if partition_of(key, PARTITIONS) != DAMAGED or key in THIRD
            }
            assert_same(await server_contents(client, intact), intact, PARTITIONS)
            for key in [*in_partition(FIRST), *in_partition(SECOND)]:
                with pytest.raises(ServerError, match="damaged") as refusal:
                    await client.get(key)
                assert refusal.value.status is Status.DAMAGED
            # One request names all of them, and the intact keys are answered.
            with pytest.raises(RefusedKeysError) as refused_keys:
                await client.get_many(list(all_items))
            assert refused_keys.value.statuses.keys() == all_items.keys() - intact.keys()
            items = {item.key: item.value for item in refused_keys.value.items if item is not None}
            assert_same(items, intact, PARTITIONS)
            figures = (await client.stats(BUCKET))["disk"]
            assert figures["damaged_partitions"] == [DAMAGED]
            assert "mismatch" in figures["damaged"]
            # Writes go on, and mend the keys that they change.
            key = next(iter(in_partition(SECOND)))
            result = await run(
                (*UPR, "get", server.url(BUCKET), key.decode(), next(iter(THIRD)).decode())
            )
            assert (result.code, result.out.count("\n")) == (1, 1)
            assert result.err.startswith(f"upr: {key.decode()}: data on disk is damaged")
            await client.set(key, b"new", durability=Durability.PERSISTED)
            await assert_new(client, key)
        other_partitions = [partition for partition in range(PARTITIONS) if partition != DAMAGED]
        expected = {key: all_items[key] for key in all_items if key not in in_partition(all_items)}
        assert await stream(server, other_partitions) == expected
        assert await stream(server, [DAMAGED]) == in_partition(FIRST)
        assert len(await server.logged(LOGGED[0])) == 1
    # A later start knows of it, though the index has passed it.
    async with (
        server_process(data_dir=data, errors=LOGGED) as server,
        connect(server.url(BUCKET)) as client,
    ):
        with pytest.raises(ServerError, match="damaged"):
            await client.get(next(iter(in_partition(FIRST))))
        await assert_new(client, key)
        figures = (await client.stats(BUCKET))["disk"]
        assert figures["damaged_partitions"] == [DAMAGED]


async def upr(*arguments: str) -> None:
    result = await run((*UPR, *arguments))
    assert result.code == 0, result


async def mend(data: Path) -> tuple[int, str]:
    result = await run((*UPR_SERVER, "mend", "--data-dir", str(data)))
    assert result.err == ""
    return result.code, result.out


async def test_a_replica_replaces_damaged_data(tmp_path: Path) -> None:
    first_data, second_data = tmp_path / "a", tmp_path / "b"
    all_items = {**FIRST, **SECOND, **THIRD}
    async with server_process("--node", "b", data_dir=second_data) as second:
        async with server_process("--node", "a", data_dir=first_data) as first:
            url, listen = first.url(BUCKET), f"127.0.0.1:{first.port}"
            async with connect(first.url()) as client:
                await client.create_bucket(BUCKET, PARTITIONS)
            for items in FIRST, SECOND, THIRD:
                await write(first, items)
            await upr("replicas", "add", url, f"b=127.0.0.1:{second.port}")
        flip_a_bit(first_data)
        assert await mend(first_data) == (
            1,
            f"bucket {BUCKET}, partition {DAMAGED}: not emptied, because this node is not its "
            "replica: " + (await damage_of(first_data)) + "; let a replica take it over with `upr "
            "takeover`, stop this node, and repeat the command\n",
        )
        started = server_process(
            "--node", "a", listen=listen, data_dir=first_data, errors=STREAM_LOGGED
        )
        async with started as first:
            await upr("takeover", url, "--all-of", "a", "--to", "b")
        emptied = f"bucket {BUCKET}, partition {DAMAGED}: emptied; the node copies it from the "
        assert await mend(first_data) == (0, emptied + "active node when it runs\n")
        assert await mend(first_data) == (0, f"{first_data} has no damaged chunks\n")
        async with server_process("--node", "a", listen=listen, data_dir=first_data) as first:
            await upr("takeover", url, "--all-of", "b", "--to", "a")
            async with connect(first.url(BUCKET), follow_map=False) as client:
                assert_same(await server_contents(client, all_items), all_items, PARTITIONS)
            assert await stream(first, list(range(PARTITIONS))) == all_items


async def test_another_node_replaces_a_bucket_that_cannot_be_opened(tmp_path: Path) -> None:
    """The bucket's own record is damaged. It is mended as operations.md says."""
    first_data, second_data = tmp_path / "a", tmp_path / "b"
    all_items = {**FIRST, **SECOND, **THIRD}
    async with server_process("--node", "b", data_dir=second_data) as second:
        async with server_process("--node", "a", data_dir=first_data) as first:
            url, listen = first.url(BUCKET), f"127.0.0.1:{first.port}"
            async with connect(first.url()) as client:
                await client.create_bucket(BUCKET, PARTITIONS)
            for items in FIRST, SECOND, THIRD:
                await write(first, items)
            await upr("replicas", "add", url, f"b=127.0.0.1:{second.port}")
        flip(first_data / "buckets" / BUCKET, BUCKET_RECORD, 100)
        started = server_process(
            "--node", "a", listen=listen, data_dir=first_data, errors=(DAMAGED_BUCKET,)
        )
        async with started as first:
            async with connect(first.url()) as client:
                assert list((await client.stats())["damaged_buckets"]) == [BUCKET]
            await upr("failover", second.url(BUCKET), "--all-of", "a")
            async with connect(second.url(BUCKET)) as client:
                assert_same(await server_contents(client, all_items), all_items, PARTITIONS)
            await upr("bucket", "delete", first.url(BUCKET), "--yes")
            await upr("replicas", "remove", second.url(BUCKET), "a")
            await upr("replicas", "add", second.url(BUCKET), f"a={listen}")
            await upr("takeover", second.url(BUCKET), "--all-of", "b", "--to", "a")
            async with connect(first.url(BUCKET), follow_map=False) as client:
                assert_same(await server_contents(client, all_items), all_items, PARTITIONS)


async def damage_of(data: Path) -> str:
    """What `upr-server check` says of the damaged chunk."""
    result = await run((*UPR_SERVER, "check", "--data-dir", str(data)))
    (line,) = [line for line in result.out.splitlines() if "mismatch" in line]
    return line.partition(": ")[2].partition(";")[0]


# Damaged records.


def flip_record(data: Path, kind: bytes, bit: int = 100) -> None:
    """Flips a bit in a record of the damaged partition."""
    bucket = data / "buckets" / BUCKET
    flip(bucket, next(iter(records(bucket, partition_key(kind, DAMAGED)))), bit)


def damaged_records(data: Path) -> list[dict[bytes, bytes]]:
    """What the log has of the damaged partition."""
    bucket = data / "buckets" / BUCKET
    return [records(bucket, partition_key(kind, DAMAGED)) for kind in (PARTITION, TOKEN, CHUNK)]


async def assert_refused(server: ServerProcess, client: Client) -> None:
    """Reads, writes and streams of the damaged partition are refused by name."""
    key = next(iter(in_partition(FIRST)))
    for refused_call in (
        lambda: client.get(key),
        lambda: client.set(key, b"new"),
        lambda: client.increment(key, 1),
        lambda: client.seqnos([DAMAGED]),
    ):
        with pytest.raises(ServerError, match=f"partition {DAMAGED}") as refusal:
            await refused_call()
        assert refusal.value.status is Status.DAMAGED
    other = next(name for name in FIRST if name not in in_partition(FIRST))
    with pytest.raises(PublishError, match=r"1 operations failed.*damaged"):
        await write(server, {key: b"new", other: FIRST[other]})
    for end in (None, "now"):
        with pytest.raises(ServerError, match=f"partition {DAMAGED}") as refusal:
            await consume_damaged(server, end)
        assert refusal.value.status is Status.DAMAGED


async def consume_damaged(server: ServerProcess, end: Literal["now"] | None) -> None:
    async with consume(server.url(BUCKET), partitions=[DAMAGED], end=end) as consumer:
        await read_all(consumer)


async def read_all(consumer: Consumer) -> None:
    async for _ in consumer:
        pass


@pytest.mark.parametrize("kind", [PARTITION, TOKEN])
async def test_a_damaged_record_refuses_its_partition_and_no_other(
    tmp_path: Path, kind: bytes
) -> None:
    data = tmp_path / "data"
    async with server_process(data_dir=data) as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        await write(server, FIRST)
        async with connect(server.url(BUCKET)) as client:
            histories = [numbers.history_id for numbers in await client.seqnos()]
    flip_record(data, kind)
    before = damaged_records(data)
    other_partitions = [partition for partition in range(PARTITIONS) if partition != DAMAGED]
    expected = {key: FIRST[key] for key in FIRST if key not in in_partition(FIRST)}
    for items in SECOND, THIRD:
        async with (
            server_process(data_dir=data, errors=[REFUSED_PARTITION]) as server,
            connect(server.url(BUCKET)) as client,
        ):
            (event,) = await server.logged(REFUSED_PARTITION)
            assert (event["bucket"], event["partition"]) == (BUCKET, DAMAGED)
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
            assert await stream(server, other_partitions) == expected
            await assert_refused(server, client)
            expected |= {key: items[key] for key in items if key not in in_partition(items)}
            await write(server, {key: expected[key] for key in expected if key in items})
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
            numbers = await client.seqnos(other_partitions)
            assert [row.history_id for row in numbers] == [
                histories[other] for other in other_partitions
            ]
            figures = (await client.stats(BUCKET))["disk"]
            assert figures["damaged_partitions"] == [DAMAGED]
            assert figures["damaged"] == event["damage"]
        # Its log is as it was, and the stop was a clean one for the others.
        assert damaged_records(data) == before
    checked = await run((*UPR_SERVER, "check", "--data-dir", str(data)))
    assert checked.code == 1
    assert checked.out.count("mismatch") == checked.out.count("\n") == 1, checked
    code, text = await mend(data)
    assert (code, text.count("\n")) == (1, 1)
    assert "not emptied, because this node is not its replica: checksum mismatch in record " in text
    assert "`upr failover`" in text
    assert damaged_records(data) == before


async def test_a_partition_that_is_damaged_while_the_server_runs_is_refused_and_no_other(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    expected = {
        key: value
        for items in (FIRST, SECOND)
        for key, value in items.items()
        if key not in in_partition(items)
    }
    errors = [REFUSED_PARTITION, "mutations in memory are lost"]
    async with server_process(data_dir=data, errors=errors) as server:
        async with connect(server.url()) as client:
            await client.create_bucket(BUCKET, PARTITIONS)
        await write(server, FIRST)
        flip_record(data, PARTITION)
        with pytest.raises(PublishError, match="damaged"):
            await write(server, SECOND)
        (event,) = await server.logged(REFUSED_PARTITION)
        assert (event["bucket"], event["partition"]) == (BUCKET, DAMAGED)
        # The publisher has given up.
        await write(server, {key: value for key, value in SECOND.items() if key in expected})
        async with connect(server.url(BUCKET)) as client:
            await assert_refused(server, client)
            other = next(key for key in FIRST if key in expected)
            await client.set(other, FIRST[other])
            assert_same(await server_contents(client, expected), expected, PARTITIONS)
    async with (
        server_process(data_dir=data, errors=[REFUSED_PARTITION]) as server,
        connect(server.url(BUCKET)) as client,
    ):
        await assert_refused(server, client)
        assert_same(await server_contents(client, expected), expected, PARTITIONS)


# Files that somebody overwrites while the server runs.


def overwrite_meta_pages(data: Path, part: str) -> None:
    with (data / "buckets" / BUCKET / part / "data.mdb").open("r+b") as file:
        file.write(b"\xaa" * 8192)


async def served(server: ServerProcess, bucket: str, items: Mapping[bytes, bytes]) -> None:
    async with connect(server.url(bucket)) as client:
        assert_same(await server_contents(client, items), items, PARTITIONS)


async def test_an_index_that_is_overwritten_while_the_server_runs_costs_nothing(
    tmp_path: Path,
) -> None:
    """The server says which file to delete, and serves all the other buckets."""
    data = tmp_path / "data"
    index = data / "buckets" / BUCKET / "index" / "data.mdb"
    async with server_process(data_dir=data, errors=LOGGED) as server:
        async with connect(server.url()) as client:
            for bucket in BUCKET, "other":
                await client.create_bucket(bucket, PARTITIONS)
        await write(server, FIRST)
        overwrite_meta_pages(data, "index")
        await write(server, SECOND)
        events = await server.logged(LOGGED[0], PARTITIONS)
        assert {event["bucket"] for event in events} == {BUCKET}
        advice = f"{index} is damaged: its meta pages are not what was written; stop the server, d"
        assert all(event["error"].startswith(advice) for event in events), events
        await write(server, THIRD)
        await write(server, FIRST, "other")
        await served(server, BUCKET, {**FIRST, **SECOND, **THIRD})
        await served(server, "other", FIRST)
        async with connect(server.url()) as client:
            figures = (await client.stats(BUCKET))["disk"]
            assert figures["damaged"].startswith(advice)
            assert (await client.stats("other"))["disk"]["damaged"] == ""
    async with server_process(data_dir=data, errors=[DAMAGED_BUCKET]) as server:
        await served(server, "other", FIRST)
        with pytest.raises(ServerError, match=f"{index} cannot .* delete this file") as refusal:
            await served(server, BUCKET, FIRST)
        assert refusal.value.status is Status.DAMAGED
    index.unlink()
    async with server_process(data_dir=data) as server:
        await served(server, BUCKET, {**FIRST, **SECOND, **THIRD})
        await served(server, "other", FIRST)


async def test_a_log_that_is_overwritten_while_the_server_runs_costs_its_bucket_alone(
    tmp_path: Path,
) -> None:
    """The server stops: the system may have written it, and nobody knows where. What the next start
    refuses is the damaged bucket."""
    data = tmp_path / "data"
    stopped = ("the server has to stop",)
    async with server_process(data_dir=data, errors=stopped) as server:
        async with connect(server.url()) as client:
            for bucket in BUCKET, "other":
                await client.create_bucket(bucket, PARTITIONS)
        await write(server, FIRST)
        await write(server, FIRST, "other")
        overwrite_meta_pages(data, "log")
        async with connect(server.url(BUCKET)) as client:
            with pytest.raises(UprError):
                await client.set(b"new", b"new", durability=Durability.PERSISTED)
        assert await server.wait() == 1
        log = data / "buckets" / BUCKET / "log" / "data.mdb"
        last_line = server.log_text.splitlines()[-1]
        assert last_line.startswith(f"upr-server: {log} is damaged: ")
        assert last_line.endswith(
            "start the server again: it refuses this bucket, and serves the others"
        )
    async with server_process(data_dir=data, errors=[DAMAGED_BUCKET]) as server:
        await served(server, "other", FIRST)


async def test_a_damaged_lease_is_lost_and_no_other(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with server_process(data_dir=data) as server, connect(server.url()) as client:
        await client.create_bucket(BUCKET, PARTITIONS)
        await write(server, FIRST)
        async with connect(server.url(BUCKET)) as in_bucket:
            for owner in ("one", "two"):
                await in_bucket.acquire_lease([(0, 0, 1)], time_to_live_s=600, owner=owner)
    bucket = data / "buckets" / BUCKET
    flip(bucket, next(iter(records(bucket, LEASE))), 77)
    async with (
        server_process(data_dir=data, errors=[LOST_LEASE]) as server,
        connect(server.url(BUCKET)) as client,
    ):
        assert len(await server.logged(LOST_LEASE)) == 1
        assert (await client.stats(BUCKET))["leases"]["held"] == 1
        assert_same(await server_contents(client, FIRST), FIRST, PARTITIONS)
    # It is gone: nothing is logged of it again.
    async with server_process(data_dir=data) as server, connect(server.url(BUCKET)) as client:
        assert (await client.stats(BUCKET))["leases"]["held"] == 1


async def test_a_replica_takes_over_a_refused_partition_and_fills_it_again(tmp_path: Path) -> None:
    first_data, second_data = tmp_path / "a", tmp_path / "b"
    all_items = {**FIRST, **SECOND}
    async with server_process("--node", "b", data_dir=second_data) as second:
        async with server_process("--node", "a", data_dir=first_data) as first:
            url, listen = first.url(BUCKET), f"127.0.0.1:{first.port}"
            async with connect(first.url()) as client:
                await client.create_bucket(BUCKET, PARTITIONS)
            await upr("replicas", "add", url, f"b=127.0.0.1:{second.port}")
            async with publisher(url, durability=Durability.REPLICATED, copies=1) as sink:
                for key, value in FIRST.items():
                    await sink.set(key, value)
        flip_record(first_data, PARTITION)
        started = server_process(
            "--node", "a", listen=listen, data_dir=first_data, errors=[REFUSED_PARTITION]
        )
        async with started as first:
            async with connect(first.url(BUCKET), follow_map=False) as client:
                await assert_refused_by_node(client)
            await upr("failover", url, str(DAMAGED), "--to", "b")
            await write(first, SECOND)
            async with connect(first.url(BUCKET)) as client:
                assert_same(await server_contents(client, all_items), all_items, PARTITIONS)
        emptied = f"bucket {BUCKET}, partition {DAMAGED}: emptied; the node copies it from the "
        assert await mend(first_data) == (0, emptied + "active node when it runs\n")
        assert await mend(first_data) == (0, f"{first_data} has no damaged chunks\n")
        async with server_process("--node", "a", listen=listen, data_dir=first_data) as first:
            await upr("takeover", url, str(DAMAGED), "--to", "a")
            async with connect(first.url(BUCKET), follow_map=False) as client:
                assert_same(await server_contents(client, all_items), all_items, PARTITIONS)
            assert await stream(first, list(range(PARTITIONS))) == all_items


async def test_a_replica_that_meets_a_damaged_record_refuses_its_partition_and_no_other(
    tmp_path: Path,
) -> None:
    first_data, second_data = tmp_path / "a", tmp_path / "b"
    all_items = {**FIRST, **SECOND}
    async with server_process("--node", "a", data_dir=first_data) as first:
        url, errors = first.url(BUCKET), [REFUSED_PARTITION]
        started = server_process("--node", "b", data_dir=second_data, errors=errors)
        async with started as second:
            listen = f"127.0.0.1:{second.port}"
            async with connect(first.url()) as client:
                await client.create_bucket(BUCKET, PARTITIONS)
            await upr("replicas", "add", url, f"b={listen}")
            level = Durability.REPLICATED_AND_PERSISTED
            async with publisher(url, durability=level, copies=1) as sink:
                for key, value in FIRST.items():
                    await sink.set(key, value)
            flip_record(second_data, PARTITION)
            async with consume(
                second.url(BUCKET),
                partitions=[DAMAGED],
                state=PartitionState.REPLICA,
                follow_map=False,
            ) as consumer:
                await write(first, SECOND)
                with pytest.raises(ServerError, match="damaged") as refusal:
                    await read_all(consumer)
            assert refusal.value.status is Status.DAMAGED
            (event,) = await second.logged(REFUSED_PARTITION)
            assert (event["bucket"], event["partition"]) == (BUCKET, DAMAGED)
            async with connect(second.url(BUCKET), follow_map=False) as client:
                await assert_refused_by_node(client)
                assert (await client.stats(BUCKET))["disk"]["damaged_partitions"] == [DAMAGED]
            # The others are replicated as before.
            others = {key: b"new" for key in all_items if key not in in_partition(all_items)}
            async with publisher(url, durability=level, copies=1) as sink:
                for key, value in others.items():
                    await sink.set(key, value)
            all_items |= others
            state = await run((*UPR, "partitions", url))
            assert "dead" in state.out, state
        emptied = f"bucket {BUCKET}, partition {DAMAGED}: emptied; the node copies it from the "
        assert await mend(second_data) == (0, emptied + "active node when it runs\n")
        async with server_process("--node", "b", listen=listen, data_dir=second_data) as second:
            await upr("takeover", url, "--all-of", "a", "--to", "b")
            async with connect(second.url(BUCKET), follow_map=False) as client:
                assert_same(await server_contents(client, all_items), all_items, PARTITIONS)


async def assert_refused_by_node(client: Client) -> None:
    with pytest.raises(ServerError, match=f"partition {DAMAGED}") as refusal:
        await client.get(next(iter(in_partition(FIRST))))
    assert refusal.value.status is Status.DAMAGED
