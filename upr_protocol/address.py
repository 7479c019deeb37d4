"""Where servers are, and which of their buckets is meant: `upr://host:port/bucket`, and `uprs://…`
for encrypted connections.

Where several nodes hold a bucket, any of them tells which holds what; an address may name some of
them, `upr://host:port,host:port/bucket`, so that one that is away does not matter.
"""

from __future__ import annotations

import re
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import attrs

from upr_protocol.errors import UprError
from upr_protocol.limits import BUCKET_NAME_BYTES_MAX
from upr_protocol.security import UNPROTECTED, Security, TlsSettings

PORT_DEFAULT: Final = 12000
"""Where a server listens unless it is told otherwise."""


_HOSTS: Final = "a host is a name, an IPv4 address, or an IPv6 address in brackets"

_MASKS: Final = (
    # All before the last @, but for the beginning that says what kind of a URL it is.
    (re.compile(r"^(uprs?://)?.*@", re.DOTALL | re.IGNORECASE), r"\1***@"),
    (re.compile(r"\?.*", re.DOTALL), "?***"),
    (re.compile(r"#.*", re.DOTALL), "#***"),
    # A text that stands in the place of the port and is no port: the host may have been left out.
    (re.compile(r":(?!\d{1,5}(?:[,/?#]|\Z))[^:,/?#\[\]]+(?=[,/?#]|\Z)"), ":***"),
)
"""What may be a password in a URL that is refused, and what is shown in its place."""


class AddressError(UprError, ValueError):
    """The text is not a valid address of a server or bucket."""


@attrs.frozen
class Address:
    """A server, and possibly one of its buckets.

    Attributes:
        host: A name, an IPv4 address, or an IPv6 address without its brackets.
        port: 1 to 65,535.
        bucket: The bucket's name; empty when none is named.
        other_nodes: More nodes that hold the bucket, as host and port.
        security: How links to it are protected; the same for all nodes.
    """

    host: str
    port: int
    bucket: str = ""
    other_nodes: tuple[tuple[str, int], ...] = ()
    security: Security = UNPROTECTED

    @classmethod
    def parse(cls, url: str, security: Security = UNPROTECTED) -> Self:
        """The address in `url`; the ports may be left out, the bucket too.

        Args:
            url: `upr://host:port/bucket`; or `uprs://…`, which is encrypted, by default with the
                authorities that the system trusts.
            security: How links to it are protected.

        Raises:
            AddressError: It is not valid, or not encrypted though there are TLS settings; the
                message names the mistake and shows an example.
        """
        if "@" in url:
            # Anywhere: a password may have any character, and be cut at another place.
            raise _wrong(
                url,
                "users and passwords do not belong into URLs, which logs show; name the user with "
                "--user or UPR_USER, and give the password with UPR_PASSWORD or --password-file",
            )
        try:
            url.encode()
        except UnicodeEncodeError:
            raise _wrong(url, "it is not UTF-8") from None
        try:
            parts = urlsplit(url)
        except ValueError:
            raise _wrong(url, _HOSTS) from None
        if parts.scheme not in ("upr", "uprs"):
            raise _wrong(url, "it does not begin with upr:// or uprs://")
        if parts.scheme == "uprs" and security.tls is None:
            security = attrs.evolve(security, tls=TlsSettings())
        if parts.scheme == "upr" and security.tls is not None:
            raise _wrong(
                url, "a connection with certificates is encrypted, and begins with uprs://"
            )
        if parts.query or parts.fragment:
            raise _wrong(url, "it has only a host, a port and a bucket")
        first_node, *other_nodes = [_node(url, text) for text in parts.netloc.split(",")]
        bucket = unquote(parts.path.strip("/"))
        if "/" in bucket:
            raise _wrong(url, "a bucket's name has no slash")
        if len(bucket.encode()) > BUCKET_NAME_BYTES_MAX:
            raise _wrong(url, f"a bucket's name is at most {BUCKET_NAME_BYTES_MAX} bytes")
        return cls(*first_node, bucket, tuple(other_nodes), security)

    def each_node(self) -> list[Self]:
        """An address for each node that it names."""
        nodes = ((self.host, self.port), *self.other_nodes)
        return [self._at(*node) for node in dict.fromkeys(nodes)]

    def of_node(self, node: str) -> Self:
        """The same bucket at another node, which is given as HOST:PORT."""
        return self._at(*_node(f"upr://{node}", node))

    @classmethod
    def of_bucket(cls, node: str, bucket: str, security: Security) -> Self:
        """A bucket at a node, which is given as HOST:PORT."""
        return cls(*_node(f"upr://{node}", node), bucket, security=security)

    @property
    def host_ports(self) -> str:
        """The nodes that it names, as HOST:PORT, with commas between them."""
        nodes = ((self.host, self.port), *self.other_nodes)
        return ",".join(_node_text(*node) for node in nodes)

    def with_bucket(self) -> Self:
        """This address, when it names a bucket.

        Raises:
            AddressError: It does not.
        """
        if not self.bucket:
            raise _wrong(str(self), "the bucket is missing")
        return self

    def _at(self, host: str, port: int) -> Self:
        return attrs.evolve(self, host=host, port=port, other_nodes=())

    def __str__(self) -> str:
        scheme = "upr" if self.security.tls is None else "uprs"
        return f"{scheme}://{self.host_ports}/{self.bucket}"


def _node(url: str, text: str) -> tuple[str, int]:
    """The host and the port that `text` names."""
    # What `urllib` says of a mistake shows the text, which may be a password.
    try:
        parts = urlsplit(f"upr://{text}")
        host = parts.hostname
    except ValueError:
        raise _wrong(url, _HOSTS) from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if not host:
        raise _wrong(url, "the host is missing")
    if port == 0:
        raise _wrong(url, "the port is 1 to 65535")
    return host, PORT_DEFAULT if port is None else port


def _node_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wrong(url: str, why: str) -> AddressError:
    # What may be a password is not shown.
    masked_url = url
    for pattern, mask in _MASKS:
        masked_url = pattern.sub(mask, masked_url)
    return AddressError(
        f"{masked_url!r} is not a valid address: {why} (example: upr://127.0.0.1:12000/flights)"
    )
