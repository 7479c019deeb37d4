"""Reading under a lease that the reader can release.

Spark imports this module for each plan of a read, in a process of its own: it stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Final

from upr_protocol.spark.source import UprDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.readwriter import DataFrameReader

_LEASE_ID: Final = "leaseid"


class LeasedDataSource(UprDataSource):
    """The data source, for a read under a lease whose ID is known before. A data source does not
    know when a read is over. Whoever reads knows it, and can release the lease.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__({name: text for name, text in options.items() if name != _LEASE_ID})
        self._lease_id = int(options[_LEASE_ID], 16)

    @classmethod
    def name(cls) -> str:
        """Its name, for recipes only."""
        return "upr_leased"


def leased_reader(
    spark: SparkSession, options: Mapping[str, str], lease_id: int
) -> DataFrameReader:
    """Reads a bucket as the data source `upr` does.

    Args:
        spark: A session in which `LeasedDataSource` is registered.
        options: The options of the read.
        lease_id: The lease. If there is none with this ID, the first action acquires it.
    """
    reader = spark.read.format(LeasedDataSource.name()).options(**options)
    return reader.option(_LEASE_ID, f"{lease_id:016x}")
