"""TLS without a network: the links of a client and a server, and the bytes between them."""

from __future__ import annotations

import _ssl
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

from tests.kit.certificates import Certificates, openssl
from tests.protocol.transport.tls_links import contexts, linked
from upr_protocol.chunk import Buffer
from upr_protocol.errors import BrokenError, TlsError
from upr_protocol.security import TlsSettings
from upr_protocol.session import ClientSession, ServerSession
from upr_protocol.transport import (
    NotTlsError,
    TlsLink,
    TlsStream,
    client_context,
    new_scratch,
    new_tls_scratch,
    read_some,
    write_all,
)
from upr_protocol.transport.socket_io import unsent
from upr_protocol.transport.tls_link import (
    FED_RECORDS,
    HANDSHAKE_BYTES_MAX,
    HANDSHAKE_RECORDS,
    IDLE_RECORDS_MAX,
    STRANGER_READ_BYTES,
    WRITE_BYTES,
    WRITE_BYTES_MAX,
)
from upr_protocol.wire import Hello


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.integers(0, 2 * WRITE_BYTES).map(bytes)), max_size=6
    ),
    st.data(),
)
def test_all_data_arrives_whatever_part_of_it_a_socket_accepts(
    certificates: Certificates, buffers: list[bytes], data: st.DataObject
) -> None:
    client, server = linked(certificates)
    wire = bytearray()

    def send(ciphertext: Sequence[Buffer]) -> Sequence[Buffer]:
        length = sum(map(len, ciphertext))
        accepted_bytes = data.draw(st.one_of(st.just(length), st.integers(0, length)))
        wire.extend(b"".join(ciphertext)[:accepted_bytes])
        return unsent(ciphertext, accepted_bytes)

    remainder: Sequence[Buffer] = buffers
    while remainder := client.write(remainder, send):
        assert client.has_unsent
    wire.extend(client.close_notify())
    received = bytearray()
    while wire:
        count = data.draw(st.integers(1, len(wire)))
        server.feed(bytes(wire[:count]))
        del wire[:count]
        while server.has_undecrypted:
            received += server.read_bytes(50_000)
    assert received == b"".join(buffers)
    assert server.is_ended
    # Also when asked again.
    assert server.read_bytes(10) == b""
    assert not server.has_undecrypted


def test_one_write_takes_a_bounded_number_of_bytes(certificates: Certificates) -> None:
    """Even if the socket accepts all of them."""
    client, server = linked(certificates)
    remainder: Sequence[Buffer] = [bytes(20 * WRITE_BYTES)]
    counts = []
    while remainder:
        remainder = client.write(remainder, server_feed(server))
        counts.append(len(server.read_bytes(20 * WRITE_BYTES)))
    assert sum(counts) == 20 * WRITE_BYTES
    assert max(counts) == WRITE_BYTES_MAX


def test_a_cut_connection_is_an_error_and_not_an_end(certificates: Certificates) -> None:
    client, server = linked(certificates)
    client.write([b"something"], server_feed(server))
    assert server.read_bytes(100) == b"something"
    server.feed(b"")
    with pytest.raises(BrokenError, match="the connection was cut"):
        server.read_bytes(100)
    assert not server.is_ended


def server_feed(server: TlsLink) -> Callable[[Sequence[Buffer]], Sequence[Buffer]]:
    """Returns a `send` that gives everything to a server at once."""

    def send(ciphertext: Sequence[Buffer]) -> Sequence[Buffer]:
        server.feed(b"".join(ciphertext))
        return ()

    return send


def test_a_changed_byte_is_detected(certificates: Certificates) -> None:
    client, server = linked(certificates)
    ciphertext = bytearray(b"".join(client.encrypt([bytes(1000)])))
    ciphertext[500] ^= 1
    server.feed(bytes(ciphertext))
    with pytest.raises(BrokenError, match="TLS failed"):
        server.read_bytes(2000)


def test_one_read_decrypts_a_bounded_number_of_records(certificates: Certificates) -> None:
    client, server = linked(certificates)
    for _ in range(2000):
        client.write([b"x"], server_feed(server))
    counts = []
    while server.has_undecrypted:
        counts.append(len(server.read_bytes(5000)))
    assert sum(counts) == 2000
    assert max(counts) < 600


def change_keys(link: TlsLink, *, ask: bool) -> bytes:
    """A record with which a link changes its keys, and with `ask` requests that its peer changes
    its own. Python's `ssl` has no call for that, so this calls OpenSSL."""
    try:
        library = ctypes.CDLL(_ssl.__file__)
        change, handshake = library.SSL_key_update, library.SSL_do_handshake
    except AttributeError:
        pytest.skip("this build of Python does not export OpenSSL's functions")
    change.argtypes, handshake.argtypes = [ctypes.c_void_p, ctypes.c_int], [ctypes.c_void_p]
    # In a Python object of `ssl`, OpenSSL's connection follows the head and one reference.
    python_object: Any = link._object
    place = id(python_object._sslobj) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)
    connection = ctypes.c_void_p.from_address(place)
    assert change(connection, int(ask)) == 1
    assert handshake(connection) == 1
    return link.take_outgoing()


@pytest.mark.parametrize("ask", [False, True])
def test_a_connection_on_which_only_keys_are_changed_is_given_up(
    certificates: Certificates, ask: bool
) -> None:
    """One read of such records took 50 ms, and the answers to them had no bound."""
    client, server = linked(certificates)
    flood = b"".join(change_keys(client, ask=ask) for _ in range(2000))
    server.feed(flood)
    with pytest.raises(TlsError, match=rf"has sent {FED_RECORDS} TLS records without data"):
        server.read_bytes(1000)
    assert len(server.take_outgoing()) <= 30 * FED_RECORDS


def handshaking(certificates: Certificates) -> tuple[TlsLink, TlsLink, bytes]:
    """A client whose handshake is done, its server, and the client's last bytes, with which the
    server's handshake will be done."""
    client_side, server_side = contexts(certificates)
    client, server = TlsLink(client_side, "localhost"), TlsLink(server_side, None)
    client.handshake()
    server.feed(client.take_outgoing())
    assert not server.handshake()
    client.feed(server.take_outgoing())
    assert client.handshake()
    return client, server, client.take_outgoing()


@pytest.mark.parametrize("ask", [False, True])
def test_a_connection_is_given_up_if_only_keys_are_changed_after_the_handshake(
    certificates: Certificates, ask: bool
) -> None:
    """OpenSSL got them in one read with the end of the handshake, and they were not counted."""
    client, server, last_bytes = handshaking(certificates)
    flood = b"".join(change_keys(client, ask=ask) for _ in range(600))
    server.feed((last_bytes + flood)[:STRANGER_READ_BYTES])
    assert server.handshake()
    server.take_outgoing()
    with pytest.raises(TlsError, match=rf"has sent {FED_RECORDS} TLS records without data"):
        server.read_bytes(1000)
    assert len(server.take_outgoing()) <= 30 * (FED_RECORDS + HANDSHAKE_RECORDS)


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_data_may_arrive_together_with_the_end_of_the_handshake(
    certificates: Certificates, size: int
) -> None:
    client, server, wire = handshaking(certificates)
    data = bytes(range(3 * HANDSHAKE_RECORDS))
    for number in data:
        wire += b"".join(client.encrypt([bytes([number])]))
        client.note_sent([bytes([number])])
    received = b""
    for start in range(0, len(wire), size):
        server.feed(wire[start : start + size])
        if server.is_established or server.handshake():
            while server.has_undecrypted:
                received += server.read_bytes(1000)
    assert received == data


def test_a_peer_that_sends_data_may_change_its_keys(certificates: Certificates) -> None:
    """However the records are split on their way, and though one read does not take all of them."""
    client, server = linked(certificates)
    wire, received = bytearray(), bytearray()
    for index in range(IDLE_RECORDS_MAX):
        wire += change_keys(client, ask=index % 2 == 0)
        for _ in range(10):
            wire += b"".join(client.encrypt([b"x"]))
            client.note_sent([b"x"])
    for size in (1, 2, 3, 7, 100, 1000, len(wire)):
        piece = bytes(wire[:size])
        del wire[:size]
        server.feed(piece)
        while server.has_undecrypted:
            received += server.read_bytes(1000)
    assert len(received) == 10 * IDLE_RECORDS_MAX


def test_a_handshake_of_too_many_bytes_is_refused(certificates: Certificates) -> None:
    _, server_side = contexts(certificates)
    server = TlsLink(server_side, None)
    piece = b"\x16" * (HANDSHAKE_BYTES_MAX // 4)
    for _ in range(4):
        server.feed(piece)
    with pytest.raises(TlsError, match="a TLS handshake of more than 65536 bytes"):
        server.feed(b"x")


class UnusedOpenSsl:
    """Replaces OpenSSL, and fails if it is called. OpenSSL allocates buffers at its first call."""

    def do_handshake(self) -> None:
        raise AssertionError("the first record is not complete")


def test_openssl_gets_the_first_record_only_when_it_is_complete(certificates: Certificates) -> None:
    client_side, server_side = contexts(certificates)
    client, server = TlsLink(client_side, "localhost"), TlsLink(server_side, None)
    client.handshake()
    hello = client.take_outgoing()
    openssl_object, server._object = server._object, UnusedOpenSsl()  # type: ignore[assignment]
    for position in range(len(hello) - 1):
        server.feed(hello[position : position + 1])
        assert not server.handshake()
    server._object = openssl_object
    server.feed(hello[-1:])
    assert not server.handshake()
    client.feed(server.take_outgoing())
    assert client.handshake()
    server.feed(client.take_outgoing())
    assert server.handshake()


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 100])
def test_a_connection_that_ends_in_its_first_record_is_broken(
    certificates: Certificates, length: int
) -> None:
    client_side, server_side = contexts(certificates)
    client, server = TlsLink(client_side, "localhost"), TlsLink(server_side, None)
    client.handshake()
    if length:
        server.feed(client.take_outgoing()[:length])
        assert not server.handshake()
    server.feed(b"")
    with pytest.raises(BrokenError):
        server.handshake()


@pytest.mark.parametrize("head", [b"\x16\x03\x01\xff\xff", b"\x16\x02\x00\x00\x10"])
def test_an_impossible_first_record_is_refused_from_its_header(
    certificates: Certificates, head: bytes
) -> None:
    """The server does not wait for the 64 KiB that such a header announces."""
    server = TlsLink(contexts(certificates)[1], None)
    server.feed(head)
    with pytest.raises((TlsError, BrokenError)):
        server.handshake()


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_do_not_complete_a_handshake(
    certificates: Certificates, data: bytes, has_record_head: bool
) -> None:
    _, server_side = contexts(certificates)
    server = TlsLink(server_side, None)
    try:
        server.feed(b"\x16\x03\x01" + data if has_record_head else data)
        assert not server.handshake()
    except (TlsError, BrokenError):
        pass


def test_bytes_that_are_not_tls_are_refused_from_their_first_byte(
    certificates: Certificates,
) -> None:
    _, server_side = contexts(certificates)
    for data in (b"UP", b"GET / HTTP/1.1\r\n"):
        with pytest.raises(NotTlsError):
            TlsLink(server_side, None).feed(data)


# Over Trio's streams.


async def test_a_session_works_over_a_socket_and_over_another_stream(
    certificates: Certificates,
) -> None:
    client_side, server_side = contexts(certificates)
    near_socket, far_socket = trio.socket.socketpair()
    for near, far in (
        (trio.SocketStream(near_socket), trio.SocketStream(far_socket)),
        memory_stream_pair(),
    ):
        client = TlsStream(near, TlsLink(client_side, "localhost"), new_tls_scratch())
        server = TlsStream(far, TlsLink(server_side, None), new_tls_scratch())
        session = ServerSession("test:server", now=0.0)
        with pytest.raises(trio.BrokenResourceError, match="handshake was not finished"):
            await write_all(server, [b"too early"])
        async with client, server, trio.open_nursery() as nursery:

            async def serve(server: TlsStream = server, session: ServerSession = session) -> None:
                assert await read_some(server, session, new_scratch()) > 0
                assert [type(message) for message in session.messages()] == [Hello]
                await server.send_all(bytes(1_000_000))
                assert await read_some(server, session, new_scratch()) == 0
                await server.send_eof()
                await server.send_eof()
                with pytest.raises(trio.ClosedResourceError):
                    await server.send_all(b"x")

            nursery.start_soon(serve)
            await client.handshake()
            hello = ClientSession("test:transport", now=0.0).take_outgoing(0.0)
            await write_all(client, hello)
            received = 0
            while received < 1_000_000:
                received += len(await client.receive_some())
            await client.send_eof()
            assert await client.receive_some(1) == b""


async def test_a_handshake_may_be_cancelled(
    certificates: Certificates, autojump_clock: MockClock
) -> None:
    _, server_side = contexts(certificates)
    near, far = memory_stream_pair()
    server = TlsStream(far, TlsLink(server_side, None), new_tls_scratch())
    with trio.move_on_after(5) as scope:
        await server.handshake()
    assert scope.cancelled_caught
    await trio.aclose_forcefully(server)
    assert await near.receive_some() == b""


@pytest.mark.parametrize("how", ["is cut", "has a changed byte"])
async def test_a_write_fails_after_a_read_has_failed(certificates: Certificates, how: str) -> None:
    """The writer may run after the reader has failed: it raises the error that callers expect."""
    client_side, server_side = contexts(certificates)
    near, far = memory_stream_pair()
    client = TlsStream(near, TlsLink(client_side, "localhost"), new_tls_scratch())
    server = TlsStream(far, TlsLink(server_side, None), new_tls_scratch())
    async with client, server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.handshake)
            await client.handshake()
        if how == "is cut":
            await near.send_eof()
        else:
            await near.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(trio.BrokenResourceError):
            await server.receive_some(1)
        with pytest.raises(trio.BrokenResourceError):
            server.write_now([b"x"])
        with pytest.raises(trio.BrokenResourceError):
            await server.write_rest([b"x"], 1)


class CountedTurns:
    """Turns for which each caller must wait; counts them."""

    may_begin = False

    def __init__(self) -> None:
        self.waited_count = self.used_count = 0

    async def next_turn(self) -> None:
        self.waited_count += 1
        await trio.lowlevel.checkpoint()

    def note_used(self, amount: float) -> None:
        assert amount >= 0
        self.used_count += 1


async def test_each_step_of_a_servers_handshake_waits_for_its_turn(
    certificates: Certificates,
) -> None:
    client_side, server_side = contexts(certificates)
    near, far = memory_stream_pair()
    turns = CountedTurns()
    client = TlsStream(near, TlsLink(client_side, "localhost"), new_tls_scratch())
    server = TlsStream(far, TlsLink(server_side, None), new_tls_scratch(), turns)
    async with client, server, trio.open_nursery() as nursery:
        nursery.start_soon(server.handshake)
        await client.handshake()
    assert turns.waited_count == turns.used_count >= 2


async def test_an_incomplete_client_hello_takes_no_turn(
    certificates: Certificates, autojump_clock: MockClock
) -> None:
    _, server_side = contexts(certificates)
    near, far = memory_stream_pair()
    turns = CountedTurns()
    async with near, TlsStream(far, TlsLink(server_side, None), new_tls_scratch(), turns) as server:
        with trio.move_on_after(5):
            await near.send_all(bytes.fromhex("16 03 01 00 ee 01 00"))
            await server.handshake()
    assert not turns.waited_count


# Files.


@pytest.mark.parametrize(
    ("mode", "is_refused"), [(0o600, False), (0o640, False), (0o644, True), (0o620, True)]
)
def test_a_key_that_others_can_use_is_refused(
    certificates: Certificates, mode: int, is_refused: bool
) -> None:
    certificate = certificates.authority.sign(f"mode-{mode:o}")
    certificate.key.chmod(mode)
    tls = TlsSettings(cert=str(certificate.cert), cert_key=str(certificate.key))
    if is_refused:
        with pytest.raises(TlsError, match=r"others can use the key in .*: take that right away"):
            client_context(tls)
    else:
        client_context(tls)


def test_an_unusable_file_is_named_in_the_error(certificates: Certificates) -> None:
    server, client = certificates.server, certificates.client
    missing_path = str(certificates.folder / "missing.pem")
    nonsense = certificates.folder / "nonsense.pem"
    nonsense.write_text("nonsense")
    nonsense.chmod(0o600)
    locked = certificates.folder / "locked.key"
    openssl(
        *("ec", "-in", client.key, "-aes256", "-passout", "pass:secret", "-out", locked),
        folder=certificates.folder,
    )
    for tls, sentence in (
        (TlsSettings(ca=missing_path), f"ca: {missing_path} cannot be read: No such file"),
        (TlsSettings(ca=str(nonsense)), r"ca: .*nonsense\.pem cannot be used: "),
        (TlsSettings(cert=str(nonsense)), r"cert: .*nonsense\.pem cannot be used: "),
        (TlsSettings(cert=missing_path, cert_key=str(client.key)), r"cert: .* cannot be read"),
        # Everybody may read a certificate.
        (TlsSettings(cert=str(client.cert)), r"cert: .* has no key: .* cert-key"),
        (TlsSettings(cert=str(client.cert), cert_key=missing_path), r"cert-key: .* cannot be read"),
        (TlsSettings(cert_key=str(client.key)), "the option cert-key needs the option cert"),
        (
            TlsSettings(cert=str(client.cert), cert_key=str(server.key)),
            "its key belongs to another certificate",
        ),
        (
            TlsSettings(cert=str(client.cert), cert_key=str(locked)),
            r"cert-key: .* has a passphrase",
        ),
        (TlsSettings(ca=missing_path, is_verified=False), "the option ca has no use"),
    ):
        with pytest.raises(TlsError, match=sentence):
            client_context(tls)
