"""Records what LMDB writes, by replacing the system calls of its library.

A shared library calls the system through a table of addresses, the global offset table. The entries
of calls that change a file are replaced by functions that record the write and then make it. This
works for 64-bit ELF libraries, as on Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from struct import Struct, unpack_from
from typing import Any, Final

import msgspec

SYNCED_FLAGS: Final = os.O_DSYNC | os.O_SYNC

_PROGRAM: Final = Struct("<IIQQQQQQ")
_DYNAMIC: Final = Struct("<qQ")
_RELOCATION: Final = Struct("<QQq")
_SYMBOL: Final = Struct("<IBBHQQ")

_LOAD, _DYNAMIC_SEGMENT = 1, 2
_STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATIONS_SIZE, _JUMPS, _JUMPS_SIZE = 5, 6, 7, 8, 23, 2

# GLOB_DAT and JUMP_SLOT of x86-64 and of AArch64.
_ADDRESSES: Final = frozenset((6, 7, 1025, 1026))


class Write(msgspec.Struct, tag=True, frozen=True):
    """Bytes were written; they are on disk at once if `is_synced`, otherwise after the next
    `Sync`."""

    offset: int
    data: bytes
    is_synced: bool


class Sync(msgspec.Struct, tag=True, frozen=True):
    """Everything written so far is on disk."""


class Resize(msgspec.Struct, tag=True, frozen=True):
    """The length of the file was set."""

    length: int


class Reported(msgspec.Struct, tag=True, frozen=True):
    """A commit was reported as done; `digest` is of everything that the file then had."""

    digest: bytes


Event = Write | Sync | Resize | Reported


class Recording(msgspec.Struct, frozen=True):
    """The file at the start, all of it on disk, and what was done with it afterwards."""

    image: bytes
    digest: bytes
    events: list[Event]


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def is_possible() -> bool:
    """Whether the library has such a table."""
    return sys.platform == "linux" and sys.maxsize > 1 << 32 and sys.byteorder == "little"


class WriteRecorder:
    """Records what this process's LMDB does with `path`, until the process ends."""

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self._path = path.resolve()
        self._kept: list[Any] = []
        descriptor, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        offset, result = ctypes.c_int64, ctypes.c_ssize_t
        self._replaced = {
            name: ctypes.CFUNCTYPE(*kinds)(function)
            for name, kinds, function in (
                ("pwrite", (result, descriptor, pointer, size, offset), self._pwrite),
                ("pwrite64", (result, descriptor, pointer, size, offset), self._pwrite),
                ("write", (result, descriptor, pointer, size), self._write),
                ("writev", (result, descriptor, pointer, descriptor), self._writev),
                ("ftruncate", (descriptor, descriptor, offset), self._ftruncate),
                ("ftruncate64", (descriptor, descriptor, offset), self._ftruncate),
                ("fdatasync", (descriptor, descriptor), self._sync),
                ("fsync", (descriptor, descriptor), self._sync),
            )
        }
        library = Path(str(import_module("lmdb.cpython").__file__)).resolve()
        base = _base_of(library)
        redirected = set()
        for name, address in _slots(library.read_bytes()):
            if name in ("pwritev", "pwritev64", "pwritev2", "msync", "sync_file_range"):
                # LMDB does not use these calls for files that it writes. If it did, this module
                # would have to record them.
                self._redirect(base + address, ctypes.CFUNCTYPE(descriptor)(self._unknown))
            elif name in self._replaced:
                redirected.add(name)
                self._redirect(base + address, self._replaced[name])
        if not redirected & {"pwrite", "pwrite64"} or "fdatasync" not in redirected:
            raise RuntimeError(f"of the calls that LMDB makes only {sorted(redirected)} were found")

    def _redirect(self, slot: int, function: Any) -> None:
        self._kept.append(function)
        page = slot & -mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        ctypes.c_void_p.from_address(slot).value = ctypes.cast(function, ctypes.c_void_p).value

    # What is called instead.

    def _is_ours(self, descriptor: int) -> bool:
        return Path(f"/proc/self/fd/{descriptor}").readlink() == self._path

    def _note(self, descriptor: int, offset: int, data: bytes) -> None:
        if self._is_ours(descriptor):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            self.events.append(Write(offset, data, bool(flags & SYNCED_FLAGS)))

    def _pwrite(self, descriptor: int, address: int, length: int, offset: int) -> int:
        data = ctypes.string_at(address, length)
        self._note(descriptor, offset, data)
        return os.pwrite(descriptor, data, offset)

    def _write(self, descriptor: int, address: int, length: int) -> int:
        data = ctypes.string_at(address, length)
        self._note(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), data)
        return os.write(descriptor, data)

    def _writev(self, descriptor: int, address: int, count: int) -> int:
        vectors = (_Vector * count).from_address(address)
        data = b"".join(ctypes.string_at(vector.base, vector.length) for vector in vectors)
        self._note(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), data)
        return os.write(descriptor, data)

    def _ftruncate(self, descriptor: int, length: int) -> int:
        if self._is_ours(descriptor):
            self.events.append(Resize(length))
        os.ftruncate(descriptor, length)
        return 0

    def _sync(self, descriptor: int) -> int:
        # Only recorded: what a crash of the machine loses is decided afterwards.
        if self._is_ours(descriptor):
            self.events.append(Sync())
        return 0

    def _unknown(self) -> int:
        return -1


def _base_of(library: Path) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(library) and int(fields[2], 16) == 0:
            return int(fields[0].partition("-")[0], 16)
    raise RuntimeError(f"{library} is not loaded")


def _slots(elf: bytes) -> Iterator[tuple[str, int]]:
    """The names of the functions that a library calls, and the offsets at which it stores their
    addresses."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise RuntimeError("not an ELF library of 64 bits")
    (programs_at,) = unpack_from("<Q", elf, 32)
    entry_bytes, entries = unpack_from("<HH", elf, 54)
    programs = [_PROGRAM.unpack_from(elf, programs_at + entry_bytes * n) for n in range(entries)]
    in_file = _to_file([fields for fields in programs if fields[0] == _LOAD])
    dynamic: dict[int, int] = {}
    for kind, _, offset, _, _, length, _, _ in programs:
        if kind == _DYNAMIC_SEGMENT:
            dynamic = dict(_DYNAMIC.iter_unpack(elf[offset : offset + length]))
    strings, symbols = in_file(dynamic[_STRINGS]), in_file(dynamic[_SYMBOLS])
    for table, size in ((_JUMPS, _JUMPS_SIZE), (_RELOCATIONS, _RELOCATIONS_SIZE)):
        if table not in dynamic:
            continue
        start = in_file(dynamic[table])
        for address, info, _ in _RELOCATION.iter_unpack(elf[start : start + dynamic[size]]):
            if info & 0xFFFF_FFFF in _ADDRESSES:
                symbol = _SYMBOL.unpack_from(elf, symbols + _SYMBOL.size * (info >> 32))
                name_at = strings + symbol[0]
                yield elf[name_at : elf.index(b"\0", name_at)].decode(), address


def _to_file(loads: list[tuple[Any, ...]]) -> Callable[[int], int]:
    def in_file(address: int) -> int:
        for _, _, offset, start, _, length, _, _ in loads:
            if start <= address < start + length:
                return int(address - start + offset)
        raise RuntimeError(f"nothing at {address:#x}")

    return in_file
