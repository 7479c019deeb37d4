"""Flips bits in single records of a log, in the file of a real LMDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.offline.bucket_files import open_map


@contextmanager
def opened_log(bucket: Path) -> Iterator[LmdbOrderedMap]:
    """The log of the bucket in a folder, read-only."""
    log = open_map(bucket / "log")
    try:
        yield log
    finally:
        log.close()


def records(bucket: Path, first: bytes = b"\1") -> dict[bytes, bytes]:
    """Every record of a bucket's log whose key begins with `first`; all but the number of the last
    commit by default."""
    last = b"\xff" * 64 if first == b"\1" else first + b"\xff" * 64
    with opened_log(bucket) as log, log.read() as transaction:
        return {key: bytes(value) for key, value in transaction.scan(first, last)}


def flip(bucket: Path, key: bytes, bit: int) -> None:
    """Flips one bit of a record's value, at each place where the file has it."""
    with opened_log(bucket) as log, log.read() as transaction:
        value = bytes(transaction.get(key) or b"")
    flip_in_file(bucket / "log" / "data.mdb", key, value, bit)


def flip_in_file(file: Path, key: bytes, value: bytes, bit: int) -> None:
    """Flips one bit of a record in an LMDB file, at each place where the file has the record."""
    damaged = bytearray(value)
    damaged[bit // 8] ^= 1 << bit % 8
    content = file.read_bytes()
    # LMDB stores a short value directly after its key.
    assert key + value in content, key
    # Written in place, because a server may have mapped the file.
    with file.open("r+b") as writable:
        place = content.find(key + value)
        while place >= 0:
            writable.seek(place)
            writable.write(key + damaged)
            place = content.find(key + value, place + 1)
