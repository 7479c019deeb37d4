"""The kernel: the few loops that touch every mutation, over buffers, without any policy.

It is built in C where there is a compiler (`native`), and has a twin in Python (`pure`) that does
the same. `UPR_PURE_PYTHON=1` takes the twin even where the native one is there. See
docs/adr/0018-native-kernel.md.

The kernel imports nothing of the other packages, and knows of them only how chunks, frames and the
disk's records are encoded.
"""

from os import environ
from typing import TYPE_CHECKING, Final

from upr_kernel.defects import ChunkDefectError, Defect
from upr_kernel.flags import HAS_PREFIX, HAS_SEQS, MAY_EXPIRE, SEQS_RISE, UNCONDITIONAL

REVISION: Final = 21
"""Raised with each change of the interface: a library that was built before it is not used."""

NATIVE: Final = "native"

BUILD: str

if TYPE_CHECKING or environ.get("UPR_PURE_PYTHON", "0") not in ("", "0"):
    from upr_kernel.pure import (
        Answers,
        KeyTable,
        OpenRows,
        add_runs,
        answer_records,
        check,
        encode_replies,
        find_misplaced,
        gather,
        index_entries,
        join_runs,
        join_sets,
        number_rows,
        pack_header,
        read_header,
        record_mark,
        select_prefix,
        split_rows,
    )

    BUILD = "pure Python: UPR_PURE_PYTHON is set"
else:
    try:
        from upr_kernel._native import REVISION as BUILT_REVISION
        from upr_kernel._native import (
            Answers,
            KeyTable,
            OpenRows,
            add_runs,
            answer_records,
            check,
            encode_replies,
            find_misplaced,
            gather,
            index_entries,
            join_runs,
            join_sets,
            number_rows,
            pack_header,
            read_header,
            record_mark,
            select_prefix,
            split_rows,
        )

        BUILD = NATIVE
        if BUILT_REVISION != REVISION:
            raise ImportError(f"it was built as revision {BUILT_REVISION}, not {REVISION}")
    except ImportError as error:
        from upr_kernel.pure import (
            Answers,
            KeyTable,
            OpenRows,
            add_runs,
            answer_records,
            check,
            encode_replies,
            find_misplaced,
            gather,
            index_entries,
            join_runs,
            join_sets,
            number_rows,
            pack_header,
            read_header,
            record_mark,
            select_prefix,
            split_rows,
        )

        BUILD = f"pure Python: {error}"

__all__ = [
    "BUILD",
    "HAS_PREFIX",
    "HAS_SEQS",
    "MAY_EXPIRE",
    "NATIVE",
    "SEQS_RISE",
    "UNCONDITIONAL",
    "Answers",
    "ChunkDefectError",
    "Defect",
    "KeyTable",
    "OpenRows",
    "add_runs",
    "answer_records",
    "check",
    "encode_replies",
    "find_misplaced",
    "gather",
    "index_entries",
    "join_runs",
    "join_sets",
    "number_rows",
    "pack_header",
    "read_header",
    "record_mark",
    "select_prefix",
    "split_rows",
]
