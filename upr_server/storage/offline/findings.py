"""What an inspection of a bucket finds: problems, each with what to do, and its progress."""

from __future__ import annotations

from typing import Final

import msgspec

LOG_ADVICE: Final = (
    "restore the bucket from a backup, or let a replica take over and run `upr-server mend`; the "
    "server refuses what is damaged and never serves it"
)
INDEX_ADVICE: Final = (
    "stop the server and delete the file data.mdb in the bucket's folder index; the server "
    "rebuilds it from the log when it runs again"
)


class Problem(msgspec.Struct, frozen=True, tag=True):
    """What is wrong, and what to do.

    Attributes:
        bucket: The bucket.
        partition: The partition; None for the bucket as a whole.
        description: What is wrong.
        advice: What to do.
    """

    bucket: str
    partition: int | None
    description: str
    advice: str

    def __str__(self) -> str:
        place = f"bucket {self.bucket}"
        if self.partition is not None:
            place += f", partition {self.partition}"
        return f"{place}: {self.description}; {self.advice}"


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What was read since the last report of progress.

    Attributes:
        chunks: Chunks.
        chunk_bytes: Bytes of chunks.
        records: Records of both maps; of a dump, mutations.
    """

    chunks: int = 0
    chunk_bytes: int = 0
    records: int = 0


class Stage(msgspec.Struct, frozen=True, tag=True):
    """A stage of the inspection begins.

    Attributes:
        number: The stage's number.
        text: What it reads.
        partition: The partition that it reads; None for the whole bucket.
        is_index: Whether it reads the index alone.
    """

    number: int
    text: str
    partition: int | None = None
    is_index: bool = False


Finding = Problem | Progress | Stage


class Damage(msgspec.Struct, frozen=True):
    """A problem as a stage reports it.

    Attributes:
        description: What is wrong.
        partition: The partition; None for the bucket as a whole.
        is_in_index: Whether only the index is damaged, which can be rebuilt.
    """

    description: str
    partition: int | None = None
    is_in_index: bool = False


Report = Damage | Progress
"""What a stage yields."""
