"""The names and passwords of users: each has one form, and shows all of itself."""

from __future__ import annotations

import unicodedata
from typing import Final

from upr_protocol.errors import UprError

NAME_BYTES_MAX: Final = 128
"""Fits into a log's line and into a frame of the handshake."""

_REFUSED: Final = frozenset(("Cc", "Cn", "Cs", "Co"))
_UNSEEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""What may be in no name and no pattern. Not what Unicode does not assign: that may be assigned at
another node."""


class UsersError(UprError, ValueError):
    """A document is not a cluster's users, or a change of them is not possible."""


def normalised(text: str, kind: str) -> str:
    """A name or a password in the one form in which it is compared: NFKC, as SASLprep has it.

    Args:
        text: The text.
        kind: What it is, for the error. The error does not show the text.

    Raises:
        UsersError: It is empty, or has a character that no keyboard should make: of control, not
            assigned, a surrogate, or for private use.
    """
    form = unicodedata.normalize("NFKC", text)
    if not form:
        raise UsersError(f"{kind} is empty")
    if _has_any(form, _REFUSED):
        raise UsersError(f"{kind} has a control character, or one that Unicode does not assign")
    return form


def normalised_name(text: str, kind: str) -> str:
    """The name of a user or of a role in the one form in which it is compared; see `normalised`.

    Raises:
        UsersError: Also if it has a character that nobody sees, or that changes how others are
            shown: two names must not look the same.
    """
    form = normalised(text, kind)
    if has_invisible_characters(form):
        raise UsersError(f"{kind} has a format character, or an end of a line")
    return form


def check_name(name: str, kind: str) -> None:
    """Checks the name of a user or of a role that was made before. Another version of Unicode may
    normalise it otherwise: that is tried for new ones only.

    Raises:
        UsersError: It is empty or too long.
    """
    if not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES_MAX:
        raise UsersError(f"{kind} has 1 to {NAME_BYTES_MAX} bytes in UTF-8")


def has_invisible_characters(text: str) -> bool:
    """Whether a text has a character that nobody sees, or that changes how others are shown."""
    return _has_any(text, _UNSEEN)


def _has_any(text: str, categories: frozenset[str]) -> bool:
    if text.isascii() and text.isprintable():
        # Most are: no such character is in any of these categories.
        return False
    return any(unicodedata.category(character) in categories for character in text)
