"""What others said cannot drive a terminal."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.cli.escaping import printable, printable_json
from upr_protocol.cli.output import print_table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, ä and 漢", "plain, ä and 漢"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\r\nb", "a\\r\\nb"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp", "\\u202egnp"),
        ("\u2028\U000e0041", "\\u2028\\U000e0041"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_escapes(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_line_ends_are_kept_where_asked_for() -> None:
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@given(st.text())
def test_nothing_unprintable_is_left(text: str) -> None:
    assert printable(text).isprintable()


CONTROLS: Final = "\x00\x1b\x7f\x85\x9b\xad\u061c\u200b\u202e\u2028\u2066\ufeff\U000e0041"


@given(st.lists(st.text() | st.text(CONTROLS), max_size=5))
def test_json_means_the_same_and_has_no_control_characters(value: list[str]) -> None:
    value = [text.encode(errors="replace").decode() for text in value]
    line = printable_json(msgspec.json.encode(value))
    assert msgspec.json.decode(line) == value
    for character in CONTROLS:
        assert character not in line.decode()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_cell_cannot_make_a_row(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "owner"), [(1, "me\n2   you\x1b[1A\x9b")], as_json=as_json)
    out = capsys.readouterr().out
    assert out.count("\n") == (1 if as_json else 2)
    assert "\x1b" not in out
    assert "\x9b" not in out
