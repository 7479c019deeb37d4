"""A bucket's contents: made, and read without Spark, to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient, ChunkReceived, Failure
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Operation

FAR: int = 4_000_000_000
"""An expiry time that no test sees."""


class Stored(NamedTuple):
    """What is kept of an item, whoever keeps it."""

    value: bytes
    flags: int
    expiry: int


Contents = dict[bytes, Stored]


def change(url: str, mutations: Iterable[Mutation]) -> None:
    """Does them; none may fail."""
    with BlockingClient(url) as client:
        assert not [result for result in client.apply(mutations) if isinstance(result, Failure)]


def put(numbers: Iterable[int], text: str = "value") -> list[Mutation]:
    """Sets keys to values, flags and expiry times that differ."""
    return [
        Mutation(
            Operation.SET,
            b"key-%d" % key_number,
            f"{text}-{key_number}".encode(),
            flags=key_number % 3,
            expiry=FAR + key_number if key_number % 2 else 0,
        )
        for key_number in numbers
    ]


def drop(numbers: Iterable[int]) -> list[Mutation]:
    """Deletes keys."""
    return [Mutation(Operation.DELETE, b"key-%d" % key_number) for key_number in numbers]


def contents(url: str) -> Contents:
    """What the server says that a bucket holds."""
    contents: Contents = {}
    with BlockingClient(url) as client, client.read_stream(end="now") as stream:
        for event in stream:
            for row in event.chunk if isinstance(event, ChunkReceived) else ():
                if row.op is Operation.SET:
                    contents[row.key] = Stored(row.value, row.flags, row.expiry)
                else:
                    contents.pop(row.key, None)
    return contents


def contents_of_rows(rows: Iterable[dict[str, Any]]) -> Contents:
    """The same of rows that were read elsewhere; no key may be there twice."""
    contents: Contents = {}
    for row in rows:
        key = bytes(row["key"])
        assert key not in contents
        contents[key] = Stored(bytes(row["value"]), row["flags"], row["expiry"])
    return contents


def contents_of_frame(frame: DataFrame) -> Contents:
    """The same of a DataFrame."""
    return contents_of_rows(row.asDict() for row in frame.collect())


def made_anew(url: str, partitions: int = 8) -> None:
    """Deletes a bucket, and makes an empty one of the same name: all histories are others."""
    name = url.rpartition("/")[2]
    with BlockingClient(url.removesuffix(name)) as client:
        client.delete_bucket(name)
        while True:
            try:
                client.create_bucket(name, partitions)
            except ServerError as error:
                if error.status not in (Status.TEMPORARY_FAILURE, Status.BUCKET_EXISTS):
                    raise
            else:
                return
