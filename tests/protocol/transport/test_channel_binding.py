"""Channel binding: the hash of the server's certificate, as both sides see it."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import pytest

from tests.kit.certificates import Certificates, openssl
from tests.protocol.transport.tls_links import linked
from upr_protocol.transport.channel_binding import channel_binding, channel_binding_of_file


def test_both_sides_see_the_same(certificates: Certificates) -> None:
    client, server = linked(certificates)
    der = ssl.PEM_cert_to_DER_cert(certificates.server.cert.read_text())
    assert client.channel_binding == server.channel_binding == hashlib.sha256(der).digest()
    assert channel_binding_of_file(str(certificates.unknown.cert)) != server.channel_binding


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("-newkey rsa:2048 -sha1", "sha256"),
        ("-newkey rsa:2048 -sha512", "sha512"),
        ("-newkey ec -pkeyopt ec_paramgen_curve:P-384 -sha384", "sha384"),
        ("-newkey ed25519", ""),
    ],
)
def test_the_hash_is_that_of_the_signature(tmp_path: Path, arguments: str, name: str) -> None:
    path = tmp_path / "cert.pem"
    key = arguments.split()
    openssl(
        *("req", "-x509", *key, "-nodes", "-keyout", "cert.key", "-out", str(path)),
        *("-subj", "/CN=x"),
        folder=tmp_path,
    )
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    expected = hashlib.new(name, der).digest() if name else b""
    assert channel_binding(der) == channel_binding_of_file(str(path)) == expected


def test_what_is_no_certificate_has_no_hash(tmp_path: Path, certificates: Certificates) -> None:
    der = ssl.PEM_cert_to_DER_cert(certificates.server.cert.read_text())
    # The signature comes behind its algorithm: without the end of it there is no certificate.
    for length in range(len(der)):
        assert channel_binding(der[:length]) == b""
    assert channel_binding_of_file(str(tmp_path / "missing")) == b""
    assert channel_binding_of_file(str(certificates.server.key)) == b""
