"""Log-ins with a password or a certificate, and what clients learn without a log-in."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.kit.audit_notes import AuditNotes
from tests.kit.certificates import Authority, Certificate, Certificates
from tests.kit.peer import Peer, sets
from tests.kit.proxy import proxy_to
from tests.protocol.session.kit import encoded, frames, hello
from tests.server.users import BOB, RIGHTS, USERS, VERIFIER, address_of, server_with_users
from upr_protocol.chunk import Bundle
from upr_protocol.client import Address, BlockingClient, connect, consume, publisher
from upr_protocol.errors import RemoteProtocolError, ServerError, Status, UprError
from upr_protocol.hashing import partition_of
from upr_protocol.scram import EXTERNAL, SCRAM, SCRAM_PLUS, ScramClient, new_verifier
from upr_protocol.security import Credentials, Security, TlsSettings
from upr_protocol.transport import TlsStream, encrypted_to_server
from upr_protocol.users import (
    BYTES_A_SECOND_MIN,
    Limits,
    User,
    Users,
    UsersError,
)
from upr_protocol.wire import (
    ContinueLogIn,
    CreateBucket,
    Error,
    ListBuckets,
    ListBucketsReply,
    LoggedIn,
    LogInChallenge,
    Mutate,
    MutateReply,
    Noop,
    Open,
    StartLogIn,
    Stats,
)
from upr_server.app import Server
from upr_server.net.frame_budget import FRAME_TIMEOUT_S
from upr_server.runtime import FAILURE_DELAY_S, FAILURES_MAX, FailedLogIns, network_of
from upr_server.runtime.failed_log_ins import HOSTS_MAX


def user_names(server: Server) -> list[str | None]:
    return [connection.context.access.user_name for connection in server.connections.connections]


# Log-ins that succeed.


async def test_all_kinds_of_clients_log_in() -> None:
    async with server_with_users() as server:
        address = address_of(server)
        async with connect(address) as client:
            await client.set("k", "v")
            assert user_names(server) == ["bob"]
            statistics = await client.stats()
            assert [row["user"] for row in statistics["connections"]] == ["bob"]
        async with publisher(address) as sink:
            await sink.set("k2", "v")
        async with consume(address, end="now") as consumer:
            async for _ in consumer:
                pass

        def block() -> None:
            with BlockingClient(address) as client:
                item = client.get("k")
                assert item is not None
                assert item.value == b"v"

        await trio.to_thread.run_sync(block)


async def test_without_users_nobody_needs_to_log_in() -> None:
    async with (
        server_with_users(Users()) as server,
        connect(address_of(server, credentials=None)) as client,
    ):
        await client.set("k", "v")
        assert user_names(server) == [None]


async def test_a_user_logs_in_with_a_certificate_or_with_a_password_bound_to_the_connection(
    certificates: Certificates,
) -> None:
    settings: dict[str, Any] = {"tls_client_ca": str(certificates.authority.ca)}
    async with server_with_users(**certificates.server_settings(), **settings) as server:
        for credentials, mechanism in ((None, EXTERNAL), (BOB, SCRAM_PLUS)):
            tls = certificates.security_of(certificates.client).tls
            address = Address.parse(server.url("b"), Security(tls, credentials))
            async with connect(address) as client:
                await client.set("k", "v")
                (connection,) = server.connections.connections
                assert connection.session.agreed.mechanisms == (EXTERNAL, SCRAM_PLUS, SCRAM)
                assert connection.context.access.user_name == (
                    "alice" if mechanism == EXTERNAL else "bob"
                )

            def block(address: Address) -> None:
                with BlockingClient(address) as client:
                    assert client.get("k") is not None

            await trio.to_thread.run_sync(block, address)


async def test_a_recorded_log_in_does_not_contain_the_password() -> None:
    async with server_with_users() as server, proxy_to("127.0.0.1", server.port) as proxy:
        proxy.recorded = bytearray()
        address = Address.parse(proxy.url("b"), Security(credentials=BOB))
        async with connect(address) as client:
            await client.set("k", "v")
        # The name is in the recording, so the test would find a password, too.
        assert b"n=bob," in proxy.recorded
        for secret in (b"pencil", VERIFIER.stored_key, VERIFIER.server_key):
            assert secret not in proxy.recorded
            assert b64encode(secret) not in proxy.recorded


async def test_clients_refuse_a_server_that_binds_passwords_if_its_certificate_gives_no_binding(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr_protocol.transport.tls_link.channel_binding", lambda _: b"")
    async with server_with_users(**certificates.server_settings()) as server:
        tls = certificates.security_of(certificates.client).tls
        for _, message in await both_refused(Address.parse(server.url("b"), Security(tls, BOB))):
            assert "somebody in between may have removed it" in message


async def test_a_password_is_bound_to_the_certificate_with_which_the_connection_began(
    certificates: Certificates, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first_certificate, renewed = authority.sign("shown"), authority.sign("renewed")
    security = Security(TlsSettings(ca=str(authority.ca)), BOB)
    async with server_with_users(**first_certificate.settings()) as server:
        address = Address.parse(server.url("b"), security)
        assert server.certificates is not None
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        early = await encrypted_to_server(stream, TlsSettings(ca=str(authority.ca)), "127.0.0.1")
        first_certificate.replace_by(renewed)
        server.certificates.reload()
        async with connect(address) as client:
            await client.set("k", "v")
        (connection, *_) = server.connections.connections
        assert isinstance(connection._stream, TlsStream)
        assert early.link.channel_binding == connection._stream.link.channel_binding
        await trio.aclose_forcefully(early)


# Log-ins that fail.


async def both_refused(address: Address) -> list[tuple[type[UprError], str]]:
    """The errors of both kinds of clients."""

    def block() -> UprError:
        with pytest.raises(UprError) as caught, BlockingClient(address):
            pass
        return caught.value

    with pytest.raises(UprError) as caught:
        async with connect(address):
            pass
    errors = [caught.value, await trio.to_thread.run_sync(block)]
    return [(type(error), str(error)) for error in errors]


@pytest.mark.parametrize(
    ("credentials", "kind", "sentence"),
    [
        (None, ServerError, "the server wants its clients to log in: name a user with --user"),
        (Credentials("bob", "pen"), ServerError, "the user's name or the password is wrong: check"),
        (Credentials("eve", "pen"), ServerError, "the user's name or the password is wrong: check"),
        (Credentials("alice", "x"), ServerError, "the user's name or the password is wrong: check"),
        (Credentials("", "x"), UsersError, "the user's name is empty"),
        (Credentials("bob", "a\nb"), UsersError, "the password has a control character"),
    ],
)
async def test_wrong_credentials_are_refused(
    credentials: Credentials | None, kind: type[UprError], sentence: str
) -> None:
    async with server_with_users() as server:
        for error_kind, message in await both_refused(address_of(server, credentials)):
            assert error_kind is kind
            assert message.startswith(sentence)
        assert user_names(server) in ([], [None], [None, None])


async def test_a_publisher_and_a_consumer_do_not_retry_after_a_failed_log_in() -> None:
    async with server_with_users() as server:
        address = address_of(server, Credentials("bob", "pen"))
        with pytest.raises(ServerError) as caught:
            async with publisher(address) as sink:
                await sink.set("k", "v")
        assert caught.value.status is Status.LOG_IN_FAILED
        with pytest.raises(ServerError) as caught:
            async with consume(address):
                await trio.sleep_forever()
        assert caught.value.status is Status.LOG_IN_FAILED
        assert server.connections.resources.log_ins.failures.failure_count == 2


async def test_a_certificate_does_not_log_in_as_another_user(certificates: Certificates) -> None:
    """In SASL the data of EXTERNAL may name another user. Here it must be empty."""
    settings: dict[str, Any] = {"tls_client_ca": str(certificates.authority.ca)}
    async with server_with_users(**certificates.server_settings(), **settings) as server:
        tls = certificates.security_of(certificates.client).tls
        assert tls is not None
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        async with await encrypted_to_server(stream, tls, "127.0.0.1") as encrypted:
            request = encoded(hello(idle_interval_s=20), StartLogIn(EXTERNAL, b"bob"))
            await encrypted.send_all(request)
            answer = b""
            while data := await encrypted.receive_some():
                answer += data
        error = frames(answer)[-1]
        assert isinstance(error, Error)
        assert (error.status, error.sentence) == (
            Status.MALFORMED,
            "StartLogIn: EXTERNAL has no data",
        )


async def test_a_certificate_that_names_no_user_is_refused(certificates: Certificates) -> None:
    settings: dict[str, Any] = {"tls_client_ca": str(certificates.authority.ca)}
    async with server_with_users(**certificates.server_settings(), **settings) as server:
        address = Address.parse(server.url("b"), certificates.security_of(certificates.server))
        with pytest.raises(ServerError, match=r"no user has the name in .* 'localhost'"):
            async with connect(address):
                pass


async def test_clients_refuse_a_server_that_does_not_know_the_password() -> None:
    """Such a server accepts every password, to receive what clients write."""
    pretended = msgspec.structs.replace(VERIFIER, server_key=bytes(32))
    async with server_with_users(Users(1, {"bob": User("bob", pretended)})) as server:
        for kind, message in await both_refused(address_of(server)):
            assert kind is RemoteProtocolError
            assert "the server does not prove that it knows this user" in message


async def test_clients_with_credentials_refuse_a_server_that_needs_no_log_in() -> None:
    """Otherwise a false server could leave out the log-in, in which it cannot prove itself."""
    async with server_with_users(Users()) as server:
        for kind, message in await both_refused(address_of(server)):
            assert kind is ServerError
            assert message.startswith("the server does not ask for a log-in, so it proves nothing")


# What a client learns before its log-in.

Step = Callable[[Peer], Any]


@asynccontextmanager
async def logged_out_peer(server: Server) -> AsyncIterator[Peer]:
    """A peer that has sent `Hello` and has not logged in."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    async with stream:
        peer = Peer(stream)
        reply = await peer.greet()
        assert reply.mechanisms == (SCRAM,)
        yield peer


async def challenged(peer: Peer, name: str, password: str = "x") -> tuple[ScramClient, bytes]:
    client = ScramClient(name, password, "nonce")
    await peer.send(StartLogIn(SCRAM, client.client_first()))
    return client, (await peer.expect(LogInChallenge)).data


@pytest.mark.parametrize(
    "message",
    [Open("b"), ListBuckets(), Stats(), CreateBucket("c"), Noop(), ContinueLogIn(b""), LoggedIn()],
)
async def test_requests_before_the_log_in_are_refused(message: Any) -> None:
    async with server_with_users() as server:
        async with logged_out_peer(server) as peer:
            await peer.send(message)
            await peer.expect_error(Status.OUT_OF_TURN)
        async with logged_out_peer(server) as peer:
            await challenged(peer, "bob")
            await peer.send(message)
            expected = Status.MALFORMED if isinstance(message, ContinueLogIn) else None
            await peer.expect_error(expected or Status.OUT_OF_TURN)


async def test_a_failed_log_in_does_not_tell_whether_the_user_exists() -> None:
    async with server_with_users() as server:
        answers: dict[str, tuple[dict[str, int], str]] = {}
        salts: dict[str, set[bytes]] = {"bob": set(), "alice": set(), "eve": set()}
        for name in ("bob", "alice", "eve") * 2:
            async with logged_out_peer(server) as peer:
                client, challenge = await challenged(peer, name)
                parts = dict(part.split(b"=", 1) for part in challenge.split(b","))
                salts[name].add(parts[b"s"])
                await peer.send(ContinueLogIn(client.client_final(challenge)))
                error = await peer.expect_error(Status.LOG_IN_FAILED)
                lengths = {key.decode(): len(value) for key, value in parts.items()}
                lengths["iterations"] = int(parts[b"i"])
                answers[name] = lengths, error.sentence
        assert answers["bob"] == answers["alice"] == answers["eve"]
        # A name has the same salt each time, and each name has another one.
        assert all(len(user_salts) == 1 for user_salts in salts.values())
        assert len(set.union(*salts.values())) == 3


async def test_all_nodes_send_the_same_salt_for_a_user_who_does_not_exist() -> None:
    """Otherwise a client that asks two nodes could tell which users exist."""

    async def salt_of(server: Server) -> bytes:
        async with logged_out_peer(server) as peer:
            _, challenge = await challenged(peer, "eve")
            return challenge.split(b",")[1]

    users = msgspec.structs.replace(USERS, secret=b"the cluster's")
    async with server_with_users(users) as first_server, server_with_users(users) as second_server:
        assert await salt_of(first_server) == await salt_of(second_server)


@pytest.mark.parametrize(
    ("mechanism", "data", "status"),
    [
        ("PLAIN", b"\0bob\0pencil", Status.LOG_IN_FAILED),
        (EXTERNAL, b"", Status.LOG_IN_FAILED),
        (SCRAM_PLUS, b"p=tls-server-end-point,,n=bob,r=n", Status.LOG_IN_FAILED),
        (SCRAM, b"", Status.MALFORMED),
        (SCRAM, b"n,,n=bob\x00,r=n", Status.MALFORMED),
    ],
)
async def test_a_wrong_first_message_of_a_log_in_is_refused(
    mechanism: str, data: bytes, status: Status
) -> None:
    async with server_with_users() as server, logged_out_peer(server) as peer:
        await peer.send(StartLogIn(mechanism, data))
        await peer.expect_error(status)


@pytest.mark.parametrize(
    "users",
    [
        {"x": User("x")},
        {"bob": User("bob", new_verifier("crayon", b"sixteen bytes...", 4096))},
        {"bob": User("bob")},
    ],
    ids=["removed", "another password", "no password any more"],
)
async def test_a_log_in_fails_if_its_user_is_changed_meanwhile(users: dict[str, User]) -> None:
    async with server_with_users() as server, logged_out_peer(server) as peer:
        client, challenge = await challenged(peer, "bob", "pencil")
        server.users.users = Users(2, users)
        await peer.send(ContinueLogIn(client.client_final(challenge)))
        await peer.expect_error(Status.LOG_IN_FAILED)


async def test_a_host_with_too_many_failed_log_ins_must_wait(autojump_clock: MockClock) -> None:
    async with server_with_users() as server:
        failures = server.connections.resources.log_ins.failures

        async def attempt(password: str) -> Error | LoggedIn:
            async with logged_out_peer(server) as peer:
                client, challenge = await challenged(peer, "bob", password)
                return await answer(peer, client, challenge)

        async def answer(peer: Peer, client: ScramClient, challenge: bytes) -> Error | LoggedIn:
            await peer.send(ContinueLogIn(client.client_final(challenge)))
            message = await peer.receive()
            assert isinstance(message, Error | LoggedIn)
            return message

        # All log-ins have their challenges before the first of them fails.
        waiting_count = 0
        ready = trio.Event()
        statuses: list[int] = []

        async def one_of_many() -> None:
            nonlocal waiting_count
            async with logged_out_peer(server) as peer:
                client, challenge = await challenged(peer, "bob", "pen")
                waiting_count += 1
                if waiting_count == FAILURES_MAX + 5:
                    ready.set()
                await ready.wait()
                statuses.append((await answer(peer, client, challenge)).status)

        server.connections.resources.log_ins.failure_delay_s = FAILURE_DELAY_S
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(FAILURES_MAX + 5):
                nursery.start_soon(one_of_many)
        assert sorted(statuses) == [Status.TOO_MANY] * 5 + [Status.LOG_IN_FAILED] * FAILURES_MAX
        assert trio.current_time() - began >= FAILURE_DELAY_S
        assert (failures.failure_count, failures.refusal_count) == (FAILURES_MAX, 5)


async def test_a_message_behind_a_failed_log_in_does_not_shorten_its_delay(
    autojump_clock: MockClock,
) -> None:
    """The server sends the failure after its delay, whatever follows the client's answer."""
    async with server_with_users() as server:
        server.connections.resources.log_ins.failure_delay_s = FAILURE_DELAY_S
        for message in (Noop(), ListBuckets(opaque=1), ContinueLogIn(b"")):
            async with logged_out_peer(server) as peer:
                client, challenge = await challenged(peer, "bob", "pen")
                began = trio.current_time()
                await peer.send(ContinueLogIn(client.client_final(challenge)), message)
                await peer.expect_error(Status.LOG_IN_FAILED)
                assert trio.current_time() - began >= FAILURE_DELAY_S


async def test_a_request_behind_the_log_in_waits_while_the_user_is_over_its_limit(
    autojump_clock: MockClock,
) -> None:
    """Otherwise the server would read more than the limit of the user with each new connection."""
    users = USERS.with_limits("bob", Limits(bytes_in=BYTES_A_SECOND_MIN))
    async with server_with_users(users) as server:
        usage = server.connections.resources.log_ins.usages.usage_of("bob")
        async with logged_out_peer(server) as peer:
            client, challenge = await challenged(peer, "bob", "pencil")
            usage.pause_after_reading(30 * BYTES_A_SECOND_MIN, trio.current_time())
            began = trio.current_time()
            await peer.send(ContinueLogIn(client.client_final(challenge)), ListBuckets(opaque=1))
            await peer.expect(LoggedIn)
            assert trio.current_time() - began < 1
            await peer.expect(ListBucketsReply)
            assert 25 < trio.current_time() - began < 35


async def test_a_frame_is_not_dropped_as_too_slow_while_the_server_pauses_its_user(
    autojump_clock: MockClock,
) -> None:
    """For its user's limit, the server pauses reading for longer than a frame may take."""
    users = USERS.with_limits("bob", Limits(bytes_in=BYTES_A_SECOND_MIN))
    async with server_with_users(users) as server, logged_out_peer(server) as peer:
        client, challenge = await challenged(peer, "bob", "pencil")
        await peer.send(ContinueLogIn(client.client_final(challenge)))
        await peer.expect(LoggedIn)
        await peer.open("b")
        bundle = Bundle.of_one_run(partition_of(b"k", 4), sets([(b"k", b"v" * 1000)]))
        frame = b"".join(
            bytes(piece) for piece in Mutate(bundle, opaque=peer.opaque()).frame_buffers()
        )
        usage = server.connections.resources.log_ins.usages.usage_of("bob")
        usage.pause_after_reading(50 * BYTES_A_SECOND_MIN, trio.current_time())
        began = trio.current_time()
        await peer.send_bytes(frame[:500])
        await trio.sleep(40)
        assert trio.current_time() - began > FRAME_TIMEOUT_S
        await peer.send_bytes(frame[500:])
        await peer.expect(MutateReply)
        assert trio.current_time() - began > 45
        assert server.connections.resources.frame_budget.dropped_count == 0


async def test_the_audit_log_has_log_ins_and_failed_log_ins(certificates: Certificates) -> None:
    log = AuditNotes()
    settings: dict[str, Any] = {"tls_client_ca": str(certificates.authority.ca)}
    limited = User("carol", VERIFIER, RIGHTS, Limits(connections=1))
    users = USERS.with_user(limited)
    async with server_with_users(users, **certificates.server_settings(), **settings) as server:
        server.connections.resources.audit_log = log

        def address(certificate: Certificate, credentials: Credentials | None = None) -> Address:
            tls = certificates.security_of(certificate).tls
            return Address.parse(server.url("b"), Security(tls, credentials))

        async def refused(certificate: Certificate, credentials: Credentials | None = None) -> None:
            with pytest.raises(ServerError):
                async with connect(address(certificate, credentials), retry_timeout_s=0):
                    pass

        alice = certificates.client
        async with connect(address(alice)), connect(address(alice, BOB)):
            pass
        await refused(certificates.server)
        await refused(alice, Credentials("bob", "pen"))
        await refused(alice, Credentials("eve", "pen"))
        carol = Credentials("carol", "pencil")
        async with connect(address(alice, carol)):
            await refused(alice, carol)
    assert {event for event, _ in log.notes} == {"log-in"}
    assert all(str(fields["peer"]).startswith("127.0.0.1:") for _, fields in log.notes)
    assert [
        (fields["user"], fields["mechanism"], fields["allowed"]) for _, fields in log.notes
    ] == [
        ("alice", EXTERNAL, True),
        ("bob", SCRAM, True),
        ("localhost", EXTERNAL, False),
        ("bob", SCRAM, False),
        ("eve", SCRAM, False),
        ("carol", SCRAM, True),
        ("carol", SCRAM, False),
    ]


async def test_the_audit_log_has_the_host_that_must_wait() -> None:
    log = AuditNotes()
    async with server_with_users() as server, logged_out_peer(server) as peer:
        for _ in range(FAILURES_MAX + 1):
            server.connections.resources.log_ins.failures.count_failure(
                "127.0.0.1", trio.current_time()
            )
        (connection,) = server.connections.connections
        connection.context.access._audit_log = log
        await peer.send(StartLogIn(SCRAM, ScramClient("bob", "pencil", "nonce").client_first()))
        await peer.expect_error(Status.TOO_MANY)
    assert log.notes == [("log-in limited", {"host": "127.0.0.1"})]


def test_failed_log_ins_of_a_host_are_forgotten_over_time() -> None:
    failures = FailedLogIns()
    for _ in range(FAILURES_MAX):
        assert not failures.is_limited("a", 100.0)
        failures.count_failure("a", 100.0)
    assert failures.is_limited("a", 100.0)
    assert not failures.is_limited("b", 100.0)
    assert not failures.is_limited("a", 100.0 + FAILURE_DELAY_S)
    failures.count_failure("a", 100.0 + FAILURE_DELAY_S)
    assert failures.is_limited("a", 100.0 + FAILURE_DELAY_S)
    assert not failures.is_limited("a", 1000.0)
    assert failures.refusal_count == 2


def test_hosts_with_failed_log_ins_take_bounded_memory() -> None:
    failures = FailedLogIns()
    for number in range(HOSTS_MAX):
        failures.count_failure(str(number), 0.0)
    # The host whose last failure is oldest is forgotten. Host 0 has failed again since.
    failures.count_failure("0", 0.0)
    failures.count_failure("new", 0.0)
    assert len(failures._free_at) == HOSTS_MAX
    assert {"0", "new", "2"} <= failures._free_at.keys()
    assert "1" not in failures._free_at


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("127.0.0.1:4000", "127.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:4000", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2:ffff::1]:1", "2001:db8:1:2::/64"),
        ("[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1"),
        ("[fe80::1%eth0]:1", "fe80::/64"),
        ("no socket", "no socket"),
    ],
)
def test_failures_are_counted_by_ipv4_address_or_ipv6_network(peer: str, network: str) -> None:
    assert network_of(peer) == network


async def test_a_client_that_does_not_log_in_in_time_is_disconnected(
    autojump_clock: MockClock,
) -> None:
    async with server_with_users() as server:
        async with logged_out_peer(server) as peer:
            await peer.expect_error(Status.IDLE)
        async with logged_out_peer(server) as peer:
            await challenged(peer, "bob")
            error = await peer.expect_error(Status.IDLE)
            assert error.sentence == "no log-in within 10 seconds"


def test_the_text_of_credentials_does_not_show_the_password() -> None:
    address = Address.parse("upr://host/b", Security(credentials=Credentials("bob", "pencil")))
    for text in (repr(address), str(address), repr(address.security), f"{BOB}"):
        assert "pencil" not in text
