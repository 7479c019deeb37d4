"""Addresses."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.client import Address, AddressError
from upr_protocol.security import Security, TlsSettings


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("upr://localhost/b", Address("localhost", 12000, "b")),
        ("upr://127.0.0.1:1/b", Address("127.0.0.1", 1, "b")),
        ("upr://[::1]:65535/a.b_c-d", Address("::1", 65535, "a.b_c-d")),
        ("upr://[::1]", Address("::1", 12000, "")),
        ("upr://host:12/", Address("host", 12, "")),
        ("UPR://Host:12/B", Address("host", 12, "B")),
        ("upr://host/%C3%A4", Address("host", 12000, "ä")),
        ("upr://a:1,b/b", Address("a", 1, "b", (("b", 12000),))),
        ("upr://a,[::1]:7,c:3/b", Address("a", 12000, "b", (("::1", 7), ("c", 3)))),
    ],
)
def test_valid_and_invalid_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "does not begin with upr:// or uprs://"),
        ("localhost:12000/b", "does not begin with upr:// or uprs://"),
        ("http://localhost/b", "does not begin with upr:// or uprs://"),
        ("upr:///b", "the host is missing"),
        ("upr://a,/b", "the host is missing"),
        ("upr://,a/b", "the host is missing"),
        ("upr://a:1,b:0/b", "the port is 1 to 65535"),
        ("upr://a:1,me@b/b", "users and passwords do not belong"),
        ("upr://:12/b", "the host is missing"),
        ("upr://host:0/b", "the port is 1 to 65535"),
        ("upr://host:65536/b", "the port is 1 to 65535"),
        ("upr://host:x/b", "the port is 1 to 65535"),
        ("upr://[::1/b", "an IPv6 address in brackets"),
        ("upr://me@host/b", "users and passwords do not belong"),
        ("upr://host/b?x=1", "only a host, a port and a bucket"),
        ("upr://host/b#x", "only a host, a port and a bucket"),
        ("upr://host/b/c", "no slash"),
        ("upr://host/" + "b" * 101, "at most 100 bytes"),
        ("upr://host/\udcff", "it is not UTF-8"),
        ("upr://\udcff/b", "it is not UTF-8"),
    ],
)
def test_an_invalid_url_raises_an_error_that_says_why(url: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as caught:
        Address.parse(url)
    assert "example: upr://127.0.0.1:12000/flights" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "upr://me:pencil@host/b",
        "upr://me:pen/cil@host/b",
        "upr://me:pen@cil@host/b",
        "http://me:pencil@host/b",
        "upr://host/b?password=pencil",
        "upr://host/b#pencil",
        "upr://me:pencil/b",
        "upr://me:pencil",
        "upr://a:1,me:pencil/b",
        "upr://me:pencil%40host/b",
        "upr://me:pen/cil@host:1/b",
        "upr://me:pen?cil@host/b",
        "upr://me:pen#cil@host/b",
        "upr://me:pen\ncil@host/b",
        "upr://me:pen[cil@host/b",
        "upr://me:pen\uff0fcil@host/b",
        "upr:me:pencil@host/b",
        "upr:/me:pencil@host/b",
        "me:pencil@host/b",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(url)
    # A traceback does not show it either.
    traceback_text = "".join(traceback.format_exception_only(caught.value))
    assert "cil" not in traceback_text
    assert "***" in traceback_text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_bucket_can_be_asked_for() -> None:
    address = Address("host", 12, "b")
    assert address.with_bucket() is address
    with pytest.raises(AddressError, match="the bucket is missing"):
        Address("host", 12).with_bucket()


@given(
    st.sampled_from(["host", "127.0.0.1", "::1", "fe80::1"]),
    st.integers(1, 65535),
    st.from_regex(r"[A-Za-z0-9._-]{0,50}", fullmatch=True),
)
def test_the_text_of_an_address_can_be_parsed(host: str, port: int, bucket: str) -> None:
    address = Address(host, port, bucket)
    assert Address.parse(str(address)) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    for url in (text, "upr://" + text):
        try:
            Address.parse(url)
        except AddressError:
            continue


def test_every_address_made_of_one_is_protected_as_it_is() -> None:
    security = Security(TlsSettings(ca="ca.pem"))
    address = Address.parse("uprs://a:1,b:2/bucket", security)
    addresses = [*address.each_node(), address.of_node("c:3"), address.with_bucket()]
    addresses.append(Address.of_bucket("c:3", "bucket", security))
    assert [derived.security for derived in addresses] == [security] * 5


def test_the_nodes_are_told_as_host_and_port() -> None:
    assert Address.parse("upr://[::1]:5,b:2/bucket").host_ports == "[::1]:5,b:2"


def test_each_node_has_an_address_of_its_own() -> None:
    address = Address.parse("upr://a:1,b:2,a:1/bucket")
    assert address.each_node() == [Address("a", 1, "bucket"), Address("b", 2, "bucket")]
    assert address.of_node("[::1]:5") == Address("::1", 5, "bucket")
    assert str(address) == "upr://a:1,b:2,a:1/bucket"
