"""What goes wrong in a pipeline, with a code in brackets that can be searched for."""

from __future__ import annotations

from typing import Final

from upr_protocol.client import Address
from upr_protocol.errors import BrokenError, ServerError, Status, TlsError, UprError

_CODES: Final = {
    Status.RANGE_GONE: "UPR_RANGE_GONE",
    Status.ROLLBACK: "UPR_ROLLBACK",
    Status.NO_BUCKET: "UPR_NO_BUCKET",
    Status.LIMIT_REACHED: "UPR_LIMIT",
}


class PipelineError(UprError):
    """A read, a stream or a write of Spark's cannot go on.

    Attributes:
        code: What it is about, as `UPR_ROLLBACK`; it stands first in the text, in brackets.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"[{code}] {sentence}")
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # It crosses from one process to another.
        return type(self), (self.code, str(self).removeprefix(f"[{self.code}] "))


class OptionError(PipelineError):
    """An option is missing, unknown, or has a value that it cannot have."""

    def __init__(self, sentence: str) -> None:
        super().__init__("UPR_OPTION", sentence)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self).removeprefix(f"[{self.code}] "),)


def as_pipeline_error(
    error: UprError, address: Address, timeout_s: int | None = None
) -> PipelineError:
    """The `PipelineError` for an error that another attempt does not mend.

    Args:
        error: The error.
        address: The server that was asked.
        timeout_s: How long a server that is away was waited for; None to leave that out.
    """
    if isinstance(error, PipelineError):
        return error
    code, advice = "UPR_SERVER", ""
    if isinstance(error, ServerError):
        code = _CODES.get(error.status, code)
    elif isinstance(error, BrokenError):
        code = "UPR_UNREACHABLE"
        if timeout_s is not None:
            advice = (
                f"; waited {timeout_s} s for the server (timeoutSeconds). Start it, or correct the "
                "option url, and run this again"
            )
    elif isinstance(error, TlsError):
        code = "UPR_TLS"
    return PipelineError(code, f"{address}: {error}{advice}")
