"""B7's idle consumers: connected, with a stream of every partition, and reading nothing of them.

Each gets what fits its window, the smallest there is, and never acknowledges it. So its cursors
stay registered in every partition that is written to.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.kit.commands import Commands
from benchmarks.kit.raw import RawConnection
from upr_protocol.limits import WINDOW_BYTES_MIN


def serve(commands: Commands) -> None:
    """Opens so many `consumers`, and keeps them until the commands end."""
    port, bucket = commands.arguments["port"], commands.arguments["bucket"]
    with ExitStack() as stack:
        for _ in range(commands.arguments["consumers"]):
            connection = RawConnection(port, bucket, window_bytes=WINDOW_BYTES_MIN)
            stack.enter_context(connection).stream()
        commands.answer(ready=True)
        for _ in commands:
            commands.answer()
