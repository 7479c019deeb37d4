"""An indexer that logs in to its server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.indexer.kit import define, name_of, scan, until, until_ready
from tests.indexer.outcomes import status_of
from tests.kit.process import eventually
from tests.server.users import BOB, USERS, VERIFIER, address_of, server_with_users
from upr_protocol.client import Credentials, IndexerError, Security, connect
from upr_protocol.users import Grant, Limits, Right, User
from upr_server.indexer import stream as stream_module
from upr_server.indexer.app import serving
from upr_server.indexer.config import IndexerConfig, load_config
from upr_server.indexer.indexer import running_indexer
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.runtime import ConfigError


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("pencil\n")
    path.chmod(0o600)
    return path


def config_of_reader(bucket: str, tmp_path: Path, password_file: Path) -> IndexerConfig:
    return IndexerConfig(
        bucket=bucket,
        user="reader",
        password_file=str(password_file),
        data_dir=str(tmp_path / "indexes"),
        pool_bytes=8 * 1024 * 1024,
    )


async def test_a_user_who_may_read_is_enough(tmp_path: Path, password_file: Path) -> None:
    reader = User("reader", VERIFIER, (Grant(Right.READ, "b"),))
    async with server_with_users() as server:
        await server.users.apply_change(lambda _: USERS.with_user(reader))
        async with connect(address_of(server, BOB)) as client:
            await client.set("k", "{}")
        config = config_of_reader(server.url("b"), tmp_path, password_file)
        async with (
            running_indexer(config.settings()) as indexer,
            serving(indexer, "127.0.0.1:0", None) as url,
        ):
            await eventually(
                lambda: any(
                    row.context.access.user_name == "reader" and row.session.streams
                    for row in server.connections.connections
                ),
                "the indexer has logged in, and receives its streams",
            )
            # Users of the indexer log in as those of the server do.
            with pytest.raises(IndexerError) as refusal:
                await status_of(url)
            assert refusal.value.code == "log_in_needed"
            assert await status_of(url, Security(credentials=Credentials("reader", "pencil")))


async def test_above_a_limit_of_streams_a_new_index_waits_and_the_others_go_on(
    tmp_path: Path, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is enough for the running indexes, and not for a new one beside them."""
    monkeypatch.setattr(stream_module, "LIMIT_RETRY_S", 0.05)
    by_n = {"by_n": IndexDefinition(("n",))}
    async with server_with_users() as server, connect(address_of(server, BOB)) as client:
        limits = Limits(streams=client.partition_count)
        reader = User("reader", VERIFIER, (Grant(Right.READ, "b"),), limits)
        await server.users.apply_change(lambda _: USERS.with_user(reader))
        await client.set("k", '{"n":1}')
        config = config_of_reader(server.url("b"), tmp_path, password_file)
        async with running_indexer(config.settings()) as indexer:
            (part,) = indexer.slices
            await eventually(
                lambda: part.stream.is_connected, "the running indexes' stream is there"
            )
            await define(client, "d", by_n)
            await eventually(lambda: part.definitions.building_count == 1, "the new index is begun")

            async def says_why() -> bool:
                status = await indexer.scanner.status(name_of("d/by_n"))
                return status.state == "building" and "may have 4" in status.failure

            await until(says_why)
            await client.set("k", '{"n":2}')
            await part.barriers.wait_until_applied()
            await server.users.apply_change(lambda users: users.with_limits("reader", Limits()))
            await until_ready(indexer, "d/by_n")
            assert await scan(indexer, "d/by_n") == [([2], "k")]
            assert not (await indexer.scanner.status(name_of("d/by_n"))).failure


def test_settings_that_do_not_fit(password_file: Path) -> None:
    base = {"bucket": "upr://h/b"}
    for settings, sentence in (
        ({"user": "bob"}, "user and password_file go together"),
        ({"password_file": str(password_file)}, "user and password_file go together"),
        ({"user": "bob", "password_file": "/nowhere"}, "/nowhere, cannot be read"),
        ({"user": "bob", "password_file": "/dev/null"}, "is read at each connection, and /dev/nul"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load_config(None, {}, {**base, **settings})
    config = load_config(None, {}, {**base, "user": "bob", "password_file": str(password_file)})
    credentials = config.address().security.credentials
    assert credentials is not None
    assert credentials.password_file == str(password_file)
