"""Channel binding `tls-server-end-point` (RFC 5929): a hash of the server's certificate.

Both sides of a connection compute it, each of the certificate that it sees. If somebody in between
shows another certificate, the two differ. Python's `ssl` gives no binding for TLS 1.3 of its own.
"""

from __future__ import annotations

import hashlib
import ssl
from typing import Final

_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"

_SEQUENCE: Final = 0x30
_OBJECT_IDENTIFIER: Final = 0x06

_RSA: Final = bytes.fromhex("2a864886f70d0101")
_ECDSA_SHA2: Final = bytes.fromhex("2a8648ce3d0403")

_HASHES: Final = {
    # MD5 and SHA-1 are replaced by SHA-256.
    _RSA + b"\x04": "sha256",
    _RSA + b"\x05": "sha256",
    bytes.fromhex("2a8648ce3d0401"): "sha256",
    _RSA + b"\x0b": "sha256",
    _RSA + b"\x0c": "sha384",
    _RSA + b"\x0d": "sha512",
    _ECDSA_SHA2 + b"\x02": "sha256",
    _ECDSA_SHA2 + b"\x03": "sha384",
    _ECDSA_SHA2 + b"\x04": "sha512",
}
"""The hash that a signature algorithm stands for. For others, Ed25519 for instance, the standard
defines no binding."""


def channel_binding(certificate: bytes) -> bytes:
    """The hash of a server's certificate in DER form; empty if the standard defines none for it."""
    try:
        algorithm = _signature_algorithm(certificate)
    except (IndexError, ValueError):
        return b""
    name = _HASHES.get(algorithm)
    return hashlib.new(name, certificate).digest() if name is not None else b""


def channel_binding_of_file(path: str) -> bytes:
    """The hash of the first certificate in a PEM file; empty if there is none, or see
    `channel_binding`."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
        begin = text.index(_BEGIN)
        certificate = text[begin : text.index(_END, begin) + len(_END)]
        return channel_binding(ssl.PEM_cert_to_DER_cert(certificate))
    except (OSError, ValueError):
        return b""


def _signature_algorithm(certificate: bytes) -> bytes:
    """The identifier of the algorithm with which a certificate was signed: that is the second part
    of the certificate, behind what is signed."""
    body, _ = _element(certificate, 0, _SEQUENCE)
    _, signed_end = _element(certificate, body.start, _SEQUENCE)
    algorithm, _ = _element(certificate, signed_end, _SEQUENCE)
    identifier, _ = _element(certificate, algorithm.start, _OBJECT_IDENTIFIER)
    return certificate[identifier.start : identifier.stop]


def _element(data: bytes, start: int, tag: int) -> tuple[range, int]:
    """Where the contents of the DER element at `start` are, and where it ends.

    Raises:
        ValueError, IndexError: There is none with this tag.
    """
    if data[start] != tag:
        raise ValueError("another element was expected")
    length, content_start = data[start + 1], start + 2
    if length & 0x80:
        count = length & 0x7F
        length, content_start = (
            int.from_bytes(data[content_start : content_start + count]),
            content_start + count,
        )
    if content_start + length > len(data):
        raise ValueError("the certificate is cut")
    return range(content_start, content_start + length), content_start + length
