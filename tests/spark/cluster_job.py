"""A job for `spark-submit`: reads and streams a bucket, loads a file, and writes down which code
ran.

The command line has the URL of a bucket to read, that of one to load, and a folder. It ends with
the exit code of the load.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import upr_protocol
from upr_protocol.spark import UprDataSource
from upr_protocol.spark.commands import bulk_load, latest_state
from upr_protocol.spark.recipes import command


def code_of_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import upr_protocol

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"code": [upr_protocol.__file__] * batch.num_rows})


url, target, folder = *sys.argv[1:3], Path(sys.argv[3])
spark = SparkSession.builder.getOrCreate()
spark.dataSource.register(UprDataSource)
rows = spark.read.format("upr").option("url", url).option("minPartitions", "4").load()
of_tasks = rows.mapInArrow(code_of_task, "code STRING").distinct().collect()
(folder / "result").write_text("\n".join([upr_protocol.__file__, *(row.code for row in of_tasks)]))

words = [url, str(folder / "table"), "--checkpoint", str(folder / "checkpoint"), "--once"]
assert command.run(latest_state.argument_parser(), latest_state.work, words) == 0

table = folder / "planes.csv"
table.write_text("tailnum,seats\nN1,10\nN2,20\n,30\n")
words = [target, str(table), "--format", "csv", "--header", "--key", "tailnum", "--value", "*"]
words += ["--dead-letters", str(folder / "letters")]
sys.exit(command.run(bulk_load.argument_parser(), bulk_load.work, words))
