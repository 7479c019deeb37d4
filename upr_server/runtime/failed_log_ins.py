"""Counts log-ins that failed, by host, and says who must wait before the next one."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address
from typing import Final

FAILURE_DELAY_S: Final = 1.0
"""How late a failed attempt is answered. A person hardly notices it. What waits is a connection,
which counts in the limits and ends by itself."""

FAILURES_MAX: Final = 10
"""Attempts of one host that may fail at once; each comes back after `FAILURE_DELAY_S`."""

HOSTS_MAX: Final = 10_000
"""Hosts whose failures are counted. Of more, the one that failed longest ago is forgotten."""


class FailedLogIns:
    """Counts attempts that failed, and says who must wait before the next one.

    Args:
        failures_max: Attempts of one host that may fail at once.

    Attributes:
        failure_count: Attempts that failed.
        refusal_count: Attempts that were not tried, because too many of the same host had failed.
    """

    def __init__(self, failures_max: int = FAILURES_MAX) -> None:
        self.failure_count = 0
        self.refusal_count = 0
        self._failures_max = failures_max
        self._free_at: OrderedDict[str, float] = OrderedDict()
        """For each host, when none of its failures counts any more; the oldest first."""

    def is_limited(self, host: str, now: float, spared: int = 0) -> bool:
        """Whether the host has failed so often that it must wait; counts the attempt if so.

        Args:
            host: Who it is.
            now: The time, in seconds.
            spared: How many fewer attempts may fail at once than usual.
        """
        waits_s = self._free_at.get(host, now) - now
        limited = waits_s > (self._failures_max - spared - 1) * FAILURE_DELAY_S
        self.refusal_count += limited
        return limited

    def has_failed(self, host: str, now: float) -> bool:
        """Whether a failure of the host still counts."""
        return self._free_at.get(host, now) > now

    def count_failure(self, host: str, now: float) -> None:
        """An attempt of the host has failed."""
        self.failure_count += 1
        self._free_at[host] = max(self._free_at.get(host, now), now) + FAILURE_DELAY_S
        self._free_at.move_to_end(host)
        if len(self._free_at) > HOSTS_MAX:
            self._free_at.popitem(last=False)


def network_of(peer: str) -> str:
    """The name under which failures are counted: an address of IPv4, or the network of an IPv6
    address, as everybody there has too many addresses to count.

    Args:
        peer: The address, a colon, and the port.
    """
    host = peer.rpartition(":")[0].strip("[]") or peer
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return f"{IPv6Address(int(address) >> 64 << 64)}/64"
    return host
