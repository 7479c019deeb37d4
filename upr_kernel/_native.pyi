# What the library in C offers. The signatures are those of the pure twin.

from typing import Final

from upr_kernel.pure import Answers as Answers
from upr_kernel.pure import KeyTable as KeyTable
from upr_kernel.pure import OpenRows as OpenRows
from upr_kernel.pure import add_runs as add_runs
from upr_kernel.pure import answer_records as answer_records
from upr_kernel.pure import check as check
from upr_kernel.pure import encode_replies as encode_replies
from upr_kernel.pure import find_misplaced as find_misplaced
from upr_kernel.pure import gather as gather
from upr_kernel.pure import index_entries as index_entries
from upr_kernel.pure import join_runs as join_runs
from upr_kernel.pure import join_sets as join_sets
from upr_kernel.pure import number_rows as number_rows
from upr_kernel.pure import pack_header as pack_header
from upr_kernel.pure import read_header as read_header
from upr_kernel.pure import record_mark as record_mark
from upr_kernel.pure import select_prefix as select_prefix
from upr_kernel.pure import split_rows as split_rows

REVISION: Final[int]
