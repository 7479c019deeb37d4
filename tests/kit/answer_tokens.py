"""Which batches lose their answers when changes are undone."""

from __future__ import annotations

from tests.kit.answer_rows import unpack_rows
from upr_server.engine import WriterToken
from upr_server.engine.publisher_answers import PublisherAnswers


def tokens_above(answers: PublisherAnswers, seq: int) -> list[WriterToken]:
    """The batches whose answers a truncation to `seq` deletes from the disk."""
    rows = b"".join(answers.rows_above(seq, 2))
    return [WriterToken(*token) for token in unpack_rows(rows)]
