"""Every command of `upr`, while somebody listens: nothing secret is to be seen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import click
import pytest
import trio

from tests.indexer.processes import indexer_process
from tests.kit.certificates import Certificates
from tests.kit.effort import effort
from tests.kit.json_lines import JsonLines
from tests.kit.process import (
    ROOT,
    STOP_TIMEOUT_S,
    UPR,
    ServerProcess,
    environment,
    run,
    server_process,
)
from tests.kit.proxy import Proxy, proxy_to
from upr_protocol.cli import main
from upr_protocol.client import Address, Credentials, Security, TlsSettings, connect
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import new_verifier
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users
from upr_server.storage.offline.first_users import save_first_users

KEY, VALUE, BUCKET, DESIGN = "geheimschluessel", "geheimwert", "geheimbucket", "geheimdesign"
SECRETS: Final = (KEY, VALUE, BUCKET, DESIGN)
"""What must not be seen: keys, values and names."""

PASSWORD, NEW_PASSWORD = "geheimpasswort", "geheimeres"
"""What the server's protocol does not even show in the clear."""

ADMIN: Final = User(
    "ada",
    new_verifier(PASSWORD, b"sixteen bytes...", SCRAM_ITERATIONS_DEFAULT),
    tuple(Grant(right, EVERYTHING) for right in Right),
)
"""Who does everything, and is the user of the nodes and of the indexer, too."""

BASIC: Final = b64encode(f"{ADMIN.name}:{PASSWORD}".encode())
"""Name and password as HTTP has them."""

IN_ONE_PROCESS: Final = (
    "import json, sys; from upr_protocol.cli import main\n"
    "for arguments in json.loads(sys.argv[1]):\n"
    "    assert not main(arguments, standalone_mode=False), arguments"
)
"""Runs several commands."""


def names_of(command: click.Command, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command below a command."""
    if not isinstance(command, click.Group):
        yield prefix
        return
    for name, subcommand in command.commands.items():
        yield from names_of(subcommand, (*prefix, name))


COMMANDS: Final = frozenset(names_of(main))


class Commands:
    """Runs commands through relays that record, and notes which were run.

    Args:
        variables: Their environment.
        proxies: The relays.

    Attributes:
        proxies: See above. Others may be added.
        unheard: The commands that were not run yet.
    """

    def __init__(self, variables: Mapping[str, str], proxies: Sequence[Proxy]) -> None:
        self.proxies = list(proxies)
        for proxy in proxies:
            proxy.recorded = bytearray()
        self.unheard = set(COMMANDS)
        self._variables = dict(variables)

    async def run(self, *commands: tuple[str, ...]) -> str:
        """Runs commands in one process; gives what they write to standard output."""
        program = (sys.executable, "-c", IN_ONE_PROCESS, json.dumps(commands))
        connections = self._connections
        process_result = await run(program, variables=self._variables)
        assert process_result.code == 0, process_result
        # Whatever does not go through the relays proves nothing.
        assert self._connections >= connections + len(commands), commands
        for arguments in commands:
            self._note(arguments)
        return process_result.out

    @asynccontextmanager
    async def following(self, *arguments: str) -> AsyncIterator[JsonLines]:
        """Runs a command that does not end, until the context does."""
        process = await trio.lowlevel.open_process(
            (*UPR, *arguments),
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(**self._variables),
        )
        try:
            yield JsonLines(process, " ".join(arguments), STOP_TIMEOUT_S)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 128 + signal.SIGINT
            self._note(arguments)
        finally:
            process.kill()

    @property
    def _connections(self) -> int:
        return sum(proxy.connections for proxy in self.proxies)

    def _note(self, arguments: tuple[str, ...]) -> None:
        self.unheard -= {name for name in COMMANDS if arguments[: len(name)] == name}


@attrs.frozen
class Scene:
    """Two nodes, with a relay before each.

    Attributes:
        commands: Runs commands.
        folder: For files.
        far: The second node, b.
        url: Where the first node, a, is reached.
        second_node: The second node, as `upr replicas add` names it.
        security: How a client connects.
        indexer_options: Those of an indexer of this bucket.
    """

    commands: Commands
    folder: Path
    far: ServerProcess
    url: str
    second_node: str
    security: Security
    indexer_options: tuple[str, ...]

    @property
    def bucket(self) -> str:
        """The URL of the bucket that everything is about."""
        return f"{self.url}{BUCKET}"


async def change_keys(scene: Scene) -> None:
    rows = scene.folder / "rows.csv"
    rows.write_text("id,text\n" + "".join(f"{KEY}{n},{VALUE}{n}\n" for n in range(2000)))
    bucket, number = scene.bucket, f"{KEY}-number"
    answers = await scene.commands.run(
        ("bucket", "create", bucket, "--partitions", "4"),
        ("load", bucket, str(rows), "--key", "id"),
        ("set", bucket, KEY, VALUE),
        ("append", bucket, KEY, VALUE),
        ("prepend", bucket, KEY, VALUE),
        ("get", bucket, KEY),
        ("increment", bucket, number),
        ("decrement", bucket, number),
        ("touch", bucket, number, "--expire-in", "3600"),
        ("delete", bucket, f"{KEY}1"),
        ("add", bucket, f"{KEY}1", VALUE),
        ("replace", bucket, f"{KEY}1", VALUE),
    )
    assert VALUE * 3 in answers


async def follow_changes(scene: Scene) -> None:
    address = Address.parse(scene.bucket, scene.security)
    async with connect(address) as client:
        lease = await client.acquire_lease([(0, 0, 0)], time_to_live_s=60, owner="test")
    bucket, state = scene.bucket, str(scene.folder / "state")
    caught_up = ("--until", "caught-up")
    answers = await scene.commands.run(
        ("tail", bucket, *caught_up, "--resume", state),
        ("tail", bucket, *caught_up, "--state", str(scene.folder / "copy")),
        ("explain", bucket, state),
        ("leases", "list", bucket),
        ("leases", "release", bucket, f"{lease.lease_id:016x}"),
        ("partitions", bucket),
        ("stats", bucket),
        ("bucket", "list", scene.url),
    )
    assert VALUE in answers


async def follow_events(scene: Scene) -> None:
    async with scene.commands.following("events", scene.bucket, "--json") as lines:
        assert await lines.next() == {"event": "everything"}
        await scene.commands.run(("set", scene.bucket, f"_design/{DESIGN}", "{}"))
        while DESIGN not in str(await lines.next()):
            pass


@asynccontextmanager
async def indexer_at(bucket: str, data_dir: Path, *options: str) -> AsyncIterator[str]:
    """The URL of an indexer, which reaches its server by a relay of this process."""
    process = indexer_process(bucket, data_dir, *options)
    indexer = await trio.to_thread.run_sync(process.__enter__)
    try:
        yield indexer.url
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.__exit__, None, None, None)


async def scan_indexes(scene: Scene) -> None:
    async with (
        indexer_at(scene.bucket, scene.folder / "indexes", *scene.indexer_options) as address,
        proxy_to("127.0.0.1", int(address.rpartition(":")[2])) as proxy,
    ):
        proxy.recorded = bytearray()
        scene.commands.proxies.append(proxy)
        indexer = ("--indexer", f"{address.rpartition(':')[0]}:{proxy.port}")
        name = f"{DESIGN}/by_city"
        await scene.commands.run(
            ("set", scene.bucket, f"{KEY}-document", json.dumps({"city": VALUE})),
            ("index", "create", DESIGN, "--index", "by_city=city", *indexer),
        )
        status = ("index", "status", name, *indexer)
        while json.loads(await scene.commands.run(status))["state"] != "ready":
            pass
        entries = await scene.commands.run(
            ("index", "list", *indexer),
            ("index", "nodes", *indexer),
            ("index", "scan", name, "--prefix", VALUE, *indexer),
            ("index", "drop", DESIGN, *indexer),
        )
        assert f"{KEY}-document" in entries


async def change_users(scene: Scene) -> None:
    password, url = scene.folder / "new", scene.url
    password.write_text(NEW_PASSWORD)
    password.chmod(0o600)
    new_password = ("--new-password-file", str(password))
    some_keys = ("read,write", BUCKET, "--prefix", KEY)
    answers = await scene.commands.run(
        ("user", "add", url, "eve", *new_password),
        ("user", "password", url, "eve", *new_password),
        ("user", "grant", url, "eve", *some_keys),
        ("user", "limit", url, "eve", "--streams", "5"),
        ("role", "add", url, "editors"),
        ("role", "grant", url, "editors", *some_keys),
        ("user", "assign", url, "eve", "editors"),
        ("user", "list", url),
        ("role", "list", url),
        ("user", "withdraw", url, "eve", "editors"),
        ("role", "revoke", url, "editors", *some_keys),
        ("role", "remove", url, "editors"),
        ("user", "revoke", url, "eve", *some_keys),
        ("user", "remove", url, "eve"),
    )
    assert "editors" in answers


async def move_partitions(scene: Scene) -> None:
    bucket = scene.bucket
    answers = await scene.commands.run(
        ("replicas", "add", bucket, scene.second_node),
        ("takeover", bucket, "--all-of", "a", "--to", "b"),
        ("get", bucket, KEY),
    )
    assert VALUE in answers
    scene.far.kill()
    await scene.far.wait()
    answers = await scene.commands.run(
        ("failover", bucket, "--all-of", "b", "--to", "a"),
        ("get", bucket, KEY),
        ("replicas", "remove", bucket, "b"),
        ("bucket", "delete", bucket, "--yes"),
    )
    assert VALUE in answers


@asynccontextmanager
async def a_scene(
    folder: Path, certificates: Certificates, *, is_encrypted: bool
) -> AsyncIterator[Scene]:
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    password_file.chmod(0o600)
    variables = {"UPR_USER": ADMIN.name, "UPR_PASSWORD": PASSWORD}
    node: tuple[str, ...] = ("--node-user", ADMIN.name, "--node-password-file", str(password_file))
    indexer: tuple[str, ...] = ("--user", ADMIN.name, "--password-file", str(password_file))
    scheme, tls = "upr", None
    if is_encrypted:
        shown = (
            *("--tls-certificate", str(certificates.server.cert)),
            *("--tls-key", str(certificates.server.key)),
        )
        ca = str(certificates.authority.ca)
        # Each node is the other's client, and must show its certificate to it.
        node += (*shown, "--tls-ca", ca)
        indexer += (*shown, "--ca", ca)
        variables["UPR_CA"] = ca
        scheme, tls = "uprs", TlsSettings(ca)
    for name in "ab":
        save_first_users(folder / name, Users(1, {ADMIN.name: ADMIN}, b"secret"))
    async with (
        server_process("--node", "a", *node, data_dir=folder / "a") as near,
        server_process("--node", "b", *node, data_dir=folder / "b") as far,
        proxy_to("127.0.0.1", near.port) as near_proxy,
        proxy_to("127.0.0.1", far.port) as far_proxy,
    ):
        yield Scene(
            Commands(variables, (near_proxy, far_proxy)),
            folder,
            far,
            f"{scheme}://127.0.0.1:{near_proxy.port}/",
            f"b=127.0.0.1:{far_proxy.port}",
            Security(tls, Credentials(ADMIN.name, PASSWORD)),
            indexer,
        )


def check_recorded(recorded: bytes, texts: Sequence[bytes], *, is_seen: bool) -> None:
    for text in texts:
        assert (text in recorded) is is_seen, text


@pytest.mark.parametrize("is_encrypted", effort([True], [True, False]))
async def test_a_recorded_connection_shows_no_secret_if_it_is_encrypted(
    certificates: Certificates, tmp_path: Path, is_encrypted: bool
) -> None:
    """A command that is not run here fails the test."""
    async with a_scene(tmp_path, certificates, is_encrypted=is_encrypted) as scene:
        for part in (
            *(change_keys, follow_changes, follow_events, scan_indexes),
            *(change_users, move_partitions),
        ):
            await part(scene)
    assert not scene.commands.unheard
    streams = [bytes(proxy.recorded or b"") for proxy in scene.commands.proxies]
    assert all(len(recorded) > 1_000 for recorded in streams)
    recorded = b"\n".join(streams)
    # In the clear all of it is there: so this test would see it.
    secrets = [*(secret.encode() for secret in SECRETS), BASIC]
    check_recorded(recorded, secrets, is_seen=not is_encrypted)
    passwords = [PASSWORD.encode(), NEW_PASSWORD.encode()]
    check_recorded(recorded, [*passwords, *map(b64encode, passwords)], is_seen=False)
