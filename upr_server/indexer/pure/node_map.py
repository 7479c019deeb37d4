"""Which node keeps which slices: a pure function of the list of nodes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Final

import msgspec

REPLICAS_MAX: Final = 2
"""The most copies of a slice beside the first."""


LINK_VERSION: Final = 3
"""Raised when a message between nodes changes, so that nodes of two versions do not link."""


class NodeMap(msgspec.Struct, frozen=True):
    """The nodes of an indexer, and what each of them keeps. Every node must have the same.

    A row of slices is as many as there are nodes. Within a row each node has one slice first, and a
    copy of the slices of `replicas` others. From row to row these others change, so the work of a
    node that is lost goes to all others.

    Attributes:
        nodes: Where each node answers, as the others reach it: `http://HOST:PORT` or `https://…`.
        slices: How many slices the indexes have.
        replicas: How many copies each slice has beside the first. Fewer than there are nodes.
    """

    nodes: tuple[str, ...]
    slices: int
    replicas: int

    def holders(self, index: int) -> tuple[int, ...]:
        """The places in `nodes` of those that keep a slice, the first copy's first. O(replicas)."""
        count = len(self.nodes)
        row, first_node = divmod(index, count)
        copy_nodes = (1 + (row + copy) % (count - 1) for copy in range(self.replicas))
        return (first_node, *((first_node + offset) % count for offset in copy_nodes))

    def kept_by(self, node: int) -> Iterator[int]:
        """The slices that a node keeps, by its place in `nodes`. O(slices)."""
        return (index for index in range(self.slices) if node in self.holders(index))

    def fingerprint(self, bucket: str) -> str:
        """A hash that two nodes share if they have the same map, follow buckets of the same name,
        and have the same version of the messages."""
        text = json.dumps([LINK_VERSION, bucket, self.nodes, self.slices, self.replicas])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
