"""The space of an LMDB file: how large it may become, what is left of that, and what to say when
nothing is.

Four things bound a file: the disk's free space, the memory map, the setting `disk_bytes_max`, and
the system's limit of a file's size (`ulimit -f`). The errors name the one that a user can change.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Final, NamedTuple

from upr_server.storage.errors import DiskFullError

MAP_BYTES_DEFAULT: Final = 256 * 1024 * 1024 * 1024
"""The largest memory map by default. A process has 128 TiB of addresses, and each bucket takes two
maps. With maps as large as a disk of 4 TiB no addresses would be left for the 16th bucket, or for
existing buckets once the disk has grown. With this limit 250 buckets fit, whatever the disk. The
setting `disk_bytes_max` gives a bucket more."""

MAP_BYTES_MIN: Final = 1024 * 1024
"""The smallest memory map that works."""

PAGE_BYTES: Final = resource.getpagesize()
"""What the size of a memory map is a multiple of."""


class FileSizes(NamedTuple):
    """What a file takes.

    Attributes:
        used_bytes: Bytes of the pages that records are in.
        file_bytes: Bytes of all pages that were ever in use.
    """

    used_bytes: int
    file_bytes: int


class LmdbSpace:
    """The space of one file.

    Args:
        path: The file's folder.
        bytes_max: See below.

    Attributes:
        bytes_max: How large the file may become; 0 for as large as the disk is at the time, but no
            larger than `MAP_BYTES_DEFAULT`.
        map_bytes: The size of the memory map.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self.bytes_max = bytes_max
        self.map_bytes = 0

    def wanted_map_bytes(self) -> int:
        """How large the memory map should be, given the disk as it is now, and the system's limit
        of a file's size: a write beyond the map changes nothing, and one beyond the limit may be
        cut in the middle of a page."""
        map_bytes = self.bytes_max
        if not map_bytes:
            try:
                disk = os.statvfs(self._path)
                map_bytes = min(disk.f_frsize * disk.f_blocks, MAP_BYTES_DEFAULT)
            except OSError:
                # LMDB makes a folder that is missing, and says what else is wrong with it.
                map_bytes = MAP_BYTES_DEFAULT
        limit_bytes = system_limit_bytes()
        return max(min(map_bytes, limit_bytes - limit_bytes % PAGE_BYTES), MAP_BYTES_MIN)

    def free_bytes(self, sizes: FileSizes) -> int:
        """How much can still be written, given the disk's space and the memory map's size."""
        return min(self._free_in_map(sizes), self._free_on_disk(sizes))

    def _free_in_map(self, sizes: FileSizes) -> int:
        limit_bytes = system_limit_bytes()
        if limit_bytes >= self.map_bytes:
            return self.map_bytes - sizes.used_bytes
        if limit_bytes < sizes.file_bytes:
            # It was lowered since. Free pages may lie where nothing can be written.
            return 0
        return limit_bytes - sizes.used_bytes

    def _free_on_disk(self, sizes: FileSizes) -> int:
        disk = os.statvfs(self._path)
        free_in_file = max(0, sizes.file_bytes - sizes.used_bytes)
        return disk.f_bavail * disk.f_frsize + free_in_file

    @property
    def is_smaller_than_disk(self) -> bool:
        """Whether a setting bounds the file, or its default, or the system's limit of a file's
        size, and not the disk's size."""
        is_limited = system_limit_bytes() < self.map_bytes + PAGE_BYTES
        return bool(self.bytes_max) or self.map_bytes >= MAP_BYTES_DEFAULT or is_limited

    def no_reserve_error(self, sizes: FileSizes, reserve_bytes: int) -> DiskFullError:
        """Says that less than `reserve_bytes` is left, and what bounds the file."""
        free_in_map, free_on_disk = self._free_in_map(sizes), self._free_on_disk(sizes)
        rest = f"bytes left; the last {reserve_bytes} are for compaction"
        if self.is_smaller_than_disk and free_in_map < free_on_disk:
            return self.limit_error(f"has {max(0, free_in_map)} {rest}")
        return DiskFullError(f"the disk of {self._path} has {free_on_disk} {rest}; make room there")

    def limit_error(self, text: str) -> DiskFullError:
        """Says that the file has reached its bound, which is not the disk; `text` follows the
        bound."""
        limit_bytes = system_limit_bytes()
        if limit_bytes < self.map_bytes + PAGE_BYTES:
            return DiskFullError(
                f"{self._path} may have {limit_bytes} bytes (ulimit -f), and {text}; release "
                "leases, or raise the limit of a file's size: `prlimit --fsize=unlimited --pid "
                f"{os.getpid()}`"
            )
        return DiskFullError(
            f"{self._path} may have {self.map_bytes} bytes (disk_bytes_max), and {text}; release "
            "leases, or raise disk_bytes_max"
        )


def system_limit_bytes() -> int:
    """How large the system lets a file become that this process writes."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return sys.maxsize if soft_limit == resource.RLIM_INFINITY else soft_limit
