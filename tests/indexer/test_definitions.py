"""Which builders there are, as indexes are defined and dropped while they are built."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.indexer.kit import BUCKET, a_server, an_indexer, define
from tests.kit.process import eventually
from upr_protocol.client import connect
from upr_server.indexer.builder import IndexBuilder
from upr_server.indexer.pure.definition import IndexDefinition

BY_N = IndexDefinition(("n",))


async def test_a_builder_goes_on_until_its_last_index_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[IndexBuilder] = []
    ended: list[IndexBuilder] = []

    async def build_for_ever(builder: IndexBuilder) -> None:
        began.append(builder)
        try:
            await trio.sleep_forever()
        finally:
            ended.append(builder)

    monkeypatch.setattr(IndexBuilder, "run", build_for_ever)
    async with (
        a_server() as server,
        connect(server.url(BUCKET)) as client,
        an_indexer(server.url(BUCKET), tmp_path) as indexer,
    ):
        definitions = indexer.slices[0].definitions
        await define(client, "d", {"first": BY_N, "second": BY_N})
        await eventually(lambda: len(began) == 1, "building has begun")
        (builder,) = began
        assert len(builder.members) == 2

        async def define_and_wait(indexes: dict[str, IndexDefinition]) -> None:
            await define(client, "d", indexes)
            count = len(indexes)
            await eventually(
                lambda: len(definitions.names()) == definitions.building_count == count,
                "the others are dropped",
            )

        await define_and_wait({"second": BY_N})
        assert (began, ended) == ([builder], [])
        await define_and_wait({})
        await eventually(lambda: bool(ended), "building has ended")
        assert (began, ended) == ([builder], [builder])
