"""An archive of the classes that Spark's JVM loads, for all JVMs that the tests start.

Half of what a JVM does while it starts is to load and verify classes, most of them the same each
time. Java can keep them in a file that later JVMs map. A JVM that finds no such file, or one that
does not fit, does as without it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from typing import Final

import pyspark
from pyspark.sql import SparkSession

from tests.kit.process import ROOT
from tests.spark.spark_home import SPARK_HOME

_JAVA_HOME: Final = os.environ.get("JAVA_HOME")
_JAVA: Final = shutil.which("java", path=f"{_JAVA_HOME}/bin" if _JAVA_HOME else None) or ""
_JAVA_AND_JARS: Final = zlib.crc32(f"{os.path.realpath(_JAVA)} {SPARK_HOME}".encode())
"""An archive is of one Java, and of JARs at one place."""

ARCHIVE: Final = ROOT / "build" / f"spark-{pyspark.__version__}-{_JAVA_AND_JARS:08x}.jsa"

SHORT_LIVED_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Most of a short life is compiling."""

JAVA_OPTIONS: Final = f"{SHORT_LIVED_JAVA} -XX:SharedArchiveFile={ARCHIVE}"
"""Options of each JVM that the tests start. Where the tests have no session's options to add them
to, `SPARK_SUBMIT_OPTS` has them."""

MAKE_S: Final = 200.0


def make_archive() -> None:
    """Makes the archive, unless it is there or another process makes it. Where that fails, the
    tests only take longer."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with ARCHIVE.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if ARCHIVE.exists():
            return
        new_archive = ARCHIVE.with_suffix(".new")
        new_archive.unlink(missing_ok=True)
        try:
            result = subprocess.run(
                [sys.executable, "-m", "tests.spark.class_archive", str(new_archive)],
                cwd=ROOT,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
                capture_output=True,
                timeout=MAKE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return
        if result.returncode == 0 and new_archive.exists():
            new_archive.rename(ARCHIVE)


def main(path: str) -> None:
    """Does a little of what the tests do, in a JVM that keeps in `path` which classes it loaded."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    options = f"{SHORT_LIVED_JAVA} -XX:ArchiveClassesAtExit={path}"
    spark = builder.config("spark.driver.extraJavaOptions", options).getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.range(10).selectExpr("CAST(id AS STRING) AS key").groupBy("key").count()
        rows.write.parquet(f"{folder}/rows")
        stream = spark.readStream.schema(rows.schema).parquet(f"{folder}/rows").writeStream
        stream = stream.format("noop").option("checkpointLocation", f"{folder}/checkpoint")
        stream.trigger(availableNow=True).start().awaitTermination()
        spark.read.parquet(f"{folder}/rows").collect()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
