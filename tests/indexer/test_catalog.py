"""How much of the design documents the slices report."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.indexer.kit import POOL_BYTES, a_server, an_indexer, name_of
from tests.kit.process import eventually
from upr_protocol.client import Address, connect
from upr_server.indexer import catalog
from upr_server.indexer.catalog import (
    CATALOG_BYTES_MAX,
    DESIGN_OVERHEAD_BYTES,
    LEFT_OUT_MAX,
    CatalogDesigns,
    shortest_designs,
)
from upr_server.indexer.pipeline import worker_thread
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.pure.definition import DESIGN_BYTES_MAX, design_key, design_name
from upr_server.indexer.slice import Slice, SliceSettings
from upr_server.indexer.slices import CatalogReport, SliceId
from upr_server.indexer.worker_messages import FRAME_BYTES_MAX, CatalogRead

DESIGN = msgspec.json.encode({"indexes": {"city": {"key": ["city"]}}})
TEXTS = st.dictionaries(
    st.sampled_from("abcdefg").map(design_key), st.integers(0, 40).map(bytes), max_size=7
)


@given(TEXTS, st.integers(0, 700))
def test_the_shortest_documents_are_reported(documents: dict[bytes, bytes], bytes_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "CATALOG_BYTES_MAX", bytes_max)
        designs = shortest_designs(documents.items)
    remaining, expected = bytes_max, dict[str, bytes]()
    ordered_documents = sorted(documents.items(), key=lambda item: (len(item[1]), item[0]))
    for key, document in ordered_documents:
        remaining -= len(key) + len(document) + DESIGN_OVERHEAD_BYTES
        if remaining >= 0:
            expected[design_name(key)] = document
    assert designs.texts == expected
    assert set(designs.left_out) == {*map(design_name, documents)} - {*expected}


def test_a_report_fits_into_a_message() -> None:
    documents = {design_key(f"d{number}"): bytes(2 * DESIGN_BYTES_MAX) for number in range(120)}
    documents |= {design_key(f"e{number}"): b"" for number in range(40_000)}
    designs = shortest_designs(documents.items)
    assert len(designs.left_out) == LEFT_OUT_MAX
    report = CatalogReport(dict(designs.texts), 0, list(designs.left_out))
    nbytes = len(msgspec.msgpack.encode(CatalogRead(report)))
    assert nbytes < CATALOG_BYTES_MAX + 2**20 < FRAME_BYTES_MAX


async def test_long_documents_are_mistakes_and_the_others_go_on(tmp_path: Path) -> None:
    async with (
        a_server() as server,
        connect(server.url("b")) as client,
        an_indexer(server.url("b"), tmp_path) as indexer,
    ):
        # One more than there is room for, and one that is too long by itself.
        for number in range(4):
            await client.set(design_key(f"long{number}"), DESIGN.ljust(DESIGN_BYTES_MAX))
        await client.set(design_key("longest"), DESIGN.ljust(2 * DESIGN_BYTES_MAX))
        await client.set(design_key("d"), DESIGN)
        designs = indexer.designs
        await designs.wait_until_current()
        await eventually(lambda: not designs._overlay.texts, "the catalog has them")
        await eventually(lambda: name_of("d/city") in designs.names(), "it is defined")
        await eventually(lambda: len(designs.mistakes) == 2, "they are mistakes")
        assert designs.mistakes["longest"] == (
            "all design documents of a slice have at most 4,194,304 bytes"
        )


class Reports:
    """What a slice has reported."""

    def __init__(self) -> None:
        self.texts: list[dict[str, bytes]] = []

    def slice_restarted(self, _index: int) -> None:
        pass

    def catalog_read(self, _index: int, report: CatalogReport) -> None:
        self.texts.append(report.texts)


async def test_a_change_is_reported_though_the_report_of_a_question_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice leaves a change to a report that has begun in the same moment."""
    settings = SliceSettings(Address.parse("upr://127.0.0.1:1/b"), tmp_path)
    part, reports = Slice(SliceId(), settings, MemoryPool(POOL_BYTES), worker_thread()), Reports()
    texts = dict[str, bytes]()

    async def current_designs() -> CatalogDesigns:
        await trio.lowlevel.checkpoint()
        return CatalogDesigns(dict(texts), [])

    async def nothing_to_wait_for() -> None:
        pass

    monkeypatch.setattr(part, "_observer", reports)
    monkeypatch.setattr(part, "_reporting", AsyncExitStack())  # it is free
    monkeypatch.setattr(part.catalog, "current_designs", current_designs)
    monkeypatch.setattr(part.barriers, "wait_until_applied", nothing_to_wait_for)
    with closing(part):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(part._keep_reporting)
            await eventually(lambda: reports.texts == [{}], "it is reported")
            texts["d"] = DESIGN
            with trio.CancelScope() as asking:
                asking.cancel()
                part.catalog.on_change()
                await part.confirm()
            await eventually(lambda: reports.texts[1:] == [texts], "the change is reported", 5)
            nursery.cancel_scope.cancel()
