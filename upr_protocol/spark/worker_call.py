"""What Spark's calls of the data source have in common."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from upr_protocol.spark.errors import PipelineError


@contextmanager
def worker_call() -> Iterator[None]:
    """A call that one of Spark's Python workers makes. In other processes it changes nothing.

    A `PipelineError` shows Spark's user its sentence, without Python's traceback. The workers send
    the traceback before the error's text, 20 lines of it, unless a variable of their environment
    says otherwise (`spark.sql.execution.pyspark.udf.hideTraceback.enabled` sets it for all errors).
    A worker ends after an exception, so that setting it here lasts no longer than this error.

    And the first call that ends well makes the worker's garbage collections cheaper. A worker that
    is used again collects after each task, in `pyspark.daemon`, before it takes the next one.
    PySpark, pandas and PyArrow have imported some ninety thousand objects, and to look at all of
    them took 45 ms of the 53 that a small task costs its worker. What lives when the call ends is
    left out from then on.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    process = "" if spec is None else spec.name
    try:
        yield
    except PipelineError:
        if process.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
    if process == "pyspark.daemon" and not gc.get_freeze_count():
        gc.freeze()
