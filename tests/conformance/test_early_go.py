"""The conformance runner accepts a client that sends `Go` before its streams are answered."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from upr_server.conformance import check_client

CLIENT: Final = Path(__file__).with_name("early_go_client.py")


async def test_a_client_may_send_go_with_its_first_stream() -> None:
    verdicts = check_client((sys.executable, str(CLIENT)), ("rollback",))
    assert [(each.scenario, each.failure) async for each in verdicts] == [("rollback", "")]
