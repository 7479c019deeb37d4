"""`python -m tests.kernel.fuzz`: what chance makes of chunks and of steps, until the time is over.

`make sanitize` runs it with the kernel built for the sanitizers. Atheris does not look into the
library, so chance does as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from random import Random
from time import monotonic
from typing import Final

from tests.fuzz.corpus import corpus
from tests.fuzz.mutations import mutations
from tests.kernel.targets import TARGETS
from upr_kernel import BUILD
from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.ids import Operation, PartitionId, SeqNo
from upr_protocol.wire import Mutate

ROUND: Final = 200
"""Mutations of one input before the next has its turn."""


def set_frame(size: int) -> bytes:
    """A frame that publishes one plain `SET`, to the only partition."""
    mutation = Mutation(Operation.SET, b"k%d" % size, b"v" * size, expiry=size, flags=2)
    bundle = Bundle.of_one_run(PartitionId(0), Chunk.build([mutation], SeqNo(0), SeqNo(0)), size)
    return b"".join(map(bytes, Mutate(bundle, bytes(15) + b"w", opaque=size).frame_buffers()))


def inputs(name: str) -> Mapping[str, bytes]:
    """What is mutated."""
    if name == "chunks":
        return corpus("chunk")
    random = Random(1)
    if name == "frames":
        return {
            f"frames of {count} sets": b"\x80" + b"".join(map(set_frame, range(1, count + 1)))
            for count in (1, 3, 20)
        }
    return {f"{steps} steps": random.randbytes(3 * steps) for steps in (5, 30, 60)}


def mutated(name: str, seed: int, count: int) -> Iterator[bytes]:
    """Mutations of all inputs of a target, `count` of each."""
    sources = inputs(name)
    for index, data in enumerate(sources.values()):
        yield from mutations(data, list(sources.values()), 1000 * seed + index, count)


def main() -> None:
    """Fuzzes the targets that are named, or all; ends at the first finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all if none"
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target; 60 if not given")
    parser.add_argument("--hex", type=bytes.fromhex, help="an input to repeat")
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    for name in options.targets or TARGETS:
        if options.hex is not None:
            TARGETS[name](options.hex)
            continue
        end, seed, tries = monotonic() + options.seconds, 0, 0
        while monotonic() < end:
            seed += 1
            for data in mutated(name, seed, ROUND):
                try:
                    TARGETS[name](data)
                except Exception as error:
                    error.add_note(f"python -m tests.kernel.fuzz {name} --hex {data.hex()}")
                    raise
                tries += 1
                if monotonic() >= end:
                    break
        print(f"{name}, {BUILD}: {tries:,} inputs in {options.seconds} s")  # noqa: T201


if __name__ == "__main__":
    main()
