"""UPR in Spark: the data source `upr`, which reads, streams and writes (extra `upr[spark]`).

`spark.dataSource.register(UprDataSource)` makes it known to a session.
"""

from __future__ import annotations

try:
    from upr_protocol.spark.source import UprDataSource
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "pyarrow", "pyspark"):
        raise
    raise ModuleNotFoundError(
        f"the data source `upr` needs PySpark: pip install 'upr[spark]' ({error})", name=error.name
    ) from error

__all__ = ["UprDataSource"]
