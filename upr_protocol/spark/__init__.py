"""UPR in Spark: the data source `upr`, which reads, streams and writes (extra `upr-server[spark]`).

`spark.dataSource.register(UprDataSource)` makes it known to a session.
"""

from __future__ import annotations

from upr_protocol.spark.versions import check_versions

check_versions()

from upr_protocol.spark.source import UprDataSource  # noqa: E402  an older PySpark fails inside

__all__ = ["UprDataSource"]
