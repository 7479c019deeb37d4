"""The publisher that a blocking client used last, which it uses again for the same writer."""

from __future__ import annotations

import os
from collections.abc import Callable

from upr_protocol.client.blocking.publisher import BlockingPublisher
from upr_protocol.client.core.writer_identity import WRITER_ID_BYTES, WriterIdentity
from upr_protocol.client.fork_check import ForkCheck


class LastPublisher:
    """Keeps one publisher, with its thread and its connections, until another one is asked for.

    It also has the client's own writer. A forked process has a writer of its own, and leaves the
    publisher to its parent. With the same writer ID, the server would take the batches of one
    process for those of the other, sent again.
    """

    def __init__(self) -> None:
        self._fork_check = ForkCheck()
        self._own_writer = _new_writer()
        self._publisher: BlockingPublisher | None = None
        self._key: tuple[WriterIdentity, int] | None = None
        """The writer of the publisher, and the bytes that its buffer has."""

    def get(
        self,
        writer: WriterIdentity | None,
        buffer_bytes: int,
        new_publisher: Callable[[WriterIdentity, int], BlockingPublisher],
    ) -> BlockingPublisher:
        """The publisher of a writer: the last one, if it is of this writer and still works;
        otherwise a new one.

        Args:
            writer: The writer; None for the client's own.
            buffer_bytes: How much may be unsent or unanswered.
            new_publisher: Makes a publisher of a writer and such a number of bytes. It is not kept.
        """
        if self._fork_check.was_forked():
            self._own_writer = _new_writer()
            self._publisher = None
        key = self._own_writer if writer is None else writer, buffer_bytes
        if self._publisher is None or self._key != key or self._publisher.has_failed:
            self.close()
            self._key = key
            self._publisher = new_publisher(*key)
        return self._publisher

    def close(self) -> None:
        """Closes the publisher, if there is one. Its batches without an answer may be carried out
        or not."""
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close()


def _new_writer() -> WriterIdentity:
    return WriterIdentity(os.urandom(WRITER_ID_BYTES))
