"""What `check` says of a chunk: bits of one number."""

from typing import Final

UNCONDITIONAL: Final = 1
"""Every mutation is a `SET` that expects no CAS: such a published chunk cannot fail."""

MAY_EXPIRE: Final = 2
"""A mutation has an expiry time."""

HAS_PREFIX: Final = 4
"""A key begins with the prefix that was asked for."""

HAS_SEQS: Final = 8
"""A mutation has a sequence number, which a published chunk has not."""

SEQS_RISE: Final = 16
"""The sequence numbers rise strictly, and lie in (start, end]: the chunk may be a stored one."""
