"""A client in a process of its own: `python -m benchmarks.worker ROLE`.

`kit.processes.Worker` starts it. The first line of standard input is what the role is given, each
further one a command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

from benchmarks.kit.commands import Commands

ROLES: Final[Mapping[str, str]] = {
    "publish": "benchmarks.clients.publisher",
    "consume": "benchmarks.clients.consumer",
    "live-consume": "benchmarks.clients.live_consumer",
    "idle": "benchmarks.clients.idle",
    "paced-publish": "benchmarks.clients.paced_publisher",
    "pipelined-publish": "benchmarks.clients.pipelined_publisher",
    "stall": "benchmarks.clients.stalled",
    "timed-consume": "benchmarks.clients.timed_consumer",
    "redis-read": "benchmarks.clients.redis_reader",
    "redis-paced-publish": "benchmarks.clients.redis_paced_publisher",
    "redis-timed-consume": "benchmarks.clients.redis_timed_consumer",
    "spark": "benchmarks.clients.spark",
    "socket-send": "benchmarks.clients.socket_sender",
    "socket-receive": "benchmarks.clients.socket_receiver",
}
"""The module of each role; its function `serve` is called with the commands."""


def main() -> None:
    """Plays the role named on the command line until its commands end."""
    role = sys.argv[1]
    serve: Callable[[Commands], None] = import_module(ROLES[role]).serve
    serve(Commands(sys.stdin, sys.stdout))


if __name__ == "__main__":
    main()
