"""A Hypothesis strategy for every message there is, made from its layout."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

import construct as cs
from hypothesis import strategies as st

from tests.protocol.strategies import (
    PARTITIONS,
    U8,
    U16,
    U32,
    U64,
    bundles,
    failover_logs,
    positions,
    stored_chunks,
)
from upr_protocol.bucket_event import ALL_KINDS, BucketEvent, BucketFate, EventKind
from upr_protocol.wire import MESSAGES, EventsReply, Message, Mutate, NextEvents
from upr_protocol.wire.columns import CHUNK, LOG, POSITION

TEXTS: Final = st.text(max_size=20)
OCTETS: Final = st.binary(max_size=70)
INTEGERS: Final = {"B": U8, "H": U16, "L": U32, "Q": U64}

SHARED: Final = ((CHUNK, stored_chunks()), (LOG, failover_logs()), (POSITION, positions()))


def tuples_of(item: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of a few items."""
    return st.lists(item, max_size=5).map(tuple)


EXCEPTIONS: Final[Mapping[tuple[type[Message], str], st.SearchStrategy[Any]]] = {
    (Mutate, "bundle"): bundles(),
    (NextEvents, "kinds"): st.integers(1, ALL_KINDS).map(EventKind),
    (EventsReply, "events"): tuples_of(
        st.builds(
            BucketEvent,
            bucket=TEXTS,
            incarnation=U64,
            fate=st.sampled_from(BucketFate),
            updates=U64,
            designs=tuples_of(OCTETS),
        )
    ),
}
"""Fields whose values are fewer than their layout allows."""


def _values_of(construct: Any) -> st.SearchStrategy[Any]:
    """What a part of a layout can hold."""
    while isinstance(construct, cs.Renamed | cs.Rebuild):
        construct = construct.subcon
    for shared, values in SHARED:
        if construct is shared:
            return values
    if construct is cs.Flag:
        return st.booleans()
    match construct:
        case cs.ExprAdapter():
            return _values_of(construct.subcon)
        case cs.FormatField():
            return INTEGERS[construct.fmtstr.strip("<>=")]
        case cs.StringEncoded():
            return TEXTS
        case cs.Prefixed():
            return OCTETS
        case cs.Bytes():
            return st.binary(min_size=construct.length, max_size=construct.length)
        case cs.FocusedSeq():  # a list behind its count
            return tuples_of(_values_of(construct.subcons[1].subcon.subcon))
        case cs.Struct():  # a row
            return st.tuples(
                *(_values_of(sub) for sub in construct.subcons if sub.name != "padding")
            )
    raise TypeError(f"no values for {construct!r}: add them to this module")


def _fields_of(kind: type[Message]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind)
    fields = {}
    for sub in kind.layout.subcons:
        hint = hints.get(sub.name)
        if (kind, sub.name) in EXCEPTIONS:
            fields[sub.name] = EXCEPTIONS[kind, sub.name]
        elif isinstance(hint, type) and issubclass(hint, IntEnum):
            fields[sub.name] = st.sampled_from(hint)
        elif sub.name != "padding":
            fields[sub.name] = _values_of(sub)
    return fields


FIELDS: Final = {kind: _fields_of(kind) for kind in MESSAGES.values()}
"""For each message the strategies of its own fields."""


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of one kind, with any header fields."""
    return st.builds(kind, partition=PARTITIONS, opaque=U32, status=U16, **FIELDS[kind])


MESSAGES_OF_ANY_KIND: Final[st.SearchStrategy[Message]] = st.sampled_from(
    list(MESSAGES.values())
).flatmap(messages_of)
