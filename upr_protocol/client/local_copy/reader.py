"""Reading a local copy, from any process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from upr_protocol.client.core.key_lookup import Item
from upr_protocol.client.local_copy.database import (
    COLUMNS,
    FILE_NAME,
    LocalCopyError,
    connect_database,
    count_items,
    get_item,
    item_of_row,
    read_resume_state,
    translated_errors,
)
from upr_protocol.ids import PartitionId, SeqNo


class LocalCopyReader:
    """Reads a local copy as it was committed last, also while another process follows.

    Args:
        directory: Where the copy is.

    Attributes:
        state: The resume state when the copy was opened.

    Raises:
        LocalCopyError: The directory does not hold a local copy.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = Path(directory) / FILE_NAME
        if not path.is_file():
            raise LocalCopyError(f"{directory} does not hold a local copy")
        self._database = connect_database(path)
        try:
            with translated_errors(Path(directory)):
                self.state = read_resume_state(self._database, Path(directory))
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Closes the copy."""
        self._database.close()

    def __len__(self) -> int:
        return count_items(self._database)

    def get(self, partition: int, key: bytes) -> Item | None:
        """The item at `key` of a partition."""
        return get_item(self._database, partition, key)

    def items(self) -> Iterator[Item]:
        """Every item, by partition and key, in one consistent read."""
        rows = self._database.execute(
            f"SELECT {COLUMNS} FROM items WHERE value IS NOT NULL ORDER BY partition, key"
        )
        return map(item_of_row, rows)

    def floors(self) -> dict[PartitionId, SeqNo]:
        """By partition the lowest rollback target; a rollback below it starts at 0."""
        rows = self._database.execute("SELECT partition, floor FROM partitions")
        return {PartitionId(partition): SeqNo(floor) for partition, floor in rows}

    def ends(self) -> dict[PartitionId, SeqNo]:
        """By partition the snapshot end at which the copy equals what the server had. A partition
        inside of a snapshot is missing."""
        rows = self._database.execute(
            "SELECT partition, last_complete FROM partitions WHERE complete"
        )
        return {PartitionId(partition): SeqNo(end) for partition, end in rows}
