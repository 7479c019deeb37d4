"""Links between nodes over real sockets: who gets one, and what ends one."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from tests.indexer.http_users import users_of_the_table
from tests.indexer.kit import a_server, an_indexer, ask
from tests.indexer.node_kit import until_ready
from tests.indexer.outcomes import upr_index
from tests.indexer.silent_listener import NoListener
from tests.kit.certificates import Certificates
from tests.kit.ports import free_ports
from tests.kit.process import POLL_S, eventually
from tests.server.tls_server import tls_server
from tests.server.users import VERIFIER, server_with_users
from upr_protocol.client import Address, Client, Credentials, IndexClient, Security, connect
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.users import Grant, Right, User, Users
from upr_server.indexer import api, http_access
from upr_server.indexer.app import serving
from upr_server.indexer.config import IndexerConfig
from upr_server.indexer.indexer import Indexer, running_indexer
from upr_server.indexer.membership import Membership
from upr_server.indexer.query import Query
from upr_server.indexer.remote_slice import RemoteSlice
from upr_server.indexer.slices import SliceId
from upr_server.indexer.web_socket import WebSocketRefusedError, open_web_socket
from upr_server.runtime import Certificates as DaemonCertificates
from upr_server.runtime import certificate_files

DESIGN = {"indexes": {"city": {"key": ["city", "n"], "include": ["n"]}}}


@asynccontextmanager
async def two_nodes(
    url: str, folder: Path, scheme: str = "http", **options: Any
) -> AsyncIterator[list[Indexer]]:
    """Two nodes, each slice at one of them."""
    nodes = [f"{scheme}://127.0.0.1:{port}" for port in free_ports(2)]
    async with AsyncExitStack() as stack:
        indexers = []
        for place, node in enumerate(nodes):
            config = IndexerConfig(
                bucket=url,
                data_dir=str(folder / str(place)),
                pool_bytes=16 * 1024 * 1024,
                nodes=",".join(nodes),
                listen=node.partition("://")[2],
                **options,
            )
            files = certificate_files(config)
            certificates = None if files is None else DaemonCertificates(files)
            indexer = await stack.enter_async_context(running_indexer(config.settings()))
            answers_at = await stack.enter_async_context(
                serving(indexer, config.listen, certificates)
            )
            assert answers_at == node
            indexers.append(indexer)
        yield indexers


async def query_of(membership: Membership) -> str:
    """With what a node of the same map and bucket links."""
    fingerprint = membership.node_map.fingerprint("b")
    return f"map={fingerprint}&bucket={await membership.histories.statement()}"


async def check_answers(client: Client, indexers: list[Indexer]) -> None:
    await client.set("_design/d", json.dumps(DESIGN))
    for n in range(200):
        await client.set(f"k{n:03}", json.dumps({"city": "abc"[n % 3], "n": n}))
    for indexer in indexers:
        await until_ready(indexer)
        query = Query(consistency="now", limit=1000, prefix=["b"])
        page = await ask(indexer, "d/city", query)
        assert [entry.included for entry in page.entries] == [[n] for n in range(1, 200, 3)]
        assert (await ask(indexer, "d/city", Query(count=True))).count == 200


async def test_nodes_in_the_clear(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        two_nodes(server.url("b"), tmp_path) as indexers,
    ):
        await check_answers(client, indexers)
        membership = indexers[0].membership
        assert membership is not None
        nodes = membership.node_map.nodes

        def all_keys() -> list[list[Any]]:
            with IndexClient(f"http://127.0.0.1:1,{nodes[1]}") as asking:
                entries = asking.stream("d/city", prefix=["b"], consistency="now", timestamps=True)
                keys = [entry.key for entry in entries]
                assert entries.end is not None
                assert entries.end.timestamps
                return keys

        keys = await trio.to_thread.run_sync(all_keys)
        assert keys == [["b", n] for n in range(1, 200, 3)]
        listed = await upr_index("list", "--indexer", nodes[1])
        assert listed.exit_code == 0, listed.output
        assert "2 of 2" in listed.output
        listed = await upr_index("nodes", "--indexer", nodes[1])
        assert listed.exit_code == 0, listed.output
        rows = [line.split() for line in listed.output.splitlines()]
        assert rows == [
            ["url", "answers", "slices", "behind"],
            [nodes[0], "yes", "0", "0"],
            [nodes[1], "yes", "1", "0"],
        ]


async def test_nodes_with_certificates(certificates: Certificates, tmp_path: Path) -> None:
    ca = str(certificates.authority.ca)
    options = {**certificates.server.settings(), "tls_ca": ca, "tls_client_ca": ca}
    async with tls_server(certificates) as server:
        address = Address.parse(server.url("b"), certificates.security())
        async with (
            connect(address) as client,
            two_nodes(server.url("b"), tmp_path, "https", ca=ca, **options) as indexers,
        ):
            await check_answers(client, indexers)


async def test_nodes_log_in(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("pencil\n")
    password_file.chmod(0o600)
    rights = tuple(Grant(right, "b") for right in (Right.READ, Right.WRITE, Right.INDEX))
    users = users_of_the_table().with_user(User("node", VERIFIER, rights))
    options = {"user": "node", "password_file": str(password_file)}
    async with server_with_users(users) as server:
        address = Address.parse(
            server.url("b"), Security(credentials=Credentials("node", "pencil"))
        )
        async with (
            connect(address) as client,
            two_nodes(server.url("b"), tmp_path / "data", **options) as indexers,
        ):
            await client.set("_design/?", "whatever nobody uses")
            await check_answers(client, indexers)
            # To see who may link changes nothing.
            assert await client.get("_design/?") is not None
            membership = indexers[0].membership
            assert membership is not None
            path = f"{membership.url}/v1/slices/0?{await query_of(membership)}"
            for user, message in (
                ("", "say who you are"),
                ("read-b", "needs the right index on bucket b"),
                ("index-b", "needs the right read on the whole bucket b"),
                ("index-other", "needs the right"),
            ):
                credentials = Credentials(user, "pencil") if user else None
                with pytest.raises(WebSocketRefusedError, match=message):
                    await open_web_socket(path, Security(credentials=credentials))


@pytest.mark.parametrize(
    "change",
    [
        lambda users: users.revoking("other", (Grant(Right.INDEX, "b"),)),
        lambda users: users.revoking("other", (Grant(Right.READ, "b"),)),
        lambda users: users.with_verifier("other", None),
        lambda users: users.without_user("other"),
    ],
    ids=["no index", "no read", "no password", "no user"],
)
async def test_a_link_ends_when_its_user_may_not_have_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Users], Users]
) -> None:
    monkeypatch.setattr(api, "NODE_VERDICT_S", 0.05)
    monkeypatch.setattr(http_access, "NODE_VERDICT_S", 0.0)
    monkeypatch.setattr(http_access, "VERDICT_S", 0.0)
    password_file = tmp_path / "password"
    password_file.write_text("pencil\n")
    password_file.chmod(0o600)
    rights = tuple(Grant(right, "b") for right in (Right.READ, Right.INDEX))
    users = users_of_the_table()
    for name in ("node", "other"):
        users = users.with_user(User(name, VERIFIER, rights))
    options = {"user": "node", "password_file": str(password_file)}
    async with (
        server_with_users(users) as server,
        two_nodes(server.url("b"), tmp_path / "data", **options) as indexers,
    ):
        membership = indexers[0].membership
        assert membership is not None
        path = f"{membership.url}/v1/slices/0?{await query_of(membership)}"
        security = Security(credentials=Credentials("other", "pencil"))
        async with aclosing(await open_web_socket(path, security)) as stream:
            await server.users.apply_change(change)
            with trio.fail_after(20):
                while await stream.receive_some(2**20):
                    pass


async def test_a_node_says_which_slices_it_has_not(tmp_path: Path) -> None:
    async with a_server() as server, two_nodes(server.url("b"), tmp_path) as indexers:
        membership = indexers[0].membership
        assert membership is not None
        query = await query_of(membership)
        for path, message in (
            (f"1?{query}", "slice 1 of 2 is not at .*, but at http://127.0.0.1:"),
            (f"2?{query}", "there is no slice 2"),
            (f"0?{query.partition('&')[0]}", "say which bucket they follow, and not ''"),
            (f"0?{query}.1", None),
            (f"0?{query.rpartition('.')[0]}.1", "follows another bucket of the name b"),
            ("0?map=other", "another list of nodes"),
            ("0", "another list of nodes"),
        ):
            url = f"{membership.url}/v1/slices/{path}"
            if message is None:
                await (await open_web_socket(url, Security())).aclose()
                continue
            with pytest.raises(WebSocketRefusedError, match=message):
                await open_web_socket(url, Security())
        with pytest.raises(WebSocketRefusedError, match="HTTP 4"):
            await open_web_socket(f"{membership.url}/v1/nothing", Security())
    async with (
        a_server() as server,
        an_indexer(server.url("b"), tmp_path / "alone") as indexer,
        serving(indexer, "127.0.0.1:0") as url,
    ):
        with pytest.raises(WebSocketRefusedError, match="this indexer is alone"):
            await open_web_socket(f"{url}/v1/slices/0?map=x", Security())


async def test_links_are_limited(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        two_nodes(server.url("b"), tmp_path, links_max=8) as indexers,
    ):
        await check_answers(client, indexers)
        membership = indexers[0].membership
        assert membership is not None
        url = f"{membership.url}/v1/slices/0?{await query_of(membership)}"
        async with AsyncExitStack() as stack:
            # The other node has one already.
            for _ in range(3):
                await stack.enter_async_context(aclosing(await open_web_socket(url, Security())))
            with pytest.raises(
                WebSocketRefusedError, match=r"127\.0\.0\.1 has 4 links .* links_max, 8$"
            ):
                await open_web_socket(url, Security())
            assert (await asked_by_hand(membership, 0)).startswith(b"HTTP/1.1 429 ")
            for indexer in indexers:
                assert (await ask(indexer, "d/city", Query(count=True))).count == 200
        # Those that ended count no more.
        with trio.fail_after(20):
            while True:
                try:
                    await (await open_web_socket(url, Security())).aclose()
                    return
                except WebSocketRefusedError:
                    await trio.sleep(POLL_S)


async def asked_by_hand(membership: Membership, slice_index: int, headers: str = "") -> bytes:
    """What a node answers to whoever asks for a link, up to the end of an error."""
    host, _, port = membership.url.removeprefix("http://").partition(":")
    key = b64encode(bytes(16)).decode()
    request = (
        f"GET /v1/slices/{slice_index}?{await query_of(membership)} HTTP/1.1\r\n"
        f"Host: {host}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{headers}"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    )
    answer = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(request.encode())
        while not answer.endswith(b"}") and b" 101 " not in answer:
            answer += await stream.receive_some()
    return answer


async def test_a_page_in_a_browser_has_no_link(tmp_path: Path) -> None:
    async with a_server() as server, two_nodes(server.url("b"), tmp_path) as indexers:
        membership = indexers[0].membership
        assert membership is not None
        answer = await asked_by_hand(membership, 0, "Origin: http://page\r\n")
        assert answer.startswith(b"HTTP/1.1 403 ")


async def test_the_refusal_has_the_map(tmp_path: Path) -> None:
    async with a_server() as server, two_nodes(server.url("b"), tmp_path) as indexers:
        membership = indexers[0].membership
        assert membership is not None
        answer = await asked_by_hand(membership, 1)
        assert answer.startswith(b"HTTP/1.1 421 ")
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["error"]["code"] == "not_my_slice"
        assert body["map"] == {"nodes": list(membership.node_map.nodes), "slices": 2, "replicas": 0}


_DEEP = b"\x81\xa1z" + b"\x91" * 100_000 + b"\0"

NO_MESSAGES = pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\xc1",
        b"\0\0\0\2\x81\xa1",
        b"\0\0\0\1\0",
        b"\0\0\0\x08\x81\xa4type\xa1\xff",
        len(_DEEP).to_bytes(4, "big") + _DEEP,
    ],
    ids=["too long", "no message", "cut", "another type", "not UTF-8", "deep"],
)


@NO_MESSAGES
async def test_what_is_no_message_ends_the_link_and_nothing_else(
    tmp_path: Path, data: bytes
) -> None:
    async with a_server() as server, two_nodes(server.url("b"), tmp_path) as indexers:
        membership = indexers[0].membership
        assert membership is not None
        path = f"{membership.url}/v1/slices/0?{await query_of(membership)}"
        with structlog.testing.capture_logs() as logs:
            async with aclosing(await open_web_socket(path, Security())) as stream:
                await stream.send_all(data)
                while await stream.receive_some(100):
                    pass
        assert "a node sends what is no message" in [line["event"] for line in logs]
        assert (await indexers[0].statistics())["slices"]


@NO_MESSAGES
async def test_a_node_that_hears_no_message_opens_another_link(
    autojump_clock: trio.testing.MockClock, data: bytes
) -> None:
    opened = 0

    async def open_link() -> trio.abc.Stream:
        nonlocal opened
        opened += 1
        own_end, peer_end = trio.testing.memory_stream_pair()
        await peer_end.send_all(data)
        return own_end

    part = RemoteSlice(SliceId(0, 1), "http://n:1", open_link)
    with trio.move_on_after(10):
        await part.run(NoListener())
    assert opened > 3
    with pytest.raises(UprError, match="slice 0 of 1 does not run"):
        await part.ping()


async def test_a_port_that_speaks_something_else() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"SSH-2.0-x\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(BrokenError):
            await open_web_socket(f"http://127.0.0.1:{port}/v1/slices/0?map=x", Security())
        nursery.cancel_scope.cancel()


async def test_the_list_says_that_a_node_is_missing(tmp_path: Path) -> None:
    """Also while it is not known which indexes there are."""
    ports = free_ports(2)
    nodes = [f"http://127.0.0.1:{port}" for port in ports]
    async with a_server() as server:
        config = IndexerConfig(
            bucket=server.url("b"),
            data_dir=str(tmp_path),
            pool_bytes=16 * 1024 * 1024,
            nodes=",".join(nodes),
            listen=f"127.0.0.1:{ports[0]}",
        )
        async with (
            running_indexer(config.settings()) as indexer,
            serving(indexer, config.listen) as url,
        ):
            designs = indexer.designs
            await eventually(lambda: 0 in designs._reports, "the node's own slice has said it")
            listed = await upr_index("list", "--indexer", url)
            assert listed.exit_code == 0, listed.output
            assert listed.stderr == (
                f"upr: the indexer is starting: slice 1 of 2, at {nodes[1]}, has yet to say which "
                "indexes there are; ask again in a second\n"
            )
            listed = await upr_index("nodes", "--indexer", url)
            assert [line.split()[1] for line in listed.stdout.splitlines()] == [
                "answers",
                "yes",
                "no",
            ]


def test_no_connection_takes_the_port_of_a_node_by_chance() -> None:
    """Neither of a pair that is given later, nor of a socket that takes any port."""
    ports = [port for _ in range(10) for port in free_ports(2)]
    assert len(set(ports)) == 20
    assert max(ports) < 30_000
