"""The kernel in Python: what the native one does, and the description of what that is."""

from upr_kernel.pure.answer_records import answer_records
from upr_kernel.pure.answers import Answers
from upr_kernel.pure.bundles import join_runs
from upr_kernel.pure.chunks import check, gather, number_rows, select_prefix
from upr_kernel.pure.frames import encode_replies, join_sets, pack_header, read_header
from upr_kernel.pure.key_index import index_entries
from upr_kernel.pure.key_table import KeyTable
from upr_kernel.pure.open_rows import OpenRows
from upr_kernel.pure.partition import find_misplaced
from upr_kernel.pure.record_marks import record_mark
from upr_kernel.pure.runs import add_runs
from upr_kernel.pure.split_rows import split_rows

__all__ = [
    "Answers",
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
