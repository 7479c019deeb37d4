"""Walking through an ordered map from end to end, to see that its tree is in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from upr_protocol.chunk import Buffer
from upr_server.storage.offline.findings import Damage, Progress, Report
from upr_server.storage.ordered_map import ReadTransaction

KEYS_END: Final = b"\xff" * 512
"""Behind every key."""

_PROGRESS_RECORDS: Final = 100_000


def walk_map(
    transaction: ReadTransaction,
    count: int,
    name: str,
    check_record: Callable[[bytes, Buffer], None],
) -> Iterator[Report]:
    """Checks that keys rise, that each is found, how many they are, and each record.

    Args:
        transaction: What to read in.
        count: How many keys the map says that it has.
        name: `log` or `index`.
        check_record: Checks one record. Whatever it raises is a problem: damage may end a parser
            in any way.
    """
    is_in_index = name == "index"
    previous_key: bytes | None = None
    scanned_count = 0
    for key, value in transaction.scan(b"", KEYS_END):
        if previous_key is not None and key <= previous_key:
            text = f"the {name} has {_record(key)} after {_record(previous_key)}"
            yield Damage(text, is_in_index=is_in_index)
        previous_key = key
        looked_up = transaction.get(key)
        if looked_up is None or bytes(looked_up) != bytes(value):
            text = f"the {name} has {_record(key)}, but does not find it"
            yield Damage(text, is_in_index=is_in_index)
        try:
            check_record(key, value)
        except Exception as error:  # noqa: BLE001  # see above
            yield Damage(f"{_record(key)} in the {name}: {error}", is_in_index=is_in_index)
        scanned_count += 1
        if not scanned_count % _PROGRESS_RECORDS:
            yield Progress(records=_PROGRESS_RECORDS)
    yield Progress(records=scanned_count % _PROGRESS_RECORDS)
    if scanned_count != count:
        text = f"the {name} should have {count} records, and has {scanned_count}"
        yield Damage(text, is_in_index=is_in_index)


def _record(key: bytes) -> str:
    return f"the record {key[:40].hex()}"
