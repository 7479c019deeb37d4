"""The batch: what a publisher sends to one partition at once."""

from __future__ import annotations

from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_server.engine.operations import COUNTS
from upr_server.engine.publisher_answers import WriterToken


class MutationBatch:
    """A publisher's batch, checked.

    Args:
        chunk: A published chunk; the engine keeps it, or parts of it.
        token: The batch's name; None for one that nobody will send again.
        attempt: Which run of the publisher's task sends it; 0 where it has none.
        chain: What the publisher gives to vouch for the batch and all before it; 0 for nothing.

    Attributes:
        chunk: The chunk.
        keys: Its keys.
        rows: Its mutations, one by one; None when each of them is a `SET` that expects no CAS. Such
            a batch cannot fail, whatever the keys hold.
        token: The batch's name.
        attempt: Which run of the publisher's task sends it.
        chain: What vouches for the batch.

    Raises:
        ChunkError: The chunk breaks a rule of published chunks.
    """

    __slots__ = ("attempt", "chain", "chunk", "keys", "rows", "token")

    def __init__(
        self, chunk: Chunk, token: WriterToken | None = None, *, attempt: int = 0, chain: int = 0
    ) -> None:
        self.chunk = chunk
        self.keys = chunk.check_published()
        self.rows = None if chunk.is_unconditional else _checked_rows(chunk)
        self.token = token
        self.attempt = attempt
        self.chain = chain


def _checked_rows(chunk: Chunk) -> list[Mutation]:
    """The rows; raises `ChunkError` when the value of one that counts is not a delta."""
    rows = list(chunk)
    for row in rows:
        if row.op in COUNTS:
            CounterDelta.decode(row.value)
    return rows
