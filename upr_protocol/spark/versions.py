"""Which PySpark the data source needs."""

from __future__ import annotations

from importlib import util
from typing import Final

from upr_protocol.spark.errors import PipelineError

PYSPARK_FIRST: Final = (4, 2)
"""Python data sources have Arrow writers and read limits from here on."""

PYSPARK_END: Final = (5,)

REQUIREMENT: Final = "pip install 'upr-server[spark]'"


def check_versions() -> None:
    """Makes sure that PySpark and what it needs are installed.

    Raises:
        ModuleNotFoundError: A package is missing.
        PipelineError: PySpark is too old or too new.
    """
    for name in ("pyspark", "pyarrow", "numpy"):
        if util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"the data source `upr` needs PySpark: {REQUIREMENT} (there is no {name})",
                name=name,
            )
    import pyspark

    check_pyspark(pyspark.__version__)


def check_pyspark(version: str) -> None:
    """Makes sure that a version of PySpark is one that the data source works with.

    Raises:
        PipelineError: It is not.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not PYSPARK_FIRST <= numbers < PYSPARK_END:
        raise PipelineError(
            "UPR_PYSPARK",
            f"the data source `upr` needs PySpark 4.2 or newer, below 5, and this is {version}: "
            f"{REQUIREMENT}",
        )
