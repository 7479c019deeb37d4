"""A server with a certificate, and both kinds of clients."""

from __future__ import annotations

import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import pytest
import trio

from tests.kit.certificates import Authority, Certificate, Certificates, encrypted
from tests.kit.process import eventually
from tests.server.tls_server import tls_server
from upr_protocol.client import Address, BlockingClient, ChunkReceived, connect, consume, publisher
from upr_protocol.errors import ServerError, TlsError
from upr_protocol.security import Security, TlsSettings
from upr_protocol.transport import TlsStream
from upr_server.app import Server, running_server
from upr_server.config import ServerConfig
from upr_server.net.turns import NetworkTurns
from upr_server.storage.simulated import SimulatedStore


async def test_all_kinds_of_clients_connect_over_tls(certificates: Certificates) -> None:
    async with tls_server(certificates) as server:
        assert server.url("b").startswith("uprs://")
        address = encrypted(server.url("b"), certificates.security())
        value = bytes(range(256)) * 2048
        async with connect(address) as client:
            await client.set("small", "1")
            await client.set("large", value)
            item = await client.get("large")
            assert item is not None
            assert item.value == value
        async with publisher(address) as sink:
            for number in range(10_000):
                await sink.set(f"k{number}", bytes(number % 300))
        items: dict[bytes, bytes] = {}
        async with consume(address, end="now") as consumer:
            async for event in consumer:
                if isinstance(event, ChunkReceived):
                    items |= {row.key: row.value for row in event.chunk}
        assert items[b"large"] == value
        assert len(items) == 10_002

        def block() -> None:
            with BlockingClient(address) as client:
                item = client.get("large")
                assert item is not None
                assert item.value == value
                client.set("large", value * 2)
                item = client.get("large")
                assert item is not None
                assert item.value == value * 2
                with client.read_stream(end="now") as consumer:
                    for event in consumer:
                        if isinstance(event, ChunkReceived):
                            items.update((row.key, row.value) for row in event.chunk)

        await trio.to_thread.run_sync(block)
        assert items[b"large"] == value * 2


async def test_handshakes_take_turns(certificates: Certificates) -> None:
    """Otherwise other connections would wait while thousands of handshakes are answered at once."""
    async with tls_server(certificates) as server:
        turns = server.connections.resources.handshake_turns
        assert not turns._used_amount
        async with connect(encrypted(server.url("b"), certificates.security())):
            assert turns._used_amount > 0
            (connection, *_) = server.connections.connections
            assert isinstance(connection._stream, TlsStream)
            assert isinstance(connection._stream._turns, NetworkTurns)


# Connections that are refused, and the errors of both sides.


async def both_refused(address: Address) -> set[str]:
    """The errors of both kinds of clients when they cannot connect."""

    def block() -> str:
        with pytest.raises(TlsError) as caught, BlockingClient(address):
            pass
        return str(caught.value)

    with pytest.raises(TlsError) as caught:
        async with connect(address):
            pass
    return {str(caught.value), await trio.to_thread.run_sync(block)}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("expired", "the server's certificate has expired: renew the file"),
        ("other_name", "the server's certificate is for another name: connect by a name"),
        ("unknown", "no authority that is trusted here has signed the server's certificate: name"),
    ],
)
async def test_a_server_with_a_wrong_certificate_is_refused(
    certificates: Certificates, kind: str, sentence: str
) -> None:
    wrong: Certificate = getattr(certificates, kind)
    async with tls_server(certificates, **wrong.settings()) as server:
        (message,) = await both_refused(encrypted(server.url("b"), certificates.security()))
        assert f"cannot connect to {server.url('b')}: {sentence}" in message
        # A client may connect without a check of the certificate if it asks for that.
        async with connect(
            encrypted(server.url("b"), Security(TlsSettings(is_verified=False)))
        ) as client:
            await client.set("k", "v")


async def test_a_server_is_refused_if_its_authority_is_not_trusted(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates) as server:
        (message,) = await both_refused(Address.parse(server.url("b")))
        assert "no authority that is trusted here" in message


async def test_a_publisher_and_a_consumer_do_not_retry_after_an_untrusted_certificate(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates, **certificates.unknown.settings()) as server:
        address = encrypted(server.url("b"), certificates.security())
        with trio.fail_after(20):
            with pytest.raises(TlsError):
                async with publisher(address) as sink:
                    await sink.set("k", "v")
            with pytest.raises(TlsError):
                async with consume(address, end="now") as consumer:
                    await anext(consumer)


async def test_clients_without_a_required_certificate_are_refused(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates, tls_client_ca=str(certificates.authority.ca)) as server:
        url = server.url("b")
        (message,) = await both_refused(encrypted(url, certificates.security()))
        assert (
            "the server wants a certificate: name one with the options cert and cert-key" in message
        )
        (message,) = await both_refused(
            encrypted(url, certificates.security_of(certificates.unknown))
        )
        assert "the server does not trust the authority of this side's certificate" in message
        (message,) = await both_refused(
            encrypted(url, certificates.security_of(certificates.expired))
        )
        assert "the server says that this side's certificate has expired" in message
        async with connect(encrypted(url, certificates.security_of(certificates.client))) as client:
            await client.set("k", "v")
            (connection,) = server.connections.connections
            assert isinstance(connection._stream, TlsStream)
            assert connection._stream.link.peer_name == "alice"


async def test_clients_may_show_an_optional_certificate(
    certificates: Certificates,
) -> None:
    async with tls_server(
        certificates,
        tls_client_ca=str(certificates.authority.ca),
        tls_client_certificates="optional",
    ) as server:
        for security, name in (
            (certificates.security(), ""),
            (certificates.security_of(certificates.client), "alice"),
        ):
            async with connect(encrypted(server.url("b"), security)):
                (connection,) = server.connections.connections
                assert isinstance(connection._stream, TlsStream)
                assert connection._stream.link.peer_name == name
            await eventually(lambda: not server.connections.connections, "it is closed")
        (message,) = await both_refused(
            encrypted(server.url("b"), certificates.security_of(certificates.unknown))
        )
        assert "does not trust the authority" in message


async def test_an_error_says_which_side_does_not_speak_tls(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates) as server:
        url = server.url("b").replace("uprs", "upr")
        with pytest.raises(ServerError, match=r"this server speaks TLS: .* as uprs://"):
            async with connect(url):
                pass
    config = ServerConfig(listen="127.0.0.1:0")
    async with running_server(config, SimulatedStore()) as server:
        url = server.url().replace("upr://", "uprs://")
        (message,) = await both_refused(encrypted(url, certificates.security()))
        assert "the server does not speak TLS: write upr://" in message


async def test_a_full_server_refuses_a_connection_over_tls_with_the_reason(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates, connections_max=1) as server:
        address = encrypted(server.url("b"), certificates.security())
        async with connect(address):
            with pytest.raises(ServerError, match="there are 1 connections already"):
                async with connect(address):
                    pass


# Versions.


@pytest.mark.parametrize("version_min", ["1.3", "1.2"])
async def test_a_client_with_tls_1_2_connects_only_if_the_server_allows_it(
    certificates: Certificates, version_min: Literal["1.3", "1.2"]
) -> None:
    async with tls_server(certificates, tls_version_min=version_min) as server:
        context = ssl.create_default_context(cafile=certificates.authority.ca)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", server.port, ssl_context=context)
        if version_min == "1.3":
            with pytest.raises(trio.BrokenResourceError):
                await stream.do_handshake()
        else:
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)


async def test_a_server_with_tls_1_2_is_refused_unless_the_client_allows_it(
    certificates: Certificates,
) -> None:
    async with tls_server(certificates, tls_version_min="1.2") as server:
        assert server.certificates is not None
        server.certificates.context.maximum_version = ssl.TLSVersion.TLSv1_2
        url = server.url("b")
        (message,) = await both_refused(encrypted(url, certificates.security()))
        assert "the server speaks no version of TLS that is accepted here" in message
        async with connect(encrypted(url, certificates.security(allows_tls_1_2=True))) as client:
            await client.set("k", bytes(1_000_000))


# Renewal.


async def test_a_certificate_is_replaced_while_100_connections_are_open(
    certificates: Certificates, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first_certificate, renewed = authority.sign("shown"), authority.sign("renewed")
    address_security = Security(TlsSettings(ca=str(authority.ca)))
    async with (
        tls_server(certificates, **first_certificate.settings(), connections_max=200) as server,
        AsyncExitStack() as stack,
    ):
        address = encrypted(server.url("b"), address_security)
        before = await shown_certificate(server, authority)
        clients = [await stack.enter_async_context(connect(address)) for _ in range(100)]
        assert server.certificates is not None
        first_certificate.replace_by(renewed)
        files, old_context = server.certificates, server.certificates.context
        await eventually(lambda: files.context is not old_context, "the renewed one is read")
        after = await shown_certificate(server, authority)
        assert after != before
        assert after == ssl.PEM_cert_to_DER_cert(renewed.cert.read_text())
        for number, client in enumerate(clients):
            await client.set(f"k{number}", "v")
        # Unusable files are ignored.
        first_certificate.cert.write_text("nonsense")
        server.certificates.reload()
        assert await shown_certificate(server, authority) == after
        await clients[0].set("k", "v")


async def shown_certificate(server: Server, authority: Authority) -> bytes:
    """The certificate that a new connection receives."""
    context = ssl.create_default_context(cafile=authority.ca)
    stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", server.port, ssl_context=context)
    await stream.do_handshake()
    certificate = stream.getpeercert(binary_form=True)
    await trio.aclose_forcefully(stream)
    assert isinstance(certificate, bytes)
    return certificate
