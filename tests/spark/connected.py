"""A client of Spark Connect: writes to a bucket, reads it, and keeps its latest state in a table;
and, if all is asked for, streams it and takes a snapshot of it.

The command line has the URLs of two buckets, a folder, and `all` or `sample`. `SPARK_REMOTE` says
where Spark is. The last line printed is a JSON object with what was counted.
"""

import json
import sys
from pathlib import Path

from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.connect.session import SparkSession as ConnectSession

from upr_protocol.spark import UprDataSource
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.recipes import keep_latest_state, latest
from upr_protocol.spark.recipes.snapshot import snapshot

url, target, folder, does_all = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "all"
spark = SparkSession.builder.getOrCreate()
assert isinstance(spark, ConnectSession)
spark.dataSource.register(UprDataSource)

rows = spark.range(100).selectExpr("concat('key ', id) AS key", "CAST(id AS STRING) AS value")
rows.write.format("upr").mode("append").option("url", url).save()
changes = spark.read.format("upr").option("url", url).load()
result = {}

if does_all:
    query = (
        spark.readStream.format("upr")
        .option("url", url)
        .load()
        .select("key", "value")
        .writeStream.format("upr")
        .option("url", target)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    snapshot(spark, url, str(folder / "snapshot"))
    result["snapshot"] = spark.read.parquet(str(folder / "snapshot" / "data")).count()
    result["latest"] = latest(changes).count()
try:
    keep_latest_state(spark, url, str(folder / "table"), str(folder / "no-checkpoint"))
    nameless_query = ""
except OptionError as error:
    nameless_query = str(error)
for _ in range(2 if does_all else 1):
    keep_latest_state(
        spark,
        url,
        str(folder / "table"),
        str(folder / "table-checkpoint"),
        app_id="planes",
        available_now=True,
    ).awaitTermination()
try:
    spark.read.format("upr").option("url", url).option("partition", "1").load().count()
    refusal = ""
except PySparkException as error:
    refusal = str(error).splitlines()[0]
result |= {
    "written": changes.count(),
    "table": DeltaTable(folder / "table").count(),
    "refusal": refusal,
    "nameless query": nameless_query,
}
sys.stdout.write(json.dumps(result) + "\n")
