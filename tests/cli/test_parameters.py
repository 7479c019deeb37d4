from __future__ import annotations

import click
import pytest

from upr_protocol.cli.output import size_text
from upr_protocol.cli.parameters import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1K", 1024),
        ("512M", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2 gb", 2 * 2**30),
        ("1T", 2**40),
        ("100B", 100),
        ("8388607T", 8388607 * 2**40),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1,5G", "1 2"])
def test_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["8388608T", "9" * 400])
def test_a_size_that_no_server_can_store_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="too large"):
        parse_size(text)


def test_sizes_are_written() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 1024, 2**30, 2**40, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "1.0 GiB",
        "1.0 TiB",
        "1024.0 TiB",
    ]
