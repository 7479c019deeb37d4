"""The checksummed file against crashes and damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from upr_protocol import durable_files
from upr_protocol.client.rollback import checksummed_file
from upr_protocol.client.rollback.checksummed_file import ChecksummedFile, DamagedFileError


def log_with(path: Path, *records: bytes) -> bytes:
    log, _ = ChecksummedFile.open(path)
    for record in records:
        log.append(record)
    log.close()
    return path.read_bytes()


def records_of(path: Path) -> list[bytes]:
    log, records = ChecksummedFile.open(path)
    log.close()
    return records


def test_a_torn_tail_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "records"
    before = log_with(path, b"one", b"two")
    data = log_with(path, b"three")
    for length in range(len(before), len(data)):
        path.write_bytes(data[:length])
        assert records_of(path) == [b"one", b"two"]
        assert path.read_bytes() == before
        # The file had its length before it had its contents.
        path.write_bytes(data[:length] + bytes(len(data) - length))
        assert records_of(path) == [b"one", b"two"]
    path.write_bytes(data)
    assert records_of(path) == [b"one", b"two", b"three"]


def test_a_torn_tail_that_cannot_be_cut_off_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application that tries again and again ran out of descriptors."""
    path = tmp_path / "records"
    path.write_bytes(log_with(path, b"one") + b"torn")
    before = set(os.listdir("/proc/self/fd"))

    def fail(_file: int) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="the disk failed"):
            ChecksummedFile.open(path)
    assert set(os.listdir("/proc/self/fd")) == before
    assert records_of(path) == [b"one"]


def test_damage_raises_an_error_and_is_never_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records"
    before = log_with(path, b"one", b"two")
    data = log_with(path, b"three")
    for index in range(len(before)):
        damaged = bytearray(data)
        damaged[index] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match="damaged at byte"):
            records_of(path)


def test_records_are_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "records"
    log, _ = ChecksummedFile.open(path)
    log.append(b"one")
    log.replace([b"two", b"three"])
    log.append(b"four")
    log.close()
    assert records_of(path) == [b"two", b"three", b"four"]


def test_ctrl_c_leaves_nothing_of_the_record_that_it_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application's own thread may write: `RollbackConsumer.flush_received_keys`."""
    path = tmp_path / "records"
    log, _ = ChecksummedFile.open(path)
    log.append(b"one")

    def append_and_fail(record: bytes, error: type[BaseException]) -> None:
        def fail(_file: int) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(error):
                log.append(record)

    append_and_fail(b"two", KeyboardInterrupt)
    log.append(b"three")
    append_and_fail(b"four", OSError)
    log.close()
    assert records_of(path) == [b"one", b"three"]


def test_a_replaced_file_is_written_on_once_its_name_survives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written on under no name: what was appended to it was lost at the next start."""
    path = tmp_path / "records"
    log, _ = ChecksummedFile.open(path)
    log.append(b"old")

    def fail(_path: Path) -> None:
        raise OSError("no folder")

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "sync_path", fail)
        patch.setattr(checksummed_file, "sync_path", fail)
        with pytest.raises(OSError, match="no folder"):
            log.replace([b"new"])
        with pytest.raises(OSError, match="no folder"):
            log.append(b"refused")
    log.append(b"more")
    log.close()
    assert records_of(path) == [b"new", b"more"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_not_open_writes_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """The next file that was opened had the number of the one that was closed, and the record was
    written to it."""
    path, open_file = tmp_path / "records", os.open

    def fail_to_append(name: Path, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & os.O_APPEND:
            raise OSError(errno.ENFILE, "too many open files")
        return open_file(name, flags, mode, **options)

    log, _ = ChecksummedFile.open(path)
    if is_replaced:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail_to_append)
            with pytest.raises(OSError, match="too many"):
                log.replace([b"one"])
    else:
        log.close()
    with (tmp_path / "other").open("wb") as other:
        with pytest.raises(OSError, match="Bad file descriptor"):
            log.append(b"two")
        log.close()
        assert os.fstat(other.fileno()).st_size == 0
    assert records_of(path) == [b"one"] * is_replaced
