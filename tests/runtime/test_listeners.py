"""The addresses on which a process listens."""

from __future__ import annotations

import pytest

from upr_server.runtime import (
    ConfigError,
    ListenError,
    is_loopback,
    open_listeners,
    parse_listen,
)


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("h:1", "h", 1), ("[::1]:65535", "::1", 65535), (":0", "127.0.0.1", 0)],
)
def test_host_and_port_of_a_setting(listen: str, host: str, port: int) -> None:
    assert parse_listen(listen) == (host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts_are_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_hosts_that_other_machines_reach_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("listen", ["", "h", "h:", "h:x", "h:-1", "h:65536", "h:²"])
def test_anything_but_host_and_port_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_listen(listen)


async def test_a_host_name_with_port_0_takes_one_port() -> None:
    async with open_listeners("localhost:0") as listeners:
        assert len(listeners) == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "mün..chen"])
async def test_an_address_of_another_machine_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {host}:1"):
        async with open_listeners(f"{host}:1"):
            raise AssertionError("it listens")
