"""What the exceptions of Python say, which no peer should read."""

from __future__ import annotations

import re
from typing import Final

PYTHON: Final = re.compile(
    r"unpack|codec|Error\b|position \d|valid [A-Z]|out of range|None\b|\bb'|struct|construct|"
    r"parsing|object|<class|stream read|byte string|FailoverLog\(|Position\("
)
"""What the exceptions of Python, of `struct` and of construct say."""
