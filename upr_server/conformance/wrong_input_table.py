"""What a client may do wrong, and what a server must make of it: one table.

The protocol document shows the table, the vectors hold its frames, and `check_server` plays it.
"""

from __future__ import annotations

from typing import Final

from upr_server.conformance.wrong_bundles import wrong_bundles
from upr_server.conformance.wrong_handshakes import wrong_handshakes
from upr_server.conformance.wrong_requests import wrong_requests
from upr_server.conformance.wrong_streams import wrong_streams

WRONG_INPUTS: Final = (
    *wrong_handshakes(),
    *wrong_streams(),
    *wrong_bundles(),
    *wrong_requests(),
)
"""All of them, in the order of the document's table."""
