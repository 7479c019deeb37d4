"""Expressions whose results would take far more memory or time than the document."""

from __future__ import annotations

from typing import Final

DOCUMENT: Final = {"a": "x" * 1000, "s": "x", "n": [3, 1, 2], "o": {"p": [{"q": 1}, {"q": "y"}]}}
HOSTILE: Final = (
    "s" + "|join('',[@,@])" * 31,
    "s" + "|[@,@]" * 22,
    "n" + "|[@,@][]" * 40,
    "n" + "|[@,@,@,@,@,@,@,@,@,@][]" * 12,
    "to_string(n" + "|[@,@]" * 30 + ")",
    "(n" + "|[@,@]" * 30 + ") == (n" + "|[@,@]" * 30 + ")",
    "contains(n" + "|[@,@]" * 30 + ", `1`)",
    "n" + "|[@,@,@,@,@,@,@,@][]" * 5 + "|" + "map(&length(@), [@,@])[]",
    "o" + "|{a: @, b: @}" * 40,
    "join(a, n[*]" + "|[@,@,@,@,@,@,@,@][]" * 4 + "|[*].to_string(@))",
    "a" + "|join(@,['','',''])" * 20,
    "n" + "|[@,@,@,@,@,@,@,@,@][]" * 3 + "|[[@],[@],[@]][]" * 3 + "[*].[@[:],@[:]]" * 6,
)
