"""Error sentences speak of keys as users write them."""

from __future__ import annotations

import pytest

from upr_protocol.errors import quoted_key


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"N14228", "'N14228'"),
        ("Zürich".encode(), "'Zürich'"),
        (b"it's", '"it\'s"'),
        (b"\x1b[2J", r"'\x1b[2J'"),
        (b"\xff\x00b", r"'\xff\x00b'"),
    ],
)
def test_a_key_is_quoted_as_text_where_it_is_text(key: bytes, text: str) -> None:
    assert quoted_key(key) == text
