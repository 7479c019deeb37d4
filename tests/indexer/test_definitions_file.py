"""What the next start knows of indexes whose design documents no catalog has just then."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import structlog

from tests.indexer.kit import BUCKET, a_server, an_indexer, define, name_of, scan, until_ready
from tests.kit.process import eventually
from upr_protocol.client import connect
from upr_protocol.hashing import partition_of
from upr_server.indexer.catalog import DesignCatalog
from upr_server.indexer.definitions_file import DefinitionsFile
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.mark import NO_MARK
from upr_server.indexer.pure.definition import IndexDefinition, design_key

BY_A = IndexDefinition(("a",))
DEFINITIONS = {
    name_of("x/a"): BY_A,
    name_of("x/b"): IndexDefinition(("b", "c"), "a > `1`", "c", ("d",)),
    name_of("y/a"): BY_A,
}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = DefinitionsFile(tmp_path / "definitions.json")
    assert file.load([]) == {}
    file.save(DEFINITIONS)
    assert file.load([]) == DEFINITIONS
    assert file.load(["x"]) == {name_of("y/a"): BY_A}
    file.save({})
    assert file.load([]) == {}


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff", b'{"x": 7}', b'{"x": {"indexes": {"a": {"key": ["("]}}}}', b'{"/": {}}'],
)
def test_what_cannot_be_read_is_left_out(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "definitions.json"
    path.write_bytes(data)
    assert DefinitionsFile(path).load([]) == {}


def test_a_file_that_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one might name a definition whose index is another one by now."""
    path = tmp_path / "definitions.json"
    file = DefinitionsFile(path)
    file.save(DEFINITIONS)

    def write_bytes(_path: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="no room"):
        file.save({name_of("x/a"): BY_A})
    assert not path.exists()


async def test_a_start_while_design_documents_are_read_again_keeps_their_indexes(
    tmp_path: Path,
) -> None:
    """It took them for dropped, and built them from nothing."""
    async with a_server() as server, connect(server.url(BUCKET)) as client:
        await define(client, "x", {"i": BY_A})
        await client.set("k", '{"a": 1}')
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await until_ready(indexer, "x/i")
        # As a rollback to 0 leaves it, until the stream has brought the document again.
        catalog = DesignCatalog(IndexFile(tmp_path / "slice-0-of-1" / "catalog", BUCKET))
        partition = partition_of(design_key("x"), 4)
        batch = IndexBatch(partition, NO_MARK, clears_one_of=4)
        assert catalog.file.apply_changes(RoundChanges([batch]), catalog)
        catalog.file.close()
        with structlog.testing.capture_logs() as logs:
            async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
                await until_ready(indexer, "x/i")
                assert await scan(indexer, "x/i") == [([1], "k")]
        assert not {"building index", "dropping index"}.intersection(line["event"] for line in logs)


async def test_an_index_that_was_dropped_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async with a_server() as server, connect(server.url(BUCKET)) as client:
        await define(client, "x", {"i": BY_A})
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await until_ready(indexer, "x/i")
        await client.delete(design_key("x"))
        for path in (tmp_path / "slice-0-of-1" / "catalog").iterdir():
            path.unlink()
        path = tmp_path / "definitions.json"
        assert DefinitionsFile(path).load([]) == {name_of("x/i"): BY_A}
        async with an_indexer(server.url(BUCKET), tmp_path) as indexer:
            await eventually(lambda: indexer.designs._was_whole, "all design documents are known")
            await eventually(lambda: not indexer.designs.names(), "it is dropped")
            await eventually(lambda: DefinitionsFile(path).load([]) == {}, "it is forgotten")
