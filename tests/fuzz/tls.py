"""What a TLS link reads of a stranger: as the first that a server hears, in place of the client's
proof in a handshake, and as ciphertext from the other side of a connection."""

from __future__ import annotations

import ssl
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from tests.kit.certificates import Authority
from upr_protocol.errors import BrokenError, TlsError
from upr_protocol.security import TlsSettings
from upr_protocol.transport import NotTlsError, TlsLink, client_context, server_context
from upr_protocol.transport.tls_context import load_certificate

FIRST, PROOF, TO_SERVER, TO_CLIENT = range(4)
"""What the rest of an input is, by its first byte."""

OUTGOING_MAX: Final = 64 * 1024
"""A stranger is told no more than this: the handshake's answer, and why it failed."""

HELLO: Final = bytes.fromhex(
    "16030100ee010000ea030336afce0693621206e331dd25c0cd52271224f34385d8b7ded104b5983ea7cf5420"
    "67912d8187e9fd78f18bd2c038d5b9451465e4f2186bb6e10ba3e6de05cbb080000813021303130100ff0100"
    "00990000000e000c0000096c6f63616c686f7374000b000403000102000a00160014001d0017001e00190018"
    "01000101010201030104002300000016000000170000000d001e001c040305030603080708080809080a080b"
    "080408050806040105010601002b0003020304002d00020101003300260024001d00201558159aeb6532b087"
    "d1fd083dd4dc1897c4377b5d051547b3677f9e09ec7e51"
)
"""A client's greeting, as OpenSSL makes it; its random bytes are those of one run."""


@lru_cache(1)
def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A client's and a server's."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        certificate = authority.sign("server")
        server = server_context(allows_tls_1_2=True)
        load_certificate(server, str(certificate.cert), str(certificate.key), ("cert", "key"))
        return client_context(TlsSettings(ca=str(authority.ca))), server


def tls(data: bytes) -> None:
    """Only who has the keys is heard: nothing else ends a handshake, or becomes a clear text."""
    kind, message = (data[0] % 4, data[1:]) if data else (FIRST, b"")
    for_client, for_server = _contexts()
    client, server = TlsLink(for_client, "localhost"), TlsLink(for_server, None)
    if kind == FIRST:
        _feed(server, message)
        assert not server.is_established
        return
    _pass(client, server)
    _pass(server, client)
    if kind == PROOF:
        client.handshake()
        client.take_outgoing()
        _feed(server, message)
        assert not server.is_established
        return
    _pass(client, server)
    assert client.is_established
    assert server.is_established
    _feed(server if kind == TO_SERVER else client, message)


def _pass(link: TlsLink, peer: TlsLink) -> None:
    """The next of the handshake that one has to say to the other."""
    link.handshake()
    peer.feed(link.take_outgoing())
    peer.handshake()


def _feed(link: TlsLink, message: bytes) -> None:
    try:
        link.feed(message)
        if not link.is_established:
            link.handshake()
        while link.has_undecrypted:
            assert not link.read_bytes(1000), "a stranger is heard"
    except (TlsError, NotTlsError, BrokenError):
        pass
    assert len(link.take_outgoing()) <= OUTGOING_MAX
