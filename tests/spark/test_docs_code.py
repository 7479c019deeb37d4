"""docs/spark.md: its Python runs as it stands there, from the first block to the last."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from tests.indexer.processes import indexer_process
from tests.kit.documents import SHELL, code_of, run_python
from tests.kit.process import ROOT
from tests.spark.bucket_values import contents
from tests.spark.server import BlockingServer, blocking_server
from tests.spark.waiting import until
from upr_protocol.cli import main
from upr_protocol.client import IndexClient

DOCUMENT: Final = (ROOT / "docs" / "spark.md").read_text()


class Reader:
    """Somebody who does what the page says, in its order.

    Args:
        spark: The session that the page begins.
        server: The server that it begins.
        folder: What `/data` stands for.
    """

    def __init__(self, spark: SparkSession, server: BlockingServer, folder: Path) -> None:
        self._spark = spark
        self._server = server
        self._folder = folder
        self._indexer_url = ""
        self._names: dict[str, Any] = {}
        self.values: list[object] = []
        """What each block of Python gave."""

    def _here(self, text: str) -> str:
        """The text, with the places that are here in place of those that it names."""
        text = text.replace("upr://127.0.0.1:12000/", self._server.url())
        text = text.replace("http://127.0.0.1:12080", self._indexer_url)
        return text.replace('"/data/', f'"{self._folder}/')

    def read(self, document: str, processes: ExitStack) -> None:
        """Runs all Python, and the commands that create what it needs."""
        for code in code_of(document):
            if code.language == "python":
                value = run_python(self._here(code.text), self._names, "docs/spark.md")
                self.values.append(self._rows(value) if isinstance(value, DataFrame) else value)
                self._finish_streams()
            elif code.language == SHELL and code.text.startswith(("upr ", "upr-indexer ")):
                self._run_command(shlex.split(self._here(code.text), comments=True), processes)

    def _rows(self, frame: DataFrame) -> list[dict[str, Any]]:
        """What a query of the page is about; nothing of a stream."""
        if frame.isStreaming:
            return []
        return [row.asDict(recursive=True) for row in frame.collect()]

    def _finish_streams(self) -> None:
        for query in self._spark.streams.active:
            query.processAllAvailable()
            query.stop()

    def _run_command(self, words: list[str], processes: ExitStack) -> None:
        match words:
            case ["upr-indexer", url]:
                indexer = processes.enter_context(indexer_process(url, self._folder / "indexes"))
                self._indexer_url = indexer.url
            case ["upr", "bucket" | "index", "create", *_]:
                variables = {"UPR_INDEXER_URL": self._indexer_url}
                result = CliRunner().invoke(main, words[1:], env=variables)
                assert result.exit_code == 0, (words, result.output)
                if words[1] == "index":
                    self._await_indexes(words[3])

    def _await_indexes(self, design: str) -> None:
        """Waits until the indexes of a design are there and ready."""
        with IndexClient(self._indexer_url) as client:

            def are_ready() -> bool:
                indexes = client.indexes()
                states = [row["state"] for row in indexes if row["name"].startswith(f"{design}/")]
                return bool(states) and all(state == "ready" for state in states)

            until(are_ready, f"the indexes of {design} are ready")


@pytest.fixture
def server_of_the_page() -> Iterator[BlockingServer]:
    """A server of its own: the names of its buckets are those of the page."""
    with blocking_server() as running:
        yield running


def test_the_python_of_the_page_runs_as_it_is_written(
    spark: SparkSession,
    server_of_the_page: BlockingServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    (incoming / "1.json").write_text(
        '{"key": "N1", "value": "a"}\n{"key": "N2", "value": "b"}\n{"key": "N1", "value": "a"}\n'
    )
    reader = Reader(spark, server_of_the_page, tmp_path)
    with ExitStack() as processes:
        reader.read(DOCUMENT, processes)
    values = reader.values

    planes = {
        b"N14228": b'{"tailnum":"N14228","seats":149,"model":"737-824"}',
        b"N301DV": b'{"tailnum":"N301DV","seats":365,"model":"747-451"}',
    }
    arrived = {b"N1": b"a", b"N2": b"b"}
    bucket = {
        key: value
        for key, value in contents(server_of_the_page.url("planes")).items()
        if not key.startswith(b"_")
    }
    assert bucket == planes | arrived
    assert contents(server_of_the_page.url("counts")) == {b"N1": b"2", b"N2": b"1"}
    printed = capsys.readouterr().out
    assert "N301DV" in printed, "what `latest` finds"
    assert "747-451" in printed, "what the filter finds"
    large = [{"index_key": "[365]", "key": "N301DV", "value": {"model": "747-451"}}]
    assert large in values
    assert values[-1] == 0, "the stream is not behind"
    assert len(values) == 12
