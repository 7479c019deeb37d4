"""The kernel in Python: what the native one does, and the description of what that is."""

from upr_kernel.pure.answers import Answers
from upr_kernel.pure.chunks import check, gather, select_prefix
from upr_kernel.pure.frames import SetFrame, join_sets
from upr_kernel.pure.key_table import KeyTable
from upr_kernel.pure.open_rows import OpenRows, add_runs
from upr_kernel.pure.partition import find_misplaced

__all__ = [
    "Answers",
    "KeyTable",
    "OpenRows",
    "SetFrame",
    "add_runs",
    "check",
    "find_misplaced",
    "gather",
    "join_sets",
    "select_prefix",
]
