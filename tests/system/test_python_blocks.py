"""The Python of README, docs/indexer.md and docs/security.md runs as it stands there.

Of docs/operations.md, `test_operations` runs it; of docs/spark.md, `tests/spark/test_docs_code.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.indexer.processes import indexer_process
from tests.kit.documents import fenced_code, run_python
from tests.kit.process import ROOT
from tests.spark.server import blocking_server
from upr_protocol.client import BlockingClient, IndexClient

ADDRESS: Final = "127.0.0.1:12000"
INDEXERS: Final = ("127.0.0.1:12080", "i0.example:12080", "i1.example:12080")


def run_blocks(page: str, places: dict[str, str]) -> dict[str, Any]:
    """Runs the blocks of a page, one after the other; gives the names that they leave."""
    names: dict[str, Any] = {}
    for block in fenced_code((ROOT / page).read_text(), "python"):
        for place, here in places.items():
            block = block.replace(place, here)
        run_python(block, names, page)
    return names


def test_the_programs_of_the_readme_print_what_they_should(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with blocking_server() as server:
        server.create_bucket("planes")
        run_blocks("README.md", {ADDRESS: f"127.0.0.1:{server.port}"})
    assert capsys.readouterr().out.splitlines() == [
        "the server has accepted everything",
        "10001 items",
        "10001",
    ]


def test_the_programs_of_the_indexers_page_run(tmp_path: Path) -> None:
    with blocking_server() as server:
        url = server.create_bucket("planes")
        with (
            indexer_process(url, tmp_path) as indexer,
            IndexClient(indexer.url) as indexes,
            BlockingClient(url) as client,
        ):
            client.set("other", '{"maker": "AIRBUS"}')
            indexes.create("planes", {"indexes": {"by_maker": {"key": ["maker"]}}})
            while not any(row["state"] == "ready" for row in indexes.indexes()):
                pass
            here = indexer.url.removeprefix("http://")
            places = {ADDRESS: f"127.0.0.1:{server.port}", **dict.fromkeys(INDEXERS, here)}
            names = run_blocks("docs/indexer.md", places)
    assert [entry.id for entry in names["page"].entries] == ["N1"]
    assert names["entry"].id == "N1", "the last of all"


def test_the_programs_of_the_security_page_run() -> None:
    names = run_blocks("docs/security.md", {})
    assert names["TARGET"].bucket == "planes"
    assert names["TARGET"].security == names["SECURITY"]
