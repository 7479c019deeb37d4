"""Conversations as readable text, in the manner of etcd's raft: command, `----`, expected output.

Blocks are separated by blank lines; `#` begins a comment. Commands, several to a block if need be:

    opened                  skips to where a bucket is open
    client|server MESSAGE   that side says it; it is on its way
    lie client|server MESSAGE   it arrives though the session of that side would not say it
    deliver                 what is on its way arrives, in both directions, until all is quiet
    deliver client|server   what is on its way to one side arrives
    ready PARTITION         the server's application has something for that partition
    next                    the server asks whose turn it is
    done                    the partition whose turn it is has nothing more, or nothing after all
    acknowledge             the client deals with everything that came
    tick SECONDS            that much time passes, and both sides look at their clocks
    streams                 where each stream stands, as each side sees it
    flow                    window, credit and barriers, as each side sees them

`python -m tests.protocol.session.transcript` writes what is said now into the files as what is
expected. Read the difference before you believe it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.protocol.session import kit
from tests.protocol.session.kit import HISTORY, LOG, Pair, taken
from upr_protocol import wire
from upr_protocol.chunk import Bundle, Chunk
from upr_protocol.errors import LocalProtocolError, RemoteProtocolError, Status
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import NO_PARTITION, PartitionId, PartitionState, SeqNo
from upr_protocol.session import Session
from upr_protocol.wire import Message

DIRECTORY: Final = Path(__file__).with_name("transcripts")


def have(complete: int, received: int | None = None, of: int = 0, history: int = 7) -> Position:
    """What a client has: all up to `complete`, and up to `received` of a snapshot that ends at
    `of`."""
    log = FailoverLog.of_pairs([(history, 0)])
    if received is None:
        return Position(log, SeqNo(complete), SeqNo(complete))
    partial = PartialSnapshot(HISTORY, SeqNo(complete), SeqNo(of))
    return Position(log, SeqNo(complete), SeqNo(received), partial)


def _stream(partition: int, opaque: int, position: Position = kit.BEGINNING) -> Message:
    return kit.stream(partition, opaque, position)


def _log(partition: int, opaque: int, high: int) -> Message:
    return wire.PartitionLog(
        PartitionState.ACTIVE,
        SeqNo(high),
        SeqNo(0),
        SeqNo(0),
        LOG,
        partition=PartitionId(partition),
        opaque=opaque,
    )


NAMES: Final[dict[str, Any]] = {
    **{kind.__name__: kind for kind in wire.MESSAGES.values()},
    **{status.name: status for status in Status},
    "Stream": _stream,
    "PartitionLog": _log,
    "StreamReply": kit.stream_reply,
    "PartitionStart": kit.start,
    "PartitionChunk": kit.chunk,
    "PartitionSnapshot": kit.snapshot,
    "PartitionEnd": kit.end,
    "CloseStream": kit.close_stream,
    "StreamEnd": kit.stream_end,
    "have": have,
    "Mutate": kit.mutate,
    "MutateReply": kit.mutate_reply,
}
"""What a MESSAGE may be made of."""


def show(message: Message) -> str:
    """A message in one line: its name, and whatever is not as it is by default."""
    parts = [type(message).__name__]
    if message.partition != NO_PARTITION:
        parts.append(f"partition={message.partition}")
    if message.opaque:
        parts.append(f"opaque={message.opaque}")
    if message.status:
        parts.append(f"status={Status(message.status).name}")
    common = Message.__struct_fields__
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if field.name not in common and value not in (field.default, ""):
            parts.append(f"{field.name}={_show_value(value)}")
    return " ".join(parts)


def _show_value(value: object) -> str:
    if isinstance(value, Bundle):
        return " ".join(f"{run.row_count} of {run.partition}" for run in value.runs)
    if isinstance(value, Chunk):
        return f"({value.start}, {value.end}]"
    if isinstance(value, FailoverLog):
        return "log" if value == LOG else repr(value.pairs())
    if isinstance(value, Position):
        if value.partial is None:
            return f"all-to-{value.last_complete}"
        return (
            f"all-to-{value.last_complete},some-to-{value.highest_received}-of-{value.partial.end}"
        )
    if hasattr(value, "name"):
        return str(value.name)
    text = repr(value)
    return text.replace(", ", ",") if isinstance(value, tuple) else text


def _message(text: str) -> Message:
    message = eval(text, {"__builtins__": {}}, NAMES)
    assert isinstance(message, Message)
    return message


class Stage:
    """Two sessions, and the commands that move them."""

    def __init__(self) -> None:
        self.pair = Pair(window_bytes=64 * 1024)
        self.to_acknowledge = 0

    def run(self, command: str) -> Iterator[str]:
        """The output of one command, line by line."""
        word, _, arguments = command.partition(" ")
        yield from getattr(self, f"do_{word}")(arguments)

    def do_opened(self, _: str) -> Iterator[str]:
        self.pair.deliver()
        self.pair.client_sends(wire.Open("flights", opaque=1))
        self.pair.server_sends(wire.Opened(64, 1, opaque=1))
        yield from ()

    def do_client(self, text: str) -> Iterator[str]:
        yield from self._say(self.pair.client, text)

    def do_server(self, text: str) -> Iterator[str]:
        yield from self._say(self.pair.server, text)

    def _say(self, session: Session, text: str) -> Iterator[str]:
        try:
            session.send(_message(text))
        except LocalProtocolError as error:
            yield f"refused here, {error.status.name}: {error}"

    def do_lie(self, text: str) -> Iterator[str]:
        side, _, message_text = text.partition(" ")
        data = kit.encoded(_message(message_text))
        if side == "client":
            yield from self._receive(self.pair.server, "server", data)
        else:
            yield from self._receive(self.pair.client, "client", data)

    def do_deliver(self, to: str) -> Iterator[str]:
        client, server = self.pair.client, self.pair.server
        while True:
            before = (client.state, server.state)
            if to != "client":
                yield from self._carry(client, server, "server")
            if to != "server":
                yield from self._carry(server, client, "client")
            if (client.state, server.state) != before:
                yield f"client is {client.state.name}, server is {server.state.name}"
            if to or not (client.outgoing_bytes or server.outgoing_bytes):
                return

    def _carry(self, sender: Session, receiver: Session, name: str) -> Iterator[str]:
        yield from self._receive(receiver, name, taken(sender, self.pair.now))

    def _receive(self, receiver: Session, name: str, data: bytes) -> Iterator[str]:
        receiver.receive(data, self.pair.now)
        try:
            for message in receiver.messages():
                yield f"{name} hears {show(message)}"
                if isinstance(message, wire.PartitionChunk):
                    self.to_acknowledge += wire.HEADER_BYTES + message.chunk.nbytes
        except RemoteProtocolError as error:
            yield f"{name} refuses, {error.status.name}: {error}"

    def do_ready(self, text: str) -> Iterator[str]:
        self.pair.server.mark_ready(PartitionId(int(text)))
        yield from ()

    def do_next(self, _: str) -> Iterator[str]:
        turn = self.pair.server.next_partition()
        yield "nothing to stream" if turn is None else f"it is the turn of partition {turn}"

    def do_done(self, _: str) -> Iterator[str]:
        self.pair.server.end_turn()
        yield from ()

    def do_acknowledge(self, _: str) -> Iterator[str]:
        self.pair.client.acknowledge(self.to_acknowledge)
        self.to_acknowledge = 0
        yield from ()

    def do_tick(self, text: str) -> Iterator[str]:
        self.pair.now += float(text)
        for name, session in (("client", self.pair.client), ("server", self.pair.server)):
            if not session.tick(self.pair.now):
                yield f"{name} takes its peer for dead"

    def do_streams(self, _: str) -> Iterator[str]:
        for name, session in (("client", self.pair.client), ("server", self.pair.server)):
            for record in session.streams.values():
                yield (
                    f"{name}: partition {record.partition} is {record.state.name}, complete at "
                    f"{record.complete}, stands at {record.seq} of {record.end}"
                )
            if not session.streams:
                yield f"{name}: none"

    def do_flow(self, _: str) -> Iterator[str]:
        for name, session in (("client", self.pair.client), ("server", self.pair.server)):
            barriers = ", ".join(cookie.decode() for cookie in session.barriers) or "none"
            yield (
                f"{name}: window {session.window.used_bytes} used and "
                f"{session.window.remaining_bytes} left, credit "
                f"{session.credit.remaining_bytes}, barriers {barriers}"
            )


def replay(text: str) -> str:
    """`text` with what is really said in place of what is expected."""
    stage = Stage()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        commands = lines[: lines.index("----")] if "----" in lines else lines
        heads = [line for line in commands if not line.startswith("#")]
        if heads:
            output = [line for command in heads for line in stage.run(command)]
            lines = [*commands, "----", *(output or ["ok"])]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def rewrite() -> None:
    """Writes what is said now into the files."""
    for path in sorted(DIRECTORY.glob("*.txt")):
        text = path.read_text()
        new_text = replay(text)
        if new_text != text:
            path.write_text(new_text)
            sys.stdout.write(f"rewrote {path.name}\n")


if __name__ == "__main__":
    rewrite()
