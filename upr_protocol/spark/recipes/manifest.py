"""What a folder of Parquet files holds of a bucket, as a file that is written when it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from upr_protocol.durable_files import replace_file
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import PartitionId, SeqNo
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.recipes.folder import sync_folder

FORMAT_VERSION: Final = 1

MANIFEST: Final = "manifest.json"
DATA_FOLDER: Final = "data"
"""The folder beside it that has the rows."""


class PartitionPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What there is of one partition.

    Attributes:
        history_id: The history that `end` is a number of, in hexadecimal.
        failover_log: (history ID, number) pairs, newest first.
        start: Where it begins, exclusive.
        end: Where it ends.
        rows: How many rows it has.
    """

    history_id: str
    failover_log: tuple[tuple[str, int], ...]
    start: int
    end: int
    rows: int

    @property
    def position(self) -> Position:
        """The end, as a place where a stream may go on."""
        log = FailoverLog.of_pairs((int(text, 16), seq) for text, seq in self.failover_log)
        return Position(log, SeqNo(self.end), SeqNo(self.end))


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a folder holds.

    Attributes:
        format_version: The version of this format.
        kind: Whether it has the newest live row of each key, or all changes of a range.
        bucket: The bucket's name.
        created: When the cut was made, in UTC.
        partition_count: How many partitions the bucket had.
        partitions: What there is of each partition, by its number.
        rows: All rows.
        deletions: How many of them are deletions.
        files: The length in bytes of each file below `data`.
        number: Its place in a chain of increments, from 0; 0 of a snapshot.
    """

    kind: Literal["snapshot", "increment"]
    bucket: str
    created: str
    partition_count: int
    partitions: dict[str, PartitionPart]
    rows: int
    deletions: int
    files: dict[str, int]
    number: int = 0
    format_version: int = FORMAT_VERSION

    @property
    def ends(self) -> dict[PartitionId, SeqNo]:
        """Where each partition ends."""
        return {PartitionId(int(name)): SeqNo(part.end) for name, part in self.partitions.items()}

    def write(self, folder: Path) -> None:
        """Makes a folder count: first its data is on disk, then this."""
        sync_folder(folder / DATA_FOLDER)
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        replace_file(folder / MANIFEST, text + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder, once it is sure that all files are there.

        Raises:
            PipelineError: The folder has no manifest, because it was never finished; or the
                manifest has another version; or a file is missing or has another length.
        """
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise PipelineError(
                "UPR_FOLDER",
                f"{folder} has no {MANIFEST}: it is incomplete, or something else",
            ) from None
        try:
            manifest = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PipelineError(
                "UPR_FOLDER", f"{path} is damaged, or of another version: {error}"
            ) from error
        if manifest.format_version != FORMAT_VERSION:
            raise PipelineError(
                "UPR_FOLDER",
                f"{path} is of version {manifest.format_version}, and this library reads "
                f"{FORMAT_VERSION}: use the one it was made with",
            )
        lengths = files_below(folder / DATA_FOLDER)
        for name, nbytes in manifest.files.items():
            if lengths.get(name) != nbytes:
                raise PipelineError(
                    "UPR_FOLDER",
                    f"{folder / DATA_FOLDER / name} has {lengths.get(name, 0)} of its {nbytes} "
                    "bytes: get a whole copy",
                )
        return manifest


def files_below(folder: Path) -> Mapping[str, int]:
    """The lengths of the data files below a folder, by their paths in it. What others have put
    there does not count."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*.parquet"))
        if not path.name.startswith((".", "_"))
    }
