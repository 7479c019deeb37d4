"""A daemon's certificate, read again when its files change."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Final, Literal, Protocol

import attrs
import structlog
import trio

from upr_protocol.errors import TlsError
from upr_protocol.transport import (
    SERVER_READ_BYTES,
    FileStamp,
    TlsLink,
    TlsStream,
    WorkTurns,
    channel_binding_of_file,
    file_stamp,
    load_authorities,
    load_certificate,
    new_tls_scratch,
    server_context,
)
from upr_server.runtime.settings import refuse_without

WATCH_S: Final = 2.0
"""How often the files are looked at."""

log = structlog.get_logger(__name__)


@attrs.frozen
class CertificateFiles:
    """Which certificate a daemon shows, and which it wants to see. All files are in PEM form.

    Attributes:
        certificate: The certificate, with those between it and its authority.
        key: Its key; empty if it is in the same file.
        client_ca: The authorities of the clients' certificates; empty to ask for none.
        requires_client: Whether a client without a certificate is refused.
        allows_tls_1_2: Whether TLS 1.2 is spoken beside 1.3.
    """

    certificate: str
    key: str = ""
    client_ca: str = ""
    requires_client: bool = True
    allows_tls_1_2: bool = False

    def context(self) -> ssl.SSLContext:
        """What OpenSSL needs to accept connections.

        Raises:
            TlsError: A file cannot be used; the message names the setting.
        """
        context = server_context(allows_tls_1_2=self.allows_tls_1_2)
        load_certificate(context, self.certificate, self.key, ("tls_certificate", "tls_key"))
        if self.client_ca:
            load_authorities(context, self.client_ca, "tls_client_ca")
            context.verify_mode = ssl.CERT_REQUIRED if self.requires_client else ssl.CERT_OPTIONAL
        return context

    def stamps(self) -> tuple[FileStamp, ...]:
        """What changes when one of the files does."""
        return tuple(file_stamp(path) for path in (self.certificate, self.key, self.client_ca))


class TlsConfig(Protocol):
    """The settings of a daemon that accepts encrypted connections."""

    @property
    def tls_certificate(self) -> str:
        """The file with the daemon's certificate; empty for connections in the clear."""

    @property
    def tls_key(self) -> str:
        """The file with its key; empty if it is in the same file."""

    @property
    def tls_client_ca(self) -> str:
        """The file with the authorities of the clients' certificates; empty to ask for none."""

    @property
    def tls_client_certificates(self) -> Literal["required", "optional"]:
        """Whether clients need a certificate, where `tls_client_ca` is set."""

    @property
    def tls_version_min(self) -> Literal["1.2", "1.3"]:
        """The oldest version of TLS."""


def certificate_files(config: TlsConfig) -> CertificateFiles | None:
    """The certificate, and what clients must show; None without encryption.

    Raises:
        ConfigError: A setting has no use without another one.
    """
    refuse_without(
        "tls_certificate",
        config.tls_certificate,
        tls_key=config.tls_key,
        tls_client_ca=config.tls_client_ca,
    )
    refuse_without(
        "tls_client_ca",
        config.tls_client_ca,
        tls_client_certificates=config.tls_client_certificates == "optional",
    )
    if not config.tls_certificate:
        return None
    return CertificateFiles(
        config.tls_certificate,
        config.tls_key,
        config.tls_client_ca,
        config.tls_client_certificates == "required",
        config.tls_version_min == "1.2",
    )


class Certificates:
    """Encrypts the connections that a daemon accepts.

    Args:
        files: The certificate, and what clients must show.

    Attributes:
        context: What OpenSSL needs for the next connection. Connections keep the one that they
            began with.

    Raises:
        TlsError: A file cannot be used.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._stamps = files.stamps()
        self._channel_binding = channel_binding_of_file(files.certificate)
        self.context = files.context()
        self._scratch = new_tls_scratch(SERVER_READ_BYTES)

    def encrypt_stream(
        self, stream: trio.abc.HalfCloseableStream, turns: WorkTurns | None = None
    ) -> TlsStream:
        """An accepted connection; its first read makes the handshake, in `turns`."""
        link = TlsLink(self.context, None, self._channel_binding)
        return TlsStream(stream, link, self._scratch, turns)

    def context_for_renewals(self) -> ssl.SSLContext:
        """A context for a library that keeps it: each connection shows the certificate that is the
        newest then. The authorities of the clients' certificates stay as they are now."""
        context = self.context

        def use_newest(connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
            connection.context = self.context

        context.sni_callback = use_newest
        return context

    def reload(self) -> None:
        """Reads the files. If they cannot be used, what was read before stays."""
        self._stamps = self._files.stamps()
        try:
            # If the file changes just now, its stamp is another at the next look.
            new_channel_binding = channel_binding_of_file(self._files.certificate)
            self.context = self._files.context()
            self._channel_binding = new_channel_binding
        except TlsError as error:
            log.error(
                "the certificate stays as it was; the new files are of no use", error=str(error)
            )
        else:
            log.info("certificate read again", file=self._files.certificate)

    async def reload_at(self, signals: AsyncIterator[int]) -> None:
        """Reads the files at each signal, for ever."""
        async for _ in signals:
            self.reload()

    async def watch(self) -> None:
        """Reads the files when they have changed, for ever."""
        while True:
            await trio.sleep(WATCH_S)
            if self._files.stamps() != self._stamps:
                self.reload()
