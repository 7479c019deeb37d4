"""A random schedule of changes, broken connections and failovers for a client and its fake
server."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

import trio
from trio.testing import MockClock

from tests.kit.branches import Branches
from tests.kit.fake_net import ENDLESS, FakeNet
from tests.kit.fake_server import FakeServer
from upr_protocol.errors import Status
from upr_protocol.ids import Operation
from upr_protocol.wire import Get, Message


class DrawnSchedule(ABC):
    """A random schedule of changes and broken connections.

    Args:
        seed: The seed of all random choices.
        partitions: How many partitions the server has.
        keys: How many keys are changed.
        deletion_one_in: On average, one of so many changes is a deletion.

    Attributes:
        server: The server.
    """

    def __init__(self, seed: int, partitions: int, *, keys: int, deletion_one_in: int) -> None:
        self._rng = random.Random(seed)
        self.server = FakeServer(partitions)
        self.server.chunk_mutations = self._rng.randint(1, 5)
        self._keys = keys
        self._deletion_one_in = deletion_one_in

    def _chance(self, one_in: int) -> bool:
        return not self._rng.randrange(one_in)

    def _budgets(self) -> Iterator[tuple[int, int]]:
        """How many bytes each connection carries before it breaks."""
        while not self._chance(8):
            yield (ENDLESS, self._rng.randrange(0, 4000))

    def _change(self) -> None:
        for _ in range(self._rng.randrange(10)):
            key = b"key-%d" % self._rng.randrange(self._keys)
            if self._chance(self._deletion_one_in):
                self.server.put(key, b"", Operation.DELETE)
            else:
                self.server.put(key, b"%d" % self._rng.randrange(1 << 30))

    @abstractmethod
    async def _main(self) -> None:
        """Runs the schedule to its end."""

    def run(self) -> None:
        """Runs the schedule with a mock clock."""
        trio.run(self._main, clock=MockClock(autojump_threshold=0))


class FailoverSchedule(DrawnSchedule):
    """A schedule that also has failovers at any moment, even during the client's requests.

    Attributes:
        branches: The mutations of every history of the server.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 2, keys=12, deletion_one_in=4)
        self.server.get_items_max = self._rng.randint(1, 5)
        self.server.refuse = self._on_request
        self.branches = Branches(self.server)
        self._net: FakeNet | None = None
        self._disasters = True

    def _fail_over(self) -> None:
        # A client that streams from the partition loses its connection.
        assert self._net is not None
        self._net.cut()
        for connection in list(self.server.connections):
            connection.scope.cancel()
        partition = self._rng.choice(self.server.partitions)
        # The new history seldom begins far back.
        branch_seq = max(0, partition.high - int(self._rng.expovariate(0.2)))
        self.branches.fail_over(partition.id, branch_seq)

    def _on_request(self, message: Message) -> Status | None:
        if self._disasters and isinstance(message, Get) and self._chance(4):
            self._fail_over()
            if self._chance(2):
                self._change()
        return None

    def _disturb(self) -> None:
        assert self._net is not None
        if self._chance(6):
            self._change()
        if self._chance(15):
            self._net.cut()
        if self._chance(20):
            self._fail_over()
