"""A client and a server with a TLS link, without sockets."""

from __future__ import annotations

import ssl

from tests.kit.certificates import Certificates
from upr_protocol.security import TlsSettings
from upr_protocol.transport import (
    TlsLink,
    channel_binding_of_file,
    client_context,
    load_certificate,
    server_context,
)


def contexts(certificates: Certificates) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A client's and a server's."""
    server = server_context(allows_tls_1_2=True)
    load_certificate(
        server, str(certificates.server.cert), str(certificates.server.key), ("cert", "key")
    )
    return client_context(TlsSettings(ca=str(certificates.authority.ca))), server


def linked(certificates: Certificates) -> tuple[TlsLink, TlsLink]:
    """A client and a server whose handshake is done."""
    client_side, server_side = contexts(certificates)
    client = TlsLink(client_side, "localhost")
    server = TlsLink(server_side, None, channel_binding_of_file(str(certificates.server.cert)))
    while not (client.is_established and server.is_established):
        for link, peer in ((client, server), (server, client)):
            if not link.is_established:
                link.handshake()
            if outgoing := link.take_outgoing():
                peer.feed(outgoing)
    return client, server
