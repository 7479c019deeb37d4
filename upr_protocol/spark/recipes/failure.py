"""What went wrong inside Spark, as the error of the data source that it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_protocol.errors import UprError
from upr_protocol.spark.errors import OptionError, PipelineError

_CODED: Final = re.compile(r"\[(UPR_[A-Z_]+)\] (.+)")


def pipeline_error(error: BaseException) -> PipelineError | None:
    """The data source's error in what Spark raised; None when it was another's.

    The data source runs in processes of its own. What is left of its errors here is their text,
    among tracebacks of several languages.
    """
    match = _CODED.search(str(error))
    if match is None:
        return None
    code, sentence = match[1], match[2].strip()
    return OptionError(sentence) if code == "UPR_OPTION" else PipelineError(code, sentence)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raises the data source's own errors in place of Spark's that hold them.

    Raises:
        PipelineError: The data source failed inside. Other errors of Spark stay as they are.
    """
    try:
        yield
    except UprError:
        raise
    except Exception as error:
        # Some come as Spark's, some as those of the bridge to the JVM.
        plain = pipeline_error(error)
        if plain is None:
            raise
        raise plain from error
