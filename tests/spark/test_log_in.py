"""Reading and writing as a user, over encrypted connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import SparkSession

from tests.kit.certificates import Certificates
from tests.kit.threaded import trio_thread
from tests.server.users import server_with_users
from upr_protocol.security import Credentials
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.options import SourceOptions
from upr_protocol.spark.read_options import ReadOptions


@pytest.fixture
def options(certificates: Certificates, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The options of a bucket of a server that has a certificate and users."""
    path = tmp_path / "password"
    path.write_text("pencil\n")
    path.chmod(0o600)

    async def serve(*, task_status: trio.TaskStatus[str]) -> None:
        settings: dict[str, Any] = {**certificates.server_settings()}
        async with server_with_users(**settings) as server:
            task_status.started(server.url("b"))
            await trio.sleep_forever()

    with trio_thread() as thread:

        async def started() -> str:
            url: str = await thread.nursery.start(serve)
            return url

        yield {
            "url": thread.run(started),
            "ca": str(certificates.authority.ca),
            "user": "bob",
            "passwordFile": str(path),
        }


def test_rows_are_written_and_read_as_a_user(spark: SparkSession, options: dict[str, str]) -> None:
    rows = [("a", "1"), ("b", "2")]
    frame = spark.createDataFrame(rows, "key STRING, value STRING")
    frame.write.format("upr").mode("append").options(**options).save()
    reader = spark.read.format("upr").options(**options).schema("key STRING, value STRING")
    frame = reader.load()
    assert sorted((row.key, row.value) for row in frame.collect()) == rows
    plan = frame._jdf.queryExecution().toString()
    assert "pencil" not in plan


def test_options_that_do_not_fit(options: dict[str, str]) -> None:
    for changes, sentence in (
        ({"passwordFile": ""}, "the options user and passwordFile go together"),
        ({"user": ""}, "the options user and passwordFile go together"),
        ({"password": "pencil"}, "there is no option password, because Spark shows options"),
        ({"url": "upr://bob:pencil@h/b", "ca": ""}, "name the user in the option user, and"),
    ):
        with pytest.raises(OptionError, match=sentence) as caught:
            SourceOptions({**options, **changes}).address()
        assert "pencil" not in str(caught.value)


def test_an_indexer_is_asked_as_that_user(options: dict[str, str]) -> None:
    index = {"index": "d/city", "indexer": "https://indexer.example:12080"}
    query = ReadOptions.parse({**options, **index}).index
    assert query is not None
    assert query.security.credentials == Credentials("bob", password_file=options["passwordFile"])
    with pytest.raises(OptionError, match="would read the password"):
        ReadOptions.parse({**options, **index, "indexer": "http://indexer.example:12080"})
