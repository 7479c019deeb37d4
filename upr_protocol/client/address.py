"""Where a server is, and which of its buckets is meant: `upr://host:port/bucket`."""

from __future__ import annotations

from typing import Final, Self
from urllib.parse import unquote, urlsplit

import attrs

from upr_protocol.errors import UprError
from upr_protocol.limits import BUCKET_NAME_BYTES_MAX

PORT_DEFAULT: Final = 12000
"""Where a server listens unless it is told otherwise."""


class AddressError(UprError, ValueError):
    """The text is no address of a server or bucket."""


@attrs.frozen
class Address:
    """A server, and possibly one of its buckets.

    Attributes:
        host: A name, an IPv4 address, or an IPv6 address without its brackets.
        port: 1 to 65,535.
        bucket: The bucket's name; empty when none is named.
    """

    host: str
    port: int
    bucket: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """The address in `url`; the port may be left out, the bucket too.

        Raises:
            AddressError: It is none; the message says what is wrong and what one looks like.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _wrong(url, str(error)) from error
        if parts.scheme != "upr":
            raise _wrong(url, "it does not begin with upr://")
        if not host:
            raise _wrong(url, "the host is missing")
        if port == 0:
            raise _wrong(url, "the port is 1 to 65535")
        if parts.username is not None or parts.query or parts.fragment:
            raise _wrong(url, "it has only a host, a port and a bucket")
        bucket = unquote(parts.path.strip("/"))
        if "/" in bucket:
            raise _wrong(url, "a bucket's name has no slash")
        if len(bucket.encode()) > BUCKET_NAME_BYTES_MAX:
            raise _wrong(url, f"a bucket's name is at most {BUCKET_NAME_BYTES_MAX} bytes")
        return cls(host, PORT_DEFAULT if port is None else port, bucket)

    def with_bucket(self) -> Self:
        """This address, when it names a bucket.

        Raises:
            AddressError: It does not.
        """
        if not self.bucket:
            raise _wrong(str(self), "the bucket is missing")
        return self

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"upr://{host}:{self.port}/{self.bucket}"


def _wrong(url: str, why: str) -> AddressError:
    return AddressError(f"{url!r} is no address: {why} (as in upr://127.0.0.1:12000/flights)")
