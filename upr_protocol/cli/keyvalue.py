"""`upr get`, `upr set` and the other commands about single keys."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import click
import msgspec

from upr_protocol.cli.connection import ask
from upr_protocol.cli.durability import durability_option
from upr_protocol.cli.exits import INCOMPLETE, say
from upr_protocol.cli.lines import text_fields
from upr_protocol.cli.numbers import U32, U64, number
from upr_protocol.cli.target import TargetCommand, bucket_argument
from upr_protocol.client import Address, Client, Item, Written
from upr_protocol.ids import Durability

_EXPIRE_IN_MAX: Final = 100 * 365 * 86_400
"""A hundred years: the expiry time has 32 bits, which end in 2106."""

_cas_option = click.option(
    "--cas",
    type=U64,
    default=0,
    metavar="CAS",
    help="Only if this is still the item's CAS, as `upr get --json` prints it.",
)
_flags_option = click.option(
    "--flags",
    type=U32,
    default=0,
    metavar="NUMBER",
    help="The application's own 32 bits, kept with the item.",
)
_expire_option = click.option(
    "--expire-in",
    type=number(1, _EXPIRE_IN_MAX),
    metavar="SECONDS",
    help="When the item expires, from now. [default: never]",
)


def _command(name: str, *options: Callable[[Any], Any]) -> Callable[[Any], click.Command]:
    """A command about one key of a bucket, with `options` and those that all have."""

    def decorate(function: Any) -> click.Command:
        for option in reversed((bucket_argument, *options, durability_option)):
            function = option(function)
        made: click.Command = click.command(name, cls=TargetCommand)(function)
        return made

    return decorate


def _octets(text: str) -> bytes:
    """The bytes that stood on the command line, be they UTF-8 or not."""
    return os.fsencode(text)


_key = click.argument("key", type=_octets)
_value = click.argument("value")


def _expiry(expire_in: int | None) -> int:
    return 0 if expire_in is None else int(time.time()) + expire_in


def _input(value: str) -> bytes:
    """What is to be stored: the argument, or standard input for `-`."""
    return sys.stdin.buffer.read() if value == "-" else os.fsencode(value)


def _write(target: Address, operation: Callable[[Client], Awaitable[Written]]) -> None:
    written = ask(target, operation)
    if written.count is not None:
        click.echo(written.count)
    else:
        click.echo(f"partition {written.partition}, seq {written.seq}, CAS {written.cas}")


@click.command(cls=TargetCommand)
@bucket_argument
@click.argument("keys", nargs=-1, required=True, metavar="KEY...", type=_octets)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a key, with CAS, flags and expiry."
)
@click.option("--raw", is_flag=True, help="Print nothing but the value, without a newline.")
def get(target: Address, keys: tuple[bytes, ...], as_json: bool, raw: bool) -> None:
    r"""Print the values of keys.

    Each is followed by a newline. A key that is missing is named on standard error, and the exit
    code is 1.

    \b
    Examples:
      upr get upr://127.0.0.1:12000/planes N102UW
      upr get upr://127.0.0.1:12000/planes N102UW N103US --json
    """
    items = ask(target, lambda client: client.get_many(keys))
    missing = [key for key, item in zip(keys, items, strict=True) if item is None]
    for item in items:
        if item is None:
            continue
        if as_json:
            click.echo(msgspec.json.encode(_fields(item)))
        else:
            click.echo(item.value, nl=not raw)
    for key in missing:
        say(f"{os.fsdecode(key)}: no such key")
    if missing:
        raise click.exceptions.Exit(INCOMPLETE)


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


@_command("set", _key, _value, _cas_option, _flags_option, _expire_option)
def set_(
    target: Address,
    key: bytes,
    value: str,
    cas: int,
    flags: int,
    expire_in: int | None,
    durability: Durability,
    copies: int,
) -> None:
    r"""Store a value.

    VALUE is stored at KEY whether or not the key exists; `-` reads it from standard input.

    \b
    Examples:
      upr set upr://127.0.0.1:12000/planes N102UW '{"seats": 182}'
      upr set upr://127.0.0.1:12000/planes N102UW - --expire-in 60 < plane.json
    """
    data, expiry = _input(value), _expiry(expire_in)
    _write(
        target,
        lambda client: client.set(
            key, data, cas=cas, flags=flags, expiry=expiry, durability=durability, copies=copies
        ),
    )


@_command("add", _key, _value, _flags_option, _expire_option)
def add(
    target: Address,
    key: bytes,
    value: str,
    flags: int,
    expire_in: int | None,
    durability: Durability,
    copies: int,
) -> None:
    """Store a value if the key does not exist."""
    data, expiry = _input(value), _expiry(expire_in)
    _write(
        target,
        lambda client: client.add(
            key, data, flags=flags, expiry=expiry, durability=durability, copies=copies
        ),
    )


@_command("replace", _key, _value, _cas_option, _flags_option, _expire_option)
def replace(
    target: Address,
    key: bytes,
    value: str,
    cas: int,
    flags: int,
    expire_in: int | None,
    durability: Durability,
    copies: int,
) -> None:
    """Store a value if the key exists."""
    data, expiry = _input(value), _expiry(expire_in)
    _write(
        target,
        lambda client: client.replace(
            key, data, cas=cas, flags=flags, expiry=expiry, durability=durability, copies=copies
        ),
    )


@_command("append", _key, _value, _cas_option)
def append(
    target: Address, key: bytes, value: str, cas: int, durability: Durability, copies: int
) -> None:
    """Add to the end of what is stored."""
    data = _input(value)
    _write(
        target,
        lambda client: client.append(key, data, cas=cas, durability=durability, copies=copies),
    )


@_command("prepend", _key, _value, _cas_option)
def prepend(
    target: Address, key: bytes, value: str, cas: int, durability: Durability, copies: int
) -> None:
    """Add to the front of what is stored."""
    data = _input(value)
    _write(
        target,
        lambda client: client.prepend(key, data, cas=cas, durability=durability, copies=copies),
    )


@_command("delete", _key, _cas_option)
def delete(target: Address, key: bytes, cas: int, durability: Durability, copies: int) -> None:
    """Remove a key."""
    _write(target, lambda client: client.delete(key, cas=cas, durability=durability, copies=copies))


@_command("touch", _key, _cas_option, _expire_option)
def touch(
    target: Address,
    key: bytes,
    cas: int,
    expire_in: int | None,
    durability: Durability,
    copies: int,
) -> None:
    """Give an item a new time to expire; without --expire-in, none."""
    expiry = _expiry(expire_in)
    _write(
        target,
        lambda client: client.touch(key, expiry, cas=cas, durability=durability, copies=copies),
    )


_by_option = click.option(
    "--by", type=U64, default=1, show_default=True, metavar="NUMBER", help="How much."
)
_initial_option = click.option(
    "--initial",
    type=U64,
    metavar="NUMBER",
    help="What a missing counter becomes, as it is. [default: 0, changed by --by]",
)
_existing_option = click.option(
    "--existing", is_flag=True, help="Refuse a missing counter instead of making it."
)


@_command("increment", _key, _by_option, _initial_option, _existing_option, _expire_option)
def increment(
    target: Address,
    key: bytes,
    by: int,
    initial: int | None,
    existing: bool,
    expire_in: int | None,
    durability: Durability,
    copies: int,
) -> None:
    r"""Add to a counter and print its new value.

    Counters are decimal text; they wrap at 2**64.

    \b
    Examples:
      upr increment upr://127.0.0.1:12000/counts landings
      upr increment upr://127.0.0.1:12000/counts landings --by 10 --initial 1000
    """
    expiry = _expiry(expire_in)
    _write(
        target,
        lambda client: client.increment(
            key,
            by,
            initial=initial,
            create=not existing,
            expiry=expiry,
            durability=durability,
            copies=copies,
        ),
    )


@_command("decrement", _key, _by_option, _initial_option, _existing_option, _expire_option)
def decrement(
    target: Address,
    key: bytes,
    by: int,
    initial: int | None,
    existing: bool,
    expire_in: int | None,
    durability: Durability,
    copies: int,
) -> None:
    """Subtract from a counter and print its new value; it stops at 0."""
    expiry = _expiry(expire_in)
    _write(
        target,
        lambda client: client.decrement(
            key,
            by,
            initial=initial,
            create=not existing,
            expiry=expiry,
            durability=durability,
            copies=copies,
        ),
    )


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
