"""Certificates made by OpenSSL's own program: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from upr_protocol.client import Address
from upr_protocol.security import Security, TlsSettings

LOOPBACK_NAMES: Final = ("DNS:localhost", "IP:127.0.0.1")
_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: str | Path, folder: Path) -> str:
    """Runs the program, and gives what it says on standard output."""
    try:
        process_result = subprocess.run(
            ["openssl", *map(str, arguments)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise AssertionError("these tests need the program openssl: install it") from error
    return process_result.stdout


@attrs.frozen
class Certificate:
    """A certificate and its key, in files.

    Attributes:
        cert: The certificate's file.
        key: Its key's file.
    """

    cert: Path
    key: Path

    def settings(self) -> dict[str, Any]:
        """The settings of a daemon that shows it."""
        return {"tls_certificate": str(self.cert), "tls_key": str(self.key)}

    def replace_by(self, certificate: Certificate) -> None:
        """Puts another certificate in its place, as a renewal does: each file at once."""
        for path, new_path in ((self.key, certificate.key), (self.cert, certificate.cert)):
            staged_path = path.with_suffix(".new")
            staged_path.write_bytes(new_path.read_bytes())
            staged_path.chmod(0o600)
            staged_path.replace(path)


class Authority:
    """An authority, which signs certificates.

    Args:
        folder: Where everything is.
        name: What it is called, and its files.

    Attributes:
        ca: The file with its own certificate.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self.ca = folder / f"{name}.pem"
        openssl(
            *("req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", self.ca),
            *("-days", "30", "-subj", f"/CN={name}"),
            # Python 3.13 wants it of an authority.
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            folder=folder,
        )

    def sign(
        self,
        file_name: str,
        *,
        common_name: str = "localhost",
        names: tuple[str, ...] = LOOPBACK_NAMES,
        days: int = 30,
    ) -> Certificate:
        """A certificate for names like `DNS:localhost`; with negative days it has expired."""
        certificate = Certificate(
            self._folder / f"{file_name}.pem", self._folder / f"{file_name}.key"
        )
        request = self._folder / f"{file_name}.csr"
        extension = ("-addext", f"subjectAltName={','.join(names)}") if names else ()
        openssl(
            *("req", *_KEY, "-keyout", certificate.key, "-out", request),
            *("-subj", f"/CN={common_name}", *extension),
            folder=self._folder,
        )
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", f"{self._name}.key"),
            *("-CAcreateserial", "-days", str(days), "-copy_extensions", "copyall"),
            *("-out", certificate.cert),
            folder=self._folder,
        )
        return certificate


class Certificates:
    """What the tests use; nobody changes it.

    Attributes:
        authority: Signs all but one of them.
        server: For a server on this machine.
        client: For the client `alice`.
        expired: The server's, too old.
        other_name: For `localhost`, and not for its address.
        unknown: The server's, signed by another authority.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.server = self.authority.sign("server")
        self.client = self.authority.sign("client", common_name="alice", names=())
        self.expired = self.authority.sign("expired", days=-1)
        self.other_name = self.authority.sign("other", names=("DNS:localhost",))
        self.unknown = Authority(folder, "unknown").sign("unknown-server")

    def security(self, **changes: Any) -> Security:
        """How a client connects that trusts the authority."""
        return Security(TlsSettings(**{"ca": str(self.authority.ca), **changes}))

    def security_of(self, client: Certificate, **changes: Any) -> Security:
        """The same with a certificate of its own."""
        return self.security(cert=str(client.cert), cert_key=str(client.key), **changes)

    def server_settings(self) -> Mapping[str, Any]:
        """The settings of a server that trusts the authority's other servers."""
        return {**self.server.settings(), "tls_ca": str(self.authority.ca)}


def encrypted(url: str, security: Security) -> Address:
    """The address at `url`, with how to connect."""
    return Address.parse(url, security)
