"""An LMDB file, looked at without mapping it.

A page that a file lacks kills whoever touches it in a memory map, with SIGBUS. So before a file is
mapped whose length leaves doubts, its trees are walked with ordinary reads. Only what is needed for
that is known here of LMDB's format, version 1: where the last commit's meta page leads, and which
pages a page refers to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import BinaryIO, Final

import attrs

from upr_server.storage.errors import CorruptionError

_HEADER_BYTES: Final = 16

_META: Final = Struct("<16x4x4x8x8xI36xQ40xQQQ")
"""Of a meta page: bytes of a page, root of the tree of free pages, root of the tree of records, the
number of the last page in use, and the commit's number."""

_PAGE: Final = Struct("<QHHH")
"""Of each page: its number, two bytes without meaning, its kind, and where its offsets end."""

_OFFSET: Final = Struct("<H")
_NODE: Final = Struct("<HHHH")
"""Of each node: the size of its value in two halves, its flags, and the size of its key. In a
branch the first three are the number of the page below."""

_NUMBER: Final = Struct("<Q")

_BRANCH, _LEAF = 0x01, 0x02
_IS_BIG: Final = 0x01
"""The flag of a node whose value has pages of its own."""

NO_PAGE: Final = (1 << 64) - 1
"""The root of an empty tree."""

DEPTH_MAX: Final = 32
"""LMDB's own bound. What is deeper is a circle."""


@attrs.frozen
class LastCommit:
    """What a file's newer meta page says.

    Attributes:
        page_bytes: Bytes of a page.
        roots: The pages where its trees begin; none for an empty tree.
        last_page: The number of the last page that was ever in use.
        number: The commit's number.
    """

    page_bytes: int
    roots: tuple[int, ...]
    last_page: int
    number: int


def read_last_commit(file: BinaryIO) -> LastCommit | None:
    """The last commit of a file; None if it is too short to have one."""
    first_commit = _meta_at(file, 0)
    if first_commit is None or first_commit.page_bytes < _META.size:
        return None
    second_commit = _meta_at(file, first_commit.page_bytes)
    if second_commit is None:
        return None
    return max(first_commit, second_commit, key=lambda commit: commit.number)


def _meta_at(file: BinaryIO, place: int) -> LastCommit | None:
    file.seek(place)
    page = file.read(_META.size)
    if len(page) < _META.size:
        return None
    page_bytes, free_root, root, last_page, commit_number = _META.unpack(page)
    roots = tuple(page for page in (free_root, root) if page != NO_PAGE)
    return LastCommit(page_bytes, roots, last_page, commit_number)


def check_length(path: Path) -> None:
    """Checks that a file has every page that its last commit uses. O(1), mostly: LMDB does not
    write pages at the end that are free again, so only if the file is shorter than its meta page
    says, its trees are walked. Nobody may write it meanwhile.

    Args:
        path: The file.

    Raises:
        CorruptionError: A page is missing, or the trees are damaged.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        commit = read_last_commit(file)
        if commit is None:
            raise CorruptionError(f"{path} is shorter than its two meta pages")
        nbytes = file.seek(0, 2)
        if nbytes >= (commit.last_page + 1) * commit.page_bytes:
            return
        for page, count in _pages_in_use(file, commit):
            if (page + count) * commit.page_bytes > nbytes:
                raise CorruptionError(
                    f"{path} was cut off: it has {nbytes} bytes, and its last commit uses page "
                    f"{page + count - 1} of {commit.page_bytes} bytes behind them"
                )


def _pages_in_use(file: BinaryIO, commit: LastCommit) -> Iterator[tuple[int, int]]:
    """The pages of the commit's trees, each with how many pages it is in a row. A page comes before
    it is read."""
    pages = [(root, 1) for root in commit.roots]
    while pages:
        page, depth = pages.pop()
        yield page, 1
        if depth > DEPTH_MAX:
            raise CorruptionError(f"{file.name} has a page that leads to itself")
        file.seek(page * commit.page_bytes)
        data = file.read(commit.page_bytes)
        try:
            page_number, _, kind, end = _PAGE.unpack_from(data)
            if page_number != page or not kind & (_BRANCH | _LEAF):
                raise CorruptionError(f"page {page} of {file.name} is damaged")
            for place in range(_HEADER_BYTES, end, _OFFSET.size):
                (offset,) = _OFFSET.unpack_from(data, place)
                low, high, flags, key_bytes = _NODE.unpack_from(data, offset)
                # A branch has a child's page number where a leaf has the length of a value, with
                # the upper bits in the flags. A large value lies in pages of its own.
                if kind & _BRANCH:
                    pages.append((low | high << 16 | flags << 32, depth + 1))
                elif flags & _IS_BIG:
                    (first_page,) = _NUMBER.unpack_from(data, offset + _NODE.size + key_bytes)
                    nbytes = _HEADER_BYTES + (low | high << 16)
                    yield first_page, -(-nbytes // commit.page_bytes)
        except StructError as error:
            raise CorruptionError(f"page {page} of {file.name} is damaged") from error
