"""The options of a server with a certificate."""

from __future__ import annotations

from tests.kit.certificates import Certificate


def options(certificate: Certificate, *more: str) -> tuple[str, ...]:
    """The options of a server with a certificate."""
    return (
        *("--tls-certificate", str(certificate.cert)),
        *("--tls-key", str(certificate.key), *more),
    )
