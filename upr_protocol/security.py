"""How a link to a server is protected. A program that connects gives it once, with the address."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen
class TlsSettings:
    """How a link is encrypted, and which certificates count. All files are in PEM form.

    Attributes:
        ca: The authorities that may have signed the other side's certificate; empty for those
            that the system trusts.
        cert: This side's own certificate, with those between it and its authority;
            empty for none.
        cert_key: The key of that certificate; empty if it is in the same file.
        is_verified: Whether the other side must prove who it is. If not, anybody in between
            can read and change everything.
        allows_tls_1_2: Whether TLS 1.2 is accepted beside 1.3.
    """

    ca: str = ""
    cert: str = ""
    cert_key: str = ""
    is_verified: bool = True
    allows_tls_1_2: bool = False


@attrs.frozen
class Credentials:
    """Who somebody is, and the password that proves it.

    Attributes:
        user: The user's name.
        password: The password, if there is no file. What shows this value does not show it.
        password_file: The file with the password in its first line. Clients read it at each new
            connection, so that they learn of another password.
    """

    user: str
    password: str = attrs.field(default="", repr=False)
    password_file: str = ""


@attrs.frozen
class Security:
    """How a link is protected.

    Attributes:
        tls: How it is encrypted; None if it is not.
        credentials: How to log in, if the server wants it; None to do so by the certificate in
            `tls`, or not at all.
    """

    tls: TlsSettings | None = None
    credentials: Credentials | None = None


UNPROTECTED: Final = Security()
