"""Rows that were refused, in a file for someone to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import parquet

from upr_protocol.durable_files import sync_path
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.rows import RejectedRow

DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        pa.field("reason", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)

_GROUP_BYTES: Final = 4 * 1024 * 1024


class DeadLetters:
    """A Parquet file with columns reason, status, operation, key and value.

    While it is written its name begins with an underscore, so that no reader takes it for whole;
    `finish_file` gives it its own. That names the task and not the attempt: the file of a task that
    is run again takes the place of the first, and has the same rows. Without rows no file is made.

    Args:
        folder: Where it is to be; made when it is missing.
        task: What names the task, as a part of a file's name.
        attempt: Which run of the task it is.
    """

    def __init__(self, folder: str, task: str, attempt: int) -> None:
        self._path = Path(folder, f"part-{task}.parquet")
        self._unfinished = Path(folder, f"_part-{task}-{attempt:016x}.unfinished")
        self._rows: list[RejectedRow] = []
        self._nbytes = 0
        self._file: parquet.ParquetWriter | None = None

    def add(self, rows: Sequence[RejectedRow]) -> None:
        """Takes in rows, and now and then writes them. Raises `PipelineError` if it cannot."""
        for row in rows:
            self._rows.append(row)
            self._nbytes += row.nbytes
            if self._nbytes >= _GROUP_BYTES:
                self._write()

    def _write(self) -> None:
        with self._named_errors():
            self._write_group()

    def _write_group(self) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = parquet.ParquetWriter(self._unfinished, DEAD_LETTER_SCHEMA)
        rows, self._rows, self._nbytes = self._rows, [], 0
        columns = [
            [row.reason for row in rows],
            [row.status.name for row in rows],
            [row.operation for row in rows],
            [row.key for row in rows],
            [row.value for row in rows],
        ]
        self._file.write_batch(
            pa.RecordBatch.from_arrays(
                [
                    pa.array(column, field.type)
                    for column, field in zip(columns, DEAD_LETTER_SCHEMA, strict=True)
                ],
                schema=DEAD_LETTER_SCHEMA,
            )
        )

    def finish_file(self) -> None:
        """Syncs the file to disk under its own name, if it has rows. Raises `PipelineError` if it
        cannot be written."""
        if self._rows:
            self._write()
        if self._file is None:
            return
        with self._named_errors():
            self._file.close()
            sync_path(self._unfinished)
            self._unfinished.replace(self._path)
            sync_path(self._path.parent)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Says which folder cannot be written."""
        try:
            yield
        except OSError as error:
            raise PipelineError(
                "UPR_FOLDER",
                f"dead letters cannot be written to {self._path.parent} (deadLetterPath): "
                f"{error.strerror or error}. Name a folder that the driver and every executor can "
                "write to",
            ) from error

    def discard_file(self) -> None:
        """Leaves nothing behind: the task failed. After `finish_file` it does nothing."""
        if self._file is not None:
            with suppress(OSError):  # which a full disk raises again
                self._file.close()
            self._unfinished.unlink(missing_ok=True)
