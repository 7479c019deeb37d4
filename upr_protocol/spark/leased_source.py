"""Reading under a lease that the reader can release.

Spark imports this module for each plan of a read, in a process of its own: it stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

from upr_protocol.spark.source import UprDataSource

_LEASE_ID: Final = "leaseid"
_ACQUIRES_LEASE: Final = "acquireslease"
_OWN_OPTIONS: Final = (_LEASE_ID, _ACQUIRES_LEASE)


class LeasedDataSource(UprDataSource):
    """The data source, for a read under a lease whose ID is known before. A data source does not
    know when a read is over. The program that reads knows it, and can release the lease.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__({name: text for name, text in options.items() if name not in _OWN_OPTIONS})
        self._lease_id = int(options[_LEASE_ID], 16)
        self._acquires_lease = options[_ACQUIRES_LEASE] == "true"

    @classmethod
    def name(cls) -> str:
        """Its name, for recipes only."""
        return "upr_leased"


def leased_options(
    options: Mapping[str, str], lease_id: int, *, acquires_lease: bool
) -> dict[str, str]:
    """The options of a read of `LeasedDataSource`.

    Args:
        options: What the data source `upr` takes.
        lease_id: The lease.
        acquires_lease: Whether the first action acquires it. Otherwise it holds what is read: if
            it does not, the read fails.
    """
    return {
        **options,
        _LEASE_ID: f"{lease_id:016x}",
        _ACQUIRES_LEASE: "true" if acquires_lease else "false",
    }
