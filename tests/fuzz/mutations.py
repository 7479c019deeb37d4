"""What becomes of an input by chance: the same for the same seed, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from re import finditer
from typing import Final

from upr_protocol.wire.frame import MAGIC

_FRAME: Final = MAGIC.to_bytes(2, "little")

NUMBERS: Final = (
    *(0, 1, 7, 8, 24, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x100000, 0x100001),
    *(0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFF8, 0xFFFF_FFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
"""At the edges of what fields hold and limits allow."""


def _place(random: Random, data: bytearray) -> int:
    """Rather towards the front, where heads and counts are."""
    return min(random.randrange(len(data)), random.randrange(len(data)))


def _flip(random: Random, data: bytearray, _donor: bytes) -> None:
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        data[_place(random, data)] ^= 1 << random.randrange(8)


def _overwrite(random: Random, data: bytearray, _donor: bytes) -> None:
    data[_place(random, data)] = random.randrange(256)


def _number(random: Random, data: bytearray, _donor: bytes) -> None:
    """A length, a count, an offset or a sequence number."""
    length = random.choice((1, 2, 4, 4, 4, 8))
    offset = _place(random, data)
    offset -= offset % random.choice((1, 2, 4, 8))
    value = random.choice((*NUMBERS, len(data), random.randrange(2 * len(data))))
    value = (value + random.choice((0, 0, 1, -1))) % (1 << 8 * length)
    data[offset : offset + length] = value.to_bytes(length, "little")


def _cut(random: Random, data: bytearray, _donor: bytes) -> None:
    del data[random.randrange(len(data)) :]


def _remove(random: Random, data: bytearray, _donor: bytes) -> None:
    offset = random.randrange(len(data))
    del data[offset : offset + random.choice((1, 4, 8, 24, 100))]


def _insert(random: Random, data: bytearray, _donor: bytes) -> None:
    offset = random.randrange(len(data) + 1)
    data[offset:offset] = random.choice(
        (bytes(8), b"\xff" * 8, random.randbytes(random.randrange(1, 40)))
    )


def _repeat(random: Random, data: bytearray, _donor: bytes) -> None:
    offset = random.randrange(len(data))
    data[offset:offset] = data[offset : offset + random.choice((1, 8, 24, 100, 1000))]


def _splice(random: Random, data: bytearray, donor: bytes) -> None:
    """The front of this, the back of another."""
    del data[random.randrange(len(data)) :]
    data += donor[random.randrange(len(donor) + 1) :]


def _again(random: Random, data: bytearray, _donor: bytes) -> None:
    """A frame is said again, somewhere."""
    starts = [match.start() for match in finditer(_FRAME, data)] or [0]
    bounds = [*starts, len(data)]
    index, to = random.randrange(len(starts)), random.choice(bounds)
    data[to:to] = data[bounds[index] : bounds[index + 1]]


def _manner(random: Random, data: bytearray, _donor: bytes) -> None:
    """What most targets are told first: how the rest is to be taken."""
    data[0] ^= 1 << random.randrange(8)


def _append(_random: Random, data: bytearray, donor: bytes) -> None:
    """Both, one behind the other, but for the bytes that say how."""
    data += donor[2:]


_KINDS: Final[Sequence[Callable[[Random, bytearray, bytes], None]]] = (
    *(
        _flip,
        _overwrite,
        _number,
        _number,
        _cut,
        _remove,
        _insert,
        _repeat,
        _splice,
        _append,
        _again,
        _again,
        _manner,
        _manner,
    ),
)


def mutations(data: bytes, donors: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """`count` inputs made of `data`, each changed in one to four ways.

    Args:
        data: What they are made of.
        donors: What they may have a part of.
        seed: The same gives the same.
        count: How many.
    """
    random = Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 2, 3, 4))):
            changed = changed or bytearray(1)
            random.choice(_KINDS)(random, changed, random.choice(donors))
        yield bytes(changed[:4096])
