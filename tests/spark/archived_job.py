"""A job for `spark-submit`: reads and streams a bucket, and writes down which code ran.

The command line has the bucket's URL and a folder for what is streamed and written.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import upr_protocol
from upr_protocol.spark import UprDataSource


def code_of_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import upr_protocol

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"code": [upr_protocol.__file__] * batch.num_rows})


url, folder = sys.argv[1], Path(sys.argv[2])
spark = SparkSession.builder.getOrCreate()
spark.dataSource.register(UprDataSource)
rows = spark.read.format("upr").option("url", url).load()
changes = spark.readStream.format("upr").option("url", url).load()
query = (
    changes.writeStream.format("parquet")
    .option("path", str(folder / "rows"))
    .option("checkpointLocation", str(folder / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
of_tasks = rows.mapInArrow(code_of_task, "code STRING").distinct().collect()
lines = [
    upr_protocol.__file__,
    *(row.code for row in of_tasks),
    str(spark.read.parquet(str(folder / "rows")).count()),
]
(folder / "result").write_text("\n".join(lines))
