"""`upr index`: secondary indexes, by way of an indexer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from upr_protocol.cli.exits import MisusedError, RefusedError
from upr_protocol.cli.numbers import number
from upr_protocol.cli.table import print_table
from upr_protocol.client import IndexClient, IndexerError, Written
from upr_protocol.ids import Cas, HistoryId, PartitionId, SeqNo

VARIABLE: Final = "UPR_INDEXER_URL"
URL_DEFAULT: Final = "http://127.0.0.1:12080"

_MISUSES: Final = frozenset({"bad_definition", "bad_query"})


class _Asking:
    """A client as a context; what the indexer refuses ends the command with a sentence."""

    def __init__(self, url: str) -> None:
        try:
            self._client = IndexClient(url)
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def __enter__(self) -> IndexClient:
        return self._client

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._client.close()
        if isinstance(error, IndexerError):
            kind = MisusedError if error.code in _MISUSES else RefusedError
            raise kind(str(error)) from error
        if isinstance(error, UnicodeEncodeError):
            raise MisusedError(f"{error.object!r} is not UTF-8") from error


def _indexer_option(command: Any) -> Any:
    return click.option(
        "--indexer",
        "url",
        metavar="URL",
        default=lambda: os.environ.get(VARIABLE, URL_DEFAULT),
        help=f"Where the indexer answers.  [default: {VARIABLE}, or {URL_DEFAULT}]",
    )(command)


@click.group()
def index() -> None:
    """Make secondary indexes of a bucket, and scan them.

    An indexer (upr-indexer) keeps them; these commands talk to it. A design is a document that
    names indexes; an index is called DESIGN/INDEX.
    """


@index.command()
@click.argument("design")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--index",
    "indexes",
    multiple=True,
    metavar="NAME=EXPRESSION[,EXPRESSION…]",
    help="An index and the JMESPath expressions of its key; several are made by several.",
)
@_indexer_option
def create(design: str, file: Path | None, indexes: tuple[str, ...], url: str) -> None:
    r"""Write the design document DESIGN, from FILE (JSON) or from options.

    \b
    Examples:
      upr index create flights --index by_origin=origin --index by_hour=origin,time_hour
      upr index create flights flights.json
    """
    if (file is None) == (not indexes):
        raise click.UsageError("give a file, or --index, and not both")
    body: object = file.read_bytes() if file is not None else _design(indexes)
    with _Asking(url) as client:
        client.create(design, body)
    click.echo(f"created {design}")


def _design(indexes: tuple[str, ...]) -> object:
    found: dict[str, object] = {}
    for each in indexes:
        name, equals, expressions = each.partition("=")
        if not equals or name in found:
            raise click.UsageError(f"{each!r} names no index, or one again: write NAME=EXPRESSION")
        found[name] = {"key": expressions.split(",")}
    return {"indexes": found}


@index.command()
@click.argument("design")
@_indexer_option
def drop(design: str, url: str) -> None:
    """Remove the design document DESIGN, and its indexes."""
    with _Asking(url) as client:
        client.drop(design)
    click.echo(f"dropped {design}")


@index.command("list")
@_indexer_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_indexes(url: str, as_json: bool) -> None:
    """List the indexes.

    Standard error tells of design documents that cannot be used, and why.
    """
    with _Asking(url) as client:
        found, mistakes = client.indexes(), client.mistakes()
    columns = ("name", "state", "entries", "disk_bytes", "behind")
    print_table(
        columns, [tuple(row[column] for column in columns) for row in found], as_json=as_json
    )
    for design, mistake in mistakes.items():
        click.echo(f"upr: the design {design} cannot be used: {mistake}", err=True)


@index.command()
@click.argument("name", metavar="[DESIGN/INDEX]", required=False)
@_indexer_option
def status(name: str | None, url: str) -> None:
    """Show how an index does, or the indexer, as a JSON object."""
    with _Asking(url) as client:
        found = client.status() if name is None else client.index(name)
    click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())


def _json_list(place: str, text: str) -> list[Any]:
    try:
        value = msgspec.json.decode(text.encode(errors="surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = text  # a word without quotes, as one writes it in a shell
    if isinstance(value, dict):
        raise click.BadParameter(f"{place}: an object is no key")
    return value if isinstance(value, list) else [value]


def _key(name: str) -> Any:
    return lambda text: _json_list(name, text)


def _written(text: str) -> Written:
    try:
        partition, history_id, seq = text.split(":")
        return Written(
            PartitionId(int(partition)), HistoryId(int(history_id, 16)), SeqNo(int(seq)), Cas(0)
        )
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is no change: write PARTITION:HISTORY:NUMBER, HISTORY in hexadecimal digits"
        ) from error


@index.command()
@click.argument("name", metavar="DESIGN/INDEX")
@click.option("--prefix", type=_key("--prefix"), metavar="KEY", help="Keys that begin so.")
@click.option("--from", "low", type=_key("--from"), metavar="KEY", help="Where to begin.")
@click.option("--to", "high", type=_key("--to"), metavar="KEY", help="Where to end.")
@click.option("--from-exclusive", is_flag=True, help="Without keys that begin as --from.")
@click.option("--to-exclusive", is_flag=True, help="Without keys that begin as --to.")
@click.option("--descending", is_flag=True, help="The highest first.")
@click.option("--limit", type=number(1, 10**12), metavar="NUMBER", help="At most so many.")
@click.option("--count", is_flag=True, help="How many there are, and not which.")
@click.option(
    "--consistency",
    type=click.Choice(["any", "at_least", "now"]),
    default="now",
    show_default=True,
    help="How fresh: any; at least with what --written names; all that the server has now.",
)
@click.option(
    "--written",
    multiple=True,
    type=_written,
    metavar="PARTITION:HISTORY:NUMBER",
    help="A change that must be in the index.",
)
@click.option(
    "--timeout",
    type=number(0, 300),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for that.",
)
@_indexer_option
def scan(
    name: str,
    prefix: list[Any] | None,
    low: list[Any] | None,
    high: list[Any] | None,
    from_exclusive: bool,
    to_exclusive: bool,
    descending: bool,
    limit: int | None,
    count: bool,
    consistency: Literal["any", "at_least", "now"],
    written: tuple[Written, ...],
    timeout: int,
    url: str,
) -> None:
    r"""Print the entries of an index, a JSON object a line.

    A KEY is a JSON value, or a list of the key's first parts; a plain word stands for itself.

    \b
    Examples:
      upr index scan flights/by_origin --prefix JFK
      upr index scan flights/by_hour --from '["JFK", "2013-07"]' --to '["JFK", "2013-08"]'
      upr index scan flights/by_origin --descending --limit 10
    """
    if written and consistency == "now":
        consistency = "at_least"
    range_: dict[str, Any] = {
        "prefix": prefix,
        "low": None if low is None else (low, not from_exclusive),
        "high": None if high is None else (high, not to_exclusive),
    }
    fresh: dict[str, Any] = {
        "consistency": consistency,
        "written": written,
        "timeout_s": timeout,
    }
    with _Asking(url) as client:
        if count:
            click.echo(client.count(name, **range_, **fresh))
            return
        left = limit
        continuation = ""
        while left is None or left > 0:
            page = client.scan(
                name,
                **range_,
                **fresh,
                descending=descending,
                limit=min(1000, left or 1000),
                continuation=continuation,
            )
            for entry in page.entries:
                click.echo(msgspec.json.encode(entry))
            left = None if left is None else left - len(page.entries)
            continuation = page.continuation
            if not continuation:
                break
