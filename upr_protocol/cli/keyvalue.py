"""`upr get`, `upr set` and the other commands about single keys."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final

import click

from upr_protocol.cli.connection import ask
from upr_protocol.cli.errors import INCOMPLETE, say
from upr_protocol.cli.escaping import printable
from upr_protocol.cli.output import print_json, print_line, text_fields, write_output
from upr_protocol.cli.parameters import (
    U32,
    U64,
    URL_ADVICE,
    TargetCommand,
    bucket_argument,
    durability_options,
    number_type,
)
from upr_protocol.cli.standard_input import read_standard_input
from upr_protocol.client import Address, Client, Item, RefusedKeysError, WriteResult
from upr_protocol.errors import ADVICE, BrokenError, Status

_EXPIRY_MAX: Final = 2**32 - 1
"""The last expiry time, in 2106: it has 32 bits."""


def _octets(text: str) -> bytes:
    """The bytes of a command-line argument, whether or not they are UTF-8."""
    return os.fsencode(text)


_key = click.argument("key", type=_octets)
_value = click.argument("value")
_cas_option = click.option(
    "--cas",
    type=U64,
    default=0,
    metavar="CAS",
    help="Only if the item still has this CAS, as `upr get --json` prints it.",
)
_flags_option = click.option(
    "--flags",
    type=U32,
    default=0,
    metavar="NUMBER",
    help="32 bits for the application's own use, stored with the item.  [default: 0]",
)
_expire_option = click.option(
    "--expire-in",
    type=number_type(1, _EXPIRY_MAX),
    metavar="SECONDS",
    help="When the item expires, from now. [default: never]",
)


def _expiry(expire_in: int | None) -> int:
    """When an item expires, in seconds since 1970; 0 for never."""
    if expire_in is None:
        return 0
    expiry = int(time.time()) + expire_in
    if expiry > _EXPIRY_MAX:
        raise click.UsageError(
            f"--expire-in {expire_in}: no item expires after 2106; leave the option out"
        )
    return expiry


Write = Callable[[Client], Awaitable[WriteResult]]


def with_doubt(write: Write) -> Write:
    """The same request. If the connection is lost before the answer, the error says what that
    leaves open: to repeat `upr increment` may count twice."""

    async def write_once(client: Client) -> WriteResult:
        try:
            return await write(client)
        except BrokenError as error:
            if client.statistics().requests:
                error.add_note("the change may have been made or not: read the key to find out")
            raise

    return write_once


def _write_command(
    name: str, *parameters: Callable[[Any], Any]
) -> Callable[[Callable[..., Write]], click.Command]:
    """A command that changes one key, with `parameters` and those that all such commands have.

    The decorated function makes the request of its arguments, which are named as the client's
    methods name them: `value` is bytes here, and `expiry` a time.
    """

    def decorate(function: Callable[..., Write]) -> click.Command:
        @wraps(function)
        def run(target: Address, **arguments: Any) -> None:
            if "value" in arguments:
                value = arguments["value"]
                arguments["value"] = read_standard_input() if value == "-" else os.fsencode(value)
            if "expire_in" in arguments:
                arguments["expiry"] = _expiry(arguments.pop("expire_in"))
            result = ask(target, with_doubt(function(**arguments)))
            if result.count is not None:
                print_line(str(result.count))
            else:
                print_line(f"partition {result.partition}, seq {result.seq}, CAS {result.cas}")

        command: Any = run
        for parameter in reversed((bucket_argument, *parameters, durability_options)):
            command = parameter(command)
        target_command: click.Command = click.command(name, cls=TargetCommand)(command)
        return target_command

    return decorate


@click.command(cls=TargetCommand)
@bucket_argument
@click.argument("keys", nargs=-1, required=True, metavar="KEY...", type=_octets)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per key, with CAS, flags and expiry.",
)
@click.option("--raw", is_flag=True, help="Print only the value, without a newline.")
def get(target: Address, keys: tuple[bytes, ...], as_json: bool, raw: bool) -> None:
    r"""Print the values of keys.

    A newline follows each value. Standard error names missing keys, and keys whose records are
    damaged on the server's disk; the exit code is then 1.

    \b
    Examples:
      upr get upr://127.0.0.1:12000/planes N102UW
      upr get upr://127.0.0.1:12000/planes N102UW N103US --json
    """
    items: Sequence[Item | None]
    refusals: Mapping[bytes, Status] = {}
    try:
        items = ask(target, lambda client: client.get_many(keys))
    except RefusedKeysError as error:
        items, refusals = error.items, error.statuses
    missing_keys = [key for key, item in zip(keys, items, strict=True) if item is None]
    for item in items:
        if item is None:
            continue
        if as_json:
            print_json(_fields(item))
        else:
            write_output(_displayable(item.value), nl=not raw)
    for key in missing_keys:
        reason = ADVICE[refusals[key]] if key in refusals else "no such key"
        if key == keys[0] and b"://" in key:
            reason += f"; {URL_ADVICE}"
        say(f"{key.decode(errors='backslashreplace')}: {reason}")
    if missing_keys:
        raise click.exceptions.Exit(INCOMPLETE)


def _displayable(value: bytes) -> bytes:
    """A value as it is; on a terminal, with its control characters as escapes."""
    if not sys.stdout.isatty():
        return value
    return printable(value.decode(errors="backslashreplace"), keep="\n\t").encode()


def _fields(item: Item) -> dict[str, object]:
    return {
        "partition": item.partition,
        "seq": item.seq,
        **text_fields("key", item.key),
        **text_fields("value", item.value),
        "cas": str(item.cas),
        "flags": item.flags,
        "expiry": item.expiry,
    }


@_write_command("set", _key, _value, _cas_option, _flags_option, _expire_option)
def set_(key: bytes, value: bytes, **options: Any) -> Write:
    r"""Store a value.

    VALUE is stored at KEY whether or not the key exists; `-` reads it from standard input.

    \b
    Examples:
      upr set upr://127.0.0.1:12000/planes N102UW '{"seats": 182}'
      upr set upr://127.0.0.1:12000/planes N102UW - --expire-in 60 < plane.json
    """
    return lambda client: client.set(key, value, **options)


@_write_command("add", _key, _value, _flags_option, _expire_option)
def add(key: bytes, value: bytes, **options: Any) -> Write:
    """Store a value if the key does not exist."""
    return lambda client: client.add(key, value, **options)


@_write_command("replace", _key, _value, _cas_option, _flags_option, _expire_option)
def replace(key: bytes, value: bytes, **options: Any) -> Write:
    """Store a value if the key exists."""
    return lambda client: client.replace(key, value, **options)


@_write_command("append", _key, _value, _cas_option)
def append(key: bytes, value: bytes, **options: Any) -> Write:
    """Add to the end of a value."""
    return lambda client: client.append(key, value, **options)


@_write_command("prepend", _key, _value, _cas_option)
def prepend(key: bytes, value: bytes, **options: Any) -> Write:
    """Add to the front of a value."""
    return lambda client: client.prepend(key, value, **options)


@_write_command("delete", _key, _cas_option)
def delete(key: bytes, **options: Any) -> Write:
    """Remove a key."""
    return lambda client: client.delete(key, **options)


@_write_command("touch", _key, _cas_option, _expire_option)
def touch(key: bytes, expiry: int, **options: Any) -> Write:
    """Change when an item expires; without --expire-in it never does."""
    return lambda client: client.touch(key, expiry, **options)


_counter_options: Final = (
    click.option(
        "--by", type=U64, default=1, show_default=True, metavar="NUMBER", help="How much to change."
    ),
    click.option(
        "--initial",
        type=U64,
        metavar="NUMBER",
        help="The value of a counter that does not exist yet. [default: 0, changed by --by]",
    ),
    click.option(
        "--existing", is_flag=True, help="Refuse a counter that does not exist, and create none."
    ),
    _expire_option,
)


def _check_counter_options(existing: bool, initial: int | None) -> None:
    if existing and initial is not None:
        raise click.UsageError(
            "--initial is for a counter that does not exist yet, which --existing refuses; leave "
            "one of them out"
        )


@_write_command("increment", _key, *_counter_options)
def increment(key: bytes, by: int, existing: bool, initial: int | None, **options: Any) -> Write:
    r"""Add to a counter and print its new value.

    Counters are decimal text; they wrap at 2**64.

    \b
    Examples:
      upr increment upr://127.0.0.1:12000/counts landings
      upr increment upr://127.0.0.1:12000/counts landings --by 10 --initial 1000
    """
    _check_counter_options(existing, initial)
    return lambda client: client.increment(key, by, create=not existing, initial=initial, **options)


@_write_command("decrement", _key, *_counter_options)
def decrement(key: bytes, by: int, existing: bool, initial: int | None, **options: Any) -> Write:
    """Subtract from a counter and print its new value; it stops at 0."""
    _check_counter_options(existing, initial)
    return lambda client: client.decrement(key, by, create=not existing, initial=initial, **options)


COMMANDS: Final = (
    get,
    set_,
    add,
    replace,
    delete,
    increment,
    decrement,
    append,
    prepend,
    touch,
)
"""In the order in which help lists them."""
