"""The client of S1, S2 and S3: a Spark of two cores, with the data source `upr`.

It moves rows from a source to a sink: buckets, folders of Parquet, the Python data source that does
nothing (`empty:ROWS`), or the sink that drops what it gets (`noop`, which asks for every column of
every row).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import SparkSession

from benchmarks.kit.commands import Commands
from benchmarks.kit.empty_source import EmptyDataSource
from benchmarks.kit.processor import tree_s
from upr_protocol.spark import UprDataSource

KEY_BYTES: Final = 16
VALUE_BYTES: Final = 112

ALL_COLUMNS: Final = 12
FEW_COLUMNS: Final = 2
KEYS_AND_VALUES: Final = "key BINARY, value BINARY"
"""The schema of a read of two columns."""

_FILES: Final = 4


def make_rows(folder: Path, rows: int) -> None:
    """Writes the rows as Parquet, uncompressed: a number of 16 digits, and 112 random bytes."""
    draw = np.random.default_rng(1)
    folder.mkdir()
    for index in range(_FILES):
        first, end = rows * index // _FILES, rows * (index + 1) // _FILES
        keys = b"".join(b"%0*d" % (KEY_BYTES, index) for index in range(first, end))
        values = draw.bytes(VALUE_BYTES * (end - first))
        table = pa.table({"key": _fixed(keys, KEY_BYTES), "value": _fixed(values, VALUE_BYTES)})
        parquet.write_table(
            table, folder / f"{index}.parquet", compression="none", use_dictionary=False
        )


def _fixed(data: bytes, size: int) -> pa.Array:
    offsets = np.arange(0, len(data) + 1, size, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _session(folder: str) -> SparkSession:
    # The workers import the data source that does nothing.
    root = str(Path(__file__).parents[2])
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", PYTHONPATH=root)
    builder = SparkSession.builder.master("local[2]").appName("benchmarks")
    for name, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": folder,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": folder,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(UprDataSource)
    spark.dataSource.register(EmptyDataSource)
    return spark


def _options(place: str) -> dict[str, str]:
    """What a source or a sink is told: a place is a bucket's URL, `empty:ROWS`, a folder, or
    nothing."""
    if place.startswith("upr:"):
        return {"url": place}
    if place.startswith("empty:"):
        return {"rows": place.removeprefix("empty:")}
    return {"path": place, "compression": "none"} if place else {}


def _format(place: str) -> str:
    kind = place.partition(":")[0]
    if kind in ("upr", "empty"):
        return kind
    return "parquet" if place else "noop"


def _reader(reader: Any, source: str, columns: int) -> Any:
    reader = reader.format(_format(source)).options(**_options(source))
    if _format(source) == "empty":
        return reader.option("columns", columns)
    return reader.schema(KEYS_AND_VALUES) if columns == FEW_COLUMNS else reader


def _move(spark: SparkSession, source: str, sink: str, columns: int) -> None:
    frame = _reader(spark.read, source, columns).load()
    mode = "append" if _format(sink) in ("upr", "empty") else "overwrite"
    frame.write.format(_format(sink)).options(**_options(sink)).mode(mode).save()


def _stream(spark: SparkSession, source: str) -> int:
    """Streams all there is to nothing; gives how many rows Spark saw."""
    reader = _reader(spark.readStream, source, ALL_COLUMNS)
    if _format(source) == "parquet":
        reader = reader.schema(spark.read.parquet(source).schema)
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            reader.load()
            .writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sum(progress.numInputRows for progress in query.recentProgress)


def _do(spark: SparkSession, command: dict[str, Any]) -> dict[str, Any]:
    source = command["source"]
    if "count" in command:
        frame = spark.read.format(_format(source)).options(**_options(source)).load()
        return {"rows": frame.count()}
    started_at, processor_s = time.monotonic(), tree_s(os.getpid())
    rows = None
    if "stream" in command:
        rows = _stream(spark, source)
    else:
        _move(spark, source, command["sink"], command.get("columns", ALL_COLUMNS))
    return {
        "seconds": time.monotonic() - started_at,
        "processor_s": tree_s(os.getpid()) - processor_s,
        "rows": rows,
    }


def serve(commands: Commands) -> None:
    """`make` writes that many rows to the folder `sink`; `source` with `sink` moves rows, with
    `stream` streams them to nothing, with `count` counts them."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        spark = _session(folder)
        commands.answer(ready=True)
        for command in commands:
            if "make" in command:
                make_rows(Path(command["sink"]), command["make"])
                commands.answer()
            else:
                commands.answer(**_do(spark, command))
        spark.stop()
