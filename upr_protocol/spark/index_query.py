"""Options of a read that name an index: which of its entries are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec

from upr_protocol.client import Address, IndexClient, IndexRange, Security
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.options import SourceOptions


@attrs.frozen
class IndexQuery:
    """Which entries of an index are read.

    Attributes:
        name: The index, as DESIGN/INDEX.
        indexer: The URL of its indexer.
        security: How the connection to that is protected.
        prefix: The first parts of the index keys; None for any.
        low: The lowest index key, or its first parts; None for no lowest.
        high: The highest, likewise; what begins with it is read, too.
    """

    name: str
    indexer: str
    security: Security
    prefix: Sequence[Any] | None
    low: Sequence[Any] | None
    high: Sequence[Any] | None

    @property
    def range(self) -> IndexRange:
        """The index keys, as a scan takes them."""
        return {"prefix": self.prefix, "low": self.low, "high": self.high}


_NOT_WITH_INDEX: Final = (
    *("buckets", "bucketPattern", "partitions", "key", "keyPrefix", "deduplicate", "valueSchema"),
    *("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp"),
    *("stability", "failOnDataLoss", "leaseSeconds", "maxPartitionBytes", "minPartitions"),
)


def index_query(options: SourceOptions, address: Address) -> IndexQuery | None:
    """Which entries of an index are read; None if none is named."""
    name, indexer = options.text("index", None), options.text("indexer", None)
    prefix, low, high = (
        _key(options, option) for option in ("indexPrefix", "indexFrom", "indexTo")
    )
    if name is None:
        for option in ("indexer", "indexPrefix", "indexFrom", "indexTo"):
            if options.text(option, None) is not None:
                raise OptionError(f"the option {option} needs the option index, as planes/by_size")
        return None
    if not all(name.partition("/")):
        raise OptionError(f"the option index is {name!r}; write it like planes/by_size")
    if prefix is not None and (low is not None or high is not None):
        raise OptionError("the option indexPrefix excludes indexFrom and indexTo")
    for option in _NOT_WITH_INDEX:
        if options.text(option, None) is not None:
            raise OptionError(f"the options index and {option} exclude each other")
    if indexer is None:
        indexer = options.required("indexer", "http://127.0.0.1:12080")
    # The files of the options are those of the server, too, which may be the only one encrypted.
    is_encrypted = indexer.startswith("https://")
    tls = address.security.tls if is_encrypted else None
    security = Security(tls, address.security.credentials)
    try:
        IndexClient(indexer, security).close()
    except ValueError as error:
        raise OptionError(f"the option indexer: {error}") from error
    return IndexQuery(name, indexer, security, prefix, low, high)


def _key(options: SourceOptions, name: str) -> Sequence[Any] | None:
    """A key of an index, or its first parts: a JSON array, or a value that is the only part."""
    text = options.text(name, None)
    if text is None:
        return None
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise OptionError(
            f'the option {name} is {text!r}; write JSON, like ["BOEING", 100] or "BOEING"'
        ) from error
    return value if isinstance(value, list) else [value]
