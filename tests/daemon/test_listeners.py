"""Where a daemon listens."""

from __future__ import annotations

import pytest

from upr_server.daemon import ConfigError, ListenError, listening, parse_listen


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("h:1", "h", 1), ("[::1]:65535", "::1", 65535), (":0", "0.0.0.0", 0)],
)
def test_where(listen: str, host: str, port: int) -> None:
    assert parse_listen(listen) == (host, port)


@pytest.mark.parametrize("listen", ["", "h", "h:", "h:x", "h:-1", "h:65536", "h:²"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_listen(listen)


async def test_a_name_takes_one_free_port() -> None:
    async with listening("localhost:0") as listeners:
        assert len(listeners) == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "mün..chen"])
async def test_what_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {host}:1"):
        async with listening(f"{host}:1"):
            raise AssertionError("it listens")
