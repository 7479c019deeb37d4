"""Where a bucket is, and how connections to it are protected."""

from __future__ import annotations

from upr_protocol.client import Address, Security, TlsSettings


def target(url: str, certificate: str = "") -> Address:
    """The bucket at `url`. `certificate` is the file of the server's certificate, which is its own
    authority; empty for connections in the clear."""
    return Address.parse(url, Security(TlsSettings(ca=certificate) if certificate else None))
