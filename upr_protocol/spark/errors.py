"""What goes wrong in a pipeline, with a code in brackets that can be searched for."""

from __future__ import annotations

from upr_protocol.errors import UprError


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
