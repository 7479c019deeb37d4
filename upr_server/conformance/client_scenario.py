"""What a scenario for a client consists of, and how the client is told its task.

The client is a command. It reads its task from standard input, as one JSON object. It executes the
task, writes one JSON object with the outcome to standard output, and ends with code 0. Numbers of
64 bits are decimal text; so are partitions as keys of an object. Status codes and other partitions
are numbers. Keys and values of items are text, in UTF-8 on the wire. The tasks:

- `{"task": "consume", "host", "port", "bucket", "partitions", "window_bytes", "idle_interval_s",
  "end_seqs": {partition: number}, "positions": {partition: position}}`: stream until every
  partition has reached its end, and connect again when a connection is lost. If a partition has no
  position, the client has nothing of it yet. The outcome is `{"items": {key: value}, "positions":
  {partition: position}, "rollbacks": [[partition, ceiling]]}`, with the streamed items. At a
  rollback, a client may always go back to 0.
- `{"task": "publish", "host", "port", "bucket", "partition_count", "operations": [{"operation",
  "key", "value"}]}`: publish these operations, those of one partition in this order, each with one
  effect, and connect again when a connection is lost. An operation has its name in capitals, and a
  value, which may be empty. The outcome is `{"results": [{"status", "seq", "cas", "counter"}]}`, in
  the order of the task; a missing number is null. An operation whose whole run is refused for good
  has the run's status. The value of an `INCREMENT` is the delta, as text; a missing counter begins
  with it. No task has a `DECREMENT`. The client may publish with `MEMORY` or `PERSISTED`: the
  runner accepts both, and loses no run that it has answered.
- `{"task": "get", "host", "port", "bucket", "partition", "keys"}`: the outcome is
  `{"items": {key: value}, "refused": {key: code}}`; a missing key is in neither.

A task may have `"user"` and `"password"`. Then the client logs in with them, by SCRAM-SHA-256. If
the server names no mechanism, or does not prove that it stores the user's verifier, the client
closes the connection without opening the bucket, and connects again.

A position has the fields of a position on this page, and its `log` is a list of [history, number].
(The vectors have objects instead.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from upr_server.conformance.failure import ConformanceError
from upr_server.conformance.scripted_server import ScriptedServer

Accept = Callable[[], Awaitable[ScriptedServer]]
"""Waits for the client's next connection."""

Task = dict[str, Any]
"""A task, as the client reads it; of a scenario, without `host` and `port`."""


@attrs.frozen
class ClientScenario:
    """One thing that a client must be able to do.

    Attributes:
        about: What, in a sentence.
        task: What the client is told to do, but for where the server is.
        play: The server's part.
        check: Looks at the client's outcome.
    """

    about: str
    task: Task
    play: Callable[[Accept], Awaitable[None]]
    check: Callable[[Any], None]


def require(is_right: bool, sentence: str) -> None:
    """Raises `ConformanceError` with `sentence` unless `is_right`."""
    if not is_right:
        raise ConformanceError(sentence)
