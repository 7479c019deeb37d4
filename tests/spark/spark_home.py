"""Spark's folder for the tests, without the copy of PySpark that is in an archive.

Spark puts `python/lib/pyspark.zip` of its folder before all else that its Python processes import
from. From an archive Python compiles PySpark in each process, and it reads the archive's list of
files for each task. That was a third of the processor time of these tests. Where there is
no archive, the processes import the same PySpark as it is installed, which is compiled already.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Final

import pyspark

from tests.kit.process import ROOT

_INSTALLED: Final = Path(pyspark.__file__).parent

SPARK_HOME: Final = (
    ROOT / "build" / f"spark-{pyspark.__version__}-{zlib.crc32(bytes(_INSTALLED)):08x}"
)
"""The same in each run: an archive of classes is of JARs at one place."""


def make_spark_home() -> Path:
    """Makes the folder, unless it is there; gives it."""
    if not SPARK_HOME.exists():
        SPARK_HOME.parent.mkdir(exist_ok=True)
        new_home = Path(tempfile.mkdtemp(prefix=SPARK_HOME.name, dir=SPARK_HOME.parent))
        for name in ("bin", "jars", "sbin"):
            (new_home / name).symlink_to(_INSTALLED / name)
        try:
            new_home.rename(SPARK_HOME)
        except OSError:
            # Another process was faster.
            shutil.rmtree(new_home)
    return SPARK_HOME
