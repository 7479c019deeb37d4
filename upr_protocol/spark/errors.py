"""What goes wrong in a pipeline, with a code in brackets that can be searched for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def sentence_first() -> Iterator[None]:
    """Has a `PipelineError` reach Spark's user as its sentence, without Python's traceback.

    Spark's workers send the traceback before the error's text, 20 lines of it, unless a variable of
    their environment says otherwise (`spark.sql.execution.pyspark.udf.hideTraceback.enabled` sets
    it for all errors). A worker ends after an exception, so that setting it here lasts no longer
    than this error. In processes that are not Spark's workers nothing is set.
    """
    try:
        yield
    except PipelineError:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
