"""What is fuzzed: functions that take any bytes, and raise only when a promise is broken.

The errors that are documented are caught here. So whatever comes out is a finding: another error,
or an `AssertionError` from one of the comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tests.fuzz.chunks import chunk, record, stored
from tests.fuzz.frames import frames, messages
from tests.fuzz.links import links
from tests.fuzz.log_in import log_in
from tests.fuzz.sessions import client, server
from tests.fuzz.tls import tls

TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "frames": frames,
    "messages": messages,
    "server": server,
    "client": client,
    "log-in": log_in,
    "tls": tls,
    "links": links,
    "chunk": chunk,
    "stored": stored,
    "record": record,
}
"""By the names that commands and the corpus call them."""
