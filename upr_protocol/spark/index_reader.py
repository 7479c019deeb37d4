"""Reading the items that an index finds."""

from __future__ import annotations

import base64
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from upr_protocol.client import IndexClient, IndexEntry, IndexerError, Item
from upr_protocol.client.core.retry import RetryState
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.spark.driver_client import BucketDriverClient
from upr_protocol.spark.driver_connection import SILENT_WAIT_S
from upr_protocol.spark.errors import OptionError, PipelineError, as_pipeline_error
from upr_protocol.spark.index_query import IndexQuery
from upr_protocol.spark.item_lookup import ItemLookup
from upr_protocol.spark.json_values import parser_of
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.record_batches import record_batch_of, too_large_error
from upr_protocol.spark.schema import INDEX_COLUMNS, UNPARSED, check_schema
from upr_protocol.spark.worker_call import worker_call

_log = logging.getLogger(__name__)

ENTRIES_AT_ONCE: Final = 1000
"""How many entries are asked for together."""


def document_key(entry: IndexEntry) -> bytes:
    """The key of the item that an entry is of."""
    if entry.id_encoding:
        return base64.b64decode(entry.id)
    return entry.id.encode()


_OF_ENTRY: Final[dict[str, Callable[[IndexEntry], Any]]] = {
    "index_key": lambda entry: msgspec.json.encode(entry.key).decode(),
    "included": lambda entry: (
        None if entry.included is None else msgspec.json.encode(entry.included).decode()
    ),
    "key": document_key,
}
_OF_ITEM: Final[dict[str, Callable[[Item], Any]]] = {
    "value": lambda item: item.value,
    "partition": lambda item: item.partition,
    "history_id": lambda item: f"{item.history_id:016x}",
    "seq": lambda item: item.seq,
    "cas": lambda item: item.cas,
    "flags": lambda item: item.flags,
    "expiry": lambda item: item.expiry,
}


class IndexReader(DataSourceReader):
    """Reads the entries of an index in one task, of one moment, and the items that they are of, as
    these are when they are read.

    Args:
        options: What is asked for.
        schema: Which columns.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema, INDEX_COLUMNS)
        self._options = options
        self._schema = schema

    @worker_call()
    def partitions(self) -> Sequence[InputPartition]:
        """One task. Makes sure before it begins that the indexer answers and has the index: Spark
        runs a task that fails again, and each run would wait for the indexer.

        Raises:
            PipelineError: It does not.
        """
        query = self._query
        retries = _Retries(self._options.timeout_s)
        with (
            _named_errors(query, self._options),
            IndexClient(query.indexer, query.security) as indexes,
        ):
            while True:
                try:
                    indexes.scan(query.name, limit=1, **query.range)
                    return [InputPartition(0)]
                except (BrokenError, IndexerError) as error:
                    retries.wait_after(error)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """The rows, in the order of the index."""
        with worker_call():
            rows = _Rows(self._options, self._schema)
            try:
                with _named_errors(self._query, self._options):
                    entries = _entries(self._query, self._options, rows)
                    while next_entries := list(islice(entries, ENTRIES_AT_ONCE)):
                        yield from rows.batches(next_entries)
            finally:
                rows.close()

    @property
    def _query(self) -> IndexQuery:
        query = self._options.index
        assert query is not None
        return query


@contextmanager
def _named_errors(query: IndexQuery, options: ReadOptions) -> Iterator[None]:
    """Raises errors of the indexer and of the server as `PipelineError`."""
    try:
        yield
    except IndexerError as error:
        raise PipelineError("UPR_INDEX", f"{query.indexer}: {error}") from error
    except BrokenError as error:
        raise PipelineError(
            "UPR_UNREACHABLE",
            f"{error}. Start the indexer, or correct the option indexer, and run it again",
        ) from error
    except UprError as error:
        raise as_pipeline_error(error, options.address) from error


class _Retries:
    """Waits between two questions to an indexer that is away, starting, building the index, or
    overloaded.

    Args:
        timeout_s: How long to go on.
    """

    def __init__(self, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self._state = RetryState(timeout_s, random.random)
        self._is_logged = False

    def wait_after(self, error: BrokenError | IndexerError) -> None:
        """Waits. The log says once why.

        Raises:
            BrokenError, IndexerError: `error`, if another question is of no use, or if the time is
                over.
        """
        failure: UprError = error
        if isinstance(error, IndexerError) and error.retry_after_s:
            failure = BrokenError(str(error))
        try:
            wait_s = self._state.wait_after_failure_s(failure, time.monotonic())
        except UprError:
            raise error from None
        if wait_s >= SILENT_WAIT_S and not self._is_logged:
            _log.warning("%s; trying again for %d s (timeoutSeconds)", error, self._timeout_s)
            self._is_logged = True
        time.sleep(wait_s)  # noqa: TID251  there is no event to wait for


def _entries(query: IndexQuery, options: ReadOptions, rows: _Rows) -> Iterator[IndexEntry]:
    """The entries. An indexer that is away or not ready is asked again until the time is over; but
    not when it has given some, because a later answer would be of another moment."""
    retries = _Retries(options.timeout_s)
    has_begun = False
    while True:
        try:
            for entry in _scan(query, options, rows):
                has_begun = True
                yield entry
        except (BrokenError, IndexerError) as error:
            if has_begun:
                raise
            retries.wait_after(error)
        else:
            return


def _scan(query: IndexQuery, options: ReadOptions, rows: _Rows) -> Iterator[IndexEntry]:
    timeout_s = min(options.timeout_s, 300)
    with IndexClient(query.indexer, query.security) as indexes:
        if rows.has_items:
            page = indexes.scan(
                query.name, limit=1, consistency="now", timestamps=True, timeout_s=timeout_s
            )
            rows.check_bucket(query, page.timestamps)
        yield from indexes.scan_all(
            query.name,
            limit=ENTRIES_AT_ONCE,
            consistency="now",
            timeout_s=timeout_s,
            **query.range,
        )


class _Rows:
    """Makes record batches of entries.

    Args:
        options: The server.
        schema: Which columns.

    Attributes:
        has_items: Whether they need the items, too.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._address = options.address
        self._driver = BucketDriverClient(options)
        self._lookup = ItemLookup(self._driver)
        self.has_items = not set(schema.fieldNames()) <= _OF_ENTRY.keys()
        self._parser = parser_of(schema)

    def check_bucket(self, query: IndexQuery, timestamps: Mapping[int, tuple[str, int]]) -> None:
        """Makes sure that the index is of the bucket that is asked for items. Histories have random
        names: those of another bucket are others.

        Args:
            query: The index.
            timestamps: By partition the history and the number up to which the index has it.

        Raises:
            OptionError: The bucket has had none of these histories.
            PipelineError: The server cannot be asked.
        """
        self._driver.seqnos()
        histories = {
            (partition, f"{entry.history_id:016x}")
            for partition, info in self._driver.partition_infos().items()
            for entry in info.log
        }
        indexed = {(partition, history) for partition, (history, seq) in timestamps.items() if seq}
        if indexed and histories.isdisjoint(indexed):
            raise OptionError(
                f"the index {query.name} of {query.indexer} is of another bucket than "
                f"{self._address}: correct the option indexer or url"
            )

    def batches(self, entries: Sequence[IndexEntry]) -> Iterator[pa.RecordBatch]:
        """Their rows, without those whose item is gone meanwhile."""
        if not self.has_items:
            yield self._batch(entries, [])
            return
        remaining_entries = iter(entries)
        for items in self._lookup.parts([document_key(entry) for entry in entries]):
            pairs = [
                (entry, item)
                for entry, item in zip(islice(remaining_entries, len(items)), items, strict=True)
                if item is not None
            ]
            yield self._batch([entry for entry, _ in pairs], [item for _, item in pairs])

    def _batch(self, entries: Sequence[IndexEntry], items: Sequence[Item]) -> pa.RecordBatch:
        columns: dict[str, pa.Array] = {}
        for field in self._schema:
            name, kind = field.name, field.type
            of_entry = _OF_ENTRY.get(name)
            if name == UNPARSED:
                continue
            values = (
                [_OF_ITEM[name](item) for item in items]
                if of_entry is None
                else [of_entry(entry) for entry in entries]
            )
            try:
                columns[name] = pa.array(values, pa.binary() if name in ("key", "value") else kind)
            except OverflowError as error:
                raise too_large_error(name, max(values)) from error
        return record_batch_of(columns, self._schema, self._parser)

    def close(self) -> None:
        """Closes the connection."""
        self._driver.close()
