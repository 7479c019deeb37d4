"""Telling the observer of a bucket that a partition has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upr_protocol.chunk import Chunk
from upr_protocol.ids import DESIGN_PREFIX
from upr_server.engine.batch import MutationBatch, is_design_key
from upr_server.engine.mutate_result import MutateResult


class UpdateNotifier:
    """Tells the observer of a bucket what has changed in one partition.

    Args:
        on_update: Called with the keys of the design documents that have changed, and how many
            batches have changed something; None for nobody.
    """

    __slots__ = ("_on_update",)

    def __init__(self, on_update: Callable[[Sequence[bytes], int], None] | None) -> None:
        self._on_update = on_update

    def notify_batch(self, batch: MutationBatch, result: MutateResult) -> None:
        """Tells the observer that a batch was taken in. O(rows) where one of them may be a design
        document's; otherwise O(1)."""
        if self._on_update is not None:
            may_hold_designs = batch.columns.may_hold_designs
            self._on_update(_design_keys(batch, result) if may_hold_designs else (), 1)

    def notify_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Tells the observer that these chunks were taken in. A replica calls it itself, since its
        chunks go to disk and not through here.

        It looks once or twice at the bytes of all keys of a chunk, and at single keys only where a
        design document's prefix occurs.

        Args:
            chunks: What was taken in.
        """
        if self._on_update is None or not chunks:
            return
        design_keys: list[bytes] = []
        for chunk in chunks:
            key_bytes = chunk.key_bytes.tobytes()
            # The search for one byte is thirty times as fast, and mostly finds nothing.
            if DESIGN_PREFIX[:1] in key_bytes and DESIGN_PREFIX in key_bytes:
                design_keys += filter(is_design_key, chunk.keys())
        self._on_update(design_keys, 1)

    def notify_batches(self, design_keys: Sequence[bytes], batch_count: int) -> None:
        """Tells the observer that so many batches, of this partition and others of its bucket, were
        taken in, and which design documents they have changed."""
        if self._on_update is not None:
            self._on_update(design_keys, batch_count)

    def notify_undone(self) -> None:
        """Tells the observer that changes were undone, or may have been. Which design documents
        were among them is not known."""
        if self._on_update is not None:
            # The bare prefix stands for any.
            self._on_update((DESIGN_PREFIX,), 1)

    def notify_expired(self, keys: Sequence[bytes]) -> None:
        """Tells the observer, once, that these items of the bucket have expired."""
        if keys and self._on_update is not None:
            self._on_update(list(filter(is_design_key, keys)), 1)

    def stop(self) -> None:
        """Its bucket was deleted: the observer hears nothing more of it."""
        self._on_update = None


def _design_keys(batch: MutationBatch, result: MutateResult) -> Sequence[bytes]:
    """The keys of the design documents that a batch has changed. O(rows)."""
    failed_indexes = {index for index, _ in result.failures}
    return [
        key
        for index, key in enumerate(batch.keys)
        if is_design_key(key) and index not in failed_indexes
    ]
