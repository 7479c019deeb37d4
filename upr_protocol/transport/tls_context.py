"""Certificates and keys: from files to what OpenSSL works with."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar

from upr_protocol.errors import TlsError
from upr_protocol.security import TlsSettings

_CIPHERS_1_2: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2, what 1.3 would take: with forward secrecy, and authenticated."""

_CONTEXTS_MAX: Final = 32
"""Contexts that are kept: to read the system's authorities takes longer than a handshake."""

FileStamp = tuple[int, int, int]
"""What changes when a file does: its inode, its length, when it was written in nanoseconds."""

T = TypeVar("T")


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """What a client needs to connect. The files are read again when they have changed.

    Raises:
        TlsError: A file cannot be used; the message says which and why.
    """
    paths = (settings.ca, settings.cert, settings.cert_key)
    return _client_context(settings, tuple(file_stamp(path) for path in paths if path))


@lru_cache(_CONTEXTS_MAX)
def _client_context(settings: TlsSettings, _stamps: tuple[FileStamp, ...]) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, allows_tls_1_2=settings.allows_tls_1_2)
    if not settings.is_verified:
        if settings.ca:
            raise TlsError(
                "the option ca has no use where certificates are not verified: leave it out"
            )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif settings.ca:
        load_authorities(context, settings.ca, "ca")
    else:
        context.load_default_certs()
    if settings.cert:
        load_certificate(context, settings.cert, settings.cert_key, ("cert", "cert-key"))
    elif settings.cert_key:
        raise TlsError("the option cert-key needs the option cert: the certificate of that key")
    return context


def server_context(*, allows_tls_1_2: bool) -> ssl.SSLContext:
    """What a server needs to accept connections, without its certificate."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, allows_tls_1_2=allows_tls_1_2)
    # Nobody resumes: connections are long, and what is kept for it would be memory for strangers.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context


def _context(protocol: int, *, allows_tls_1_2: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if allows_tls_1_2 else ssl.TLSVersion.TLSv1_3
    context.set_ciphers(_CIPHERS_1_2)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    # With it a cut would be taken for an end, and somebody in between could cut. Some versions of
    # Python set it.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


def file_stamp(path: str) -> FileStamp:
    """The stamp of a file; zeros if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def load_authorities(context: ssl.SSLContext, path: str, setting: str) -> None:
    """Takes certificates that were signed by the authorities in a file.

    Args:
        context: Where to.
        path: The file.
        setting: What names it, for messages.

    Raises:
        TlsError: It cannot be used.
    """
    _use(setting, path, lambda: context.load_verify_locations(path))


def load_certificate(
    context: ssl.SSLContext, certificate: str, key: str, settings: tuple[str, str]
) -> None:
    """Shows the certificate in a file to the other side.

    Args:
        context: Where to.
        certificate: The file with the certificate, and those between it and its authority.
        key: The file with its key; empty if it is the same.
        settings: What names the two files, for messages.

    Raises:
        TlsError: One of them cannot be used; or others can read the key.
    """
    name, key_path = (settings[1], key) if key else (settings[0], certificate)
    if not key and _use(name, key_path, lambda: _has_only_certificates(key_path)):
        raise TlsError(
            f"{name}: {certificate} has no key: name the file with its key with {settings[1]}"
        )
    mode = _use(name, key_path, lambda: os.stat(key_path)).st_mode
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise TlsError(
            f"{name}: others can use the key in {key_path}: take that right away with "
            f"`chmod o=,g-w {key_path}`"
        )

    def no_passphrase() -> str:
        raise TlsError(
            f"{name}: the key in {key_path} has a passphrase, and nobody is there to type it: "
            "store the key without one, in a file that only its owner can read"
        )

    _use(
        settings[0],
        certificate,
        lambda: context.load_cert_chain(certificate, key or None, password=no_passphrase),
    )


def _has_only_certificates(path: str) -> bool:
    with open(path, "rb") as file:
        content = file.read()
    return b"CERTIFICATE-----" in content and b"PRIVATE KEY-----" not in content


def _use(setting: str, path: str, use: Callable[[], T]) -> T:
    try:
        return use()
    except ssl.SSLError as error:
        reason = (error.reason or "").lower().replace("_", " ")
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = "its key belongs to another certificate"
        raise TlsError(
            f"{setting}: {path} cannot be used: {reason or 'it is not in PEM form'}"
        ) from error
    except OSError as error:
        raise TlsError(
            f"{setting}: {error.filename or path} cannot be read: {error.strerror}"
        ) from error
