"""Text from others, made fit for a terminal: nothing in it moves the cursor, sets a title, begins a
line of its own or turns the direction of writing.

Servers are not trusted here, and honest ones repeat what others said: the owner of a lease, a key.
"""

from __future__ import annotations

import re
from typing import Final

_JSON_UNPRINTABLE: Final = re.compile(
    rb"\x7f"
    rb"|\xc2[\x80-\x9f\xad]"  # the control characters of Latin-1, and the soft hyphen
    rb"|\xd8\x9c"
    rb"|\xe2\x80[\x8b-\x8f\xa8-\xae]"  # no width, directions, line and paragraph separators
    rb"|\xe2\x81[\xa0-\xaf]"
    rb"|\xef\xbb\xbf"
    rb"|\xef\xbf[\xb9-\xbb]"
    rb"|\xf3\xa0[\x80\x81][\x80-\xbf]"  # tags
)
"""What JSON allows as it is, and a terminal may obey. What is below U+0020 JSON escapes itself."""


def printable(text: str, keep: str = "") -> str:
    """`text` with an escape for every control, format and separator character but the space and
    those in `keep`. The escapes are those of a Python string. O(length)."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def printable_json(data: bytes) -> bytes:
    """Escapes the unprintable characters of a JSON text. O(length)."""
    return _JSON_UNPRINTABLE.sub(_json_escape, data)


def _json_escape(match: re.Match[bytes]) -> bytes:
    units = match[0].decode().encode("utf-16-be")
    return b"".join(
        b"\\u" + units[index : index + 2].hex().encode() for index in range(0, len(units), 2)
    )
