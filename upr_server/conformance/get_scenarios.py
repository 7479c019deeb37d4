"""What a client must do that reads keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_protocol.wire import Get, GetReply
from upr_server.conformance.client_scenario import Accept, ClientScenario, require
from upr_server.conformance.scripted_server import HISTORY, P5

_TASK: Final = {
    "task": "get",
    "bucket": "flights",
    "partition": P5,
    "keys": ["one", "missing", "damaged", "two"],
}


async def _play_get(accept: Accept) -> None:
    script = await accept()
    await script.open_bucket()
    requested_keys: list[bytes] = []
    # Cut after the first key: the client asks for the rest.
    kinds = {b"missing": 0, b"damaged": Status.DAMAGED}
    for limit in (1, 9):
        request = await script.expect(Get)
        require(request.partition == P5, f"the partition is {request.partition}, not 5")
        keys = request.keys[:limit]
        requested_keys += keys
        rows = [
            Mutation(Operation.SET, key, b"found", SeqNo(9 - index), Cas(1))
            if key not in kinds
            else Mutation(Operation.DELETE, key, flags=kinds[key])
            for index, key in enumerate(keys)
        ]
        chunk = Chunk.build(rows, SeqNo(0), SeqNo(9))
        await script.send(GetReply(HISTORY, len(keys), chunk, partition=P5, opaque=request.opaque))
    require(
        requested_keys == [b"one", b"missing", b"damaged", b"two"],
        f"the client asked for {requested_keys}",
    )
    await script.expect_end()


def _check_get(outcome: Any) -> None:
    expected = {"one": "found", "two": "found"}
    require(outcome["items"] == expected, f"the items are {outcome['items']}, not {expected}")
    refusals = {"damaged": Status.DAMAGED}
    require(
        outcome["refused"] == refusals,
        f"the refused keys are {outcome['refused']}, not {{'damaged': {Status.DAMAGED:d}}}",
    )


GET_SCENARIOS: Final[Mapping[str, ClientScenario]] = {
    "get": ClientScenario(
        "asks again for the keys that one GetReply did not answer, and tells refused keys from "
        "missing ones",
        _TASK,
        _play_get,
        _check_get,
    ),
}
"""By name, in the order in which they are played."""
