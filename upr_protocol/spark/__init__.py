"""UPR in Spark: the data source `upr`, which reads, streams and writes (extra `upr-server[spark]`).

`spark.dataSource.register(UprDataSource)` makes it known to a session.
"""

from __future__ import annotations

import os.path
import sys

from upr_protocol.start import exit_on_interrupt

if sys.argv[:1] == ["-m"] or os.path.realpath(*sys.argv[:1]).startswith(
    os.path.join(os.path.dirname(os.path.realpath(__file__)), "commands", "")
):
    # Python looks for the module that `python -m` is to run, and comes by here; or it runs the file
    # of a recipe, which imports what it needs.
    exit_on_interrupt()

from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.versions import check_versions

try:
    check_versions()
except (ModuleNotFoundError, PipelineError) as error:
    # Python says so while it looks for the module that `python -m` is to run: a command ends with a
    # sentence, and a program with an exception.
    if sys.argv[:1] == ["-m"]:
        sys.exit(str(error))
    raise

from upr_protocol.spark.source import UprDataSource

__all__ = ["UprDataSource"]
