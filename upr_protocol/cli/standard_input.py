"""Standard input, where a command takes it in place of a value or a file."""

from __future__ import annotations

import sys

from upr_protocol.cli.errors import BadInputError
from upr_protocol.limits import VALUE_BYTES_MAX


def read_standard_input() -> bytes:
    """All of it, to be stored as one value.

    Raises:
        OSError: It cannot be read; the error names it.
        BadInputError: It is longer than a value may be.
    """
    try:
        data = sys.stdin.buffer.read(VALUE_BYTES_MAX + 1)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard input") from error
    if len(data) > VALUE_BYTES_MAX:
        raise BadInputError(
            f"standard input has more than {VALUE_BYTES_MAX >> 20} MiB, the limit of a value; "
            "store less at a key"
        )
    return data
