"""`upr index`: secondary indexes, which an indexer keeps."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from upr_protocol.cli.errors import BadInputError, RefusedError, say
from upr_protocol.cli.output import print_json, print_line, print_table
from upr_protocol.cli.parameters import json_option, number_type
from upr_protocol.cli.security_options import SecurityCommand, security_of
from upr_protocol.cli.standard_input import read_standard_input
from upr_protocol.client import (
    DESIGN_BYTES_MAX,
    IndexClient,
    IndexerError,
    IndexRange,
    WriteResult,
)
from upr_protocol.ids import PARTITIONS_END, Cas, HistoryId, PartitionId, SeqNo

INDEXER_URL_VARIABLE: Final = "UPR_INDEXER_URL"
URL_DEFAULT: Final = "http://127.0.0.1:12080"

_BAD_INPUTS: Final = frozenset({"bad_definition", "bad_query"})
"""Error codes of the indexer that tell of a mistake on the command line."""

_ENTRIES_MAX: Final = 10_000
"""The most entries of one answer."""

_CHANGE: Final = re.compile(r"(\d{1,4}):([0-9a-fA-F]{1,16}):(\d{1,18})", re.ASCII)

_RANGE_FIELD: Final = re.compile(r"ranges\[(\d+)\]\.(prefix|low|high)[^:]*: ")
"""What the errors about a range begin with. Nobody has written it: each range is of an option."""


_JSON_STARTS: Final = ("[", "{", '"')
"""What people begin with who mean JSON, and not a word."""


@contextmanager
def _indexer(url: str) -> Iterator[IndexClient]:
    """A client of the indexer, whose errors end the command with a sentence."""
    try:
        client = IndexClient(url, security_of(click.get_current_context()))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        yield client
    except IndexerError as error:
        kind = BadInputError if error.code in _BAD_INPUTS else RefusedError
        raise kind(str(error)) from error
    except UnicodeEncodeError as error:
        raise BadInputError(f"{error.object!r} is not UTF-8; write it in UTF-8") from error
    finally:
        client.close()


_indexer_option: Final = click.option(
    "--indexer",
    "url",
    metavar="URL",
    default=lambda: os.environ.get(INDEXER_URL_VARIABLE, URL_DEFAULT),
    help="The indexer's URL; several nodes with commas between.  "
    f"[default: {INDEXER_URL_VARIABLE}, or {URL_DEFAULT}]",
)


@click.group()
def index() -> None:
    """Create secondary indexes of a bucket, and scan them.

    These commands talk to an indexer (upr-indexer), which keeps the indexes. A design document
    defines one or more of them; the name of an index is DESIGN/INDEX.
    """


@index.command(cls=SecurityCommand)
@click.argument("design")
@click.argument("file", required=False)
@click.option(
    "--index",
    "indexes",
    multiple=True,
    metavar="NAME=EXPRESSION[,EXPRESSION…]",
    help="An index, and the JMESPath expressions of its key. Repeat it for several.",
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="NAME=EXPRESSION",
    help="What must be true of the documents in the index NAME, which --index defines.",
)
@click.option(
    "--each",
    "each",
    multiple=True,
    metavar="NAME=EXPRESSION",
    help="The expression of the key whose arrays make an entry for each element.",
)
@click.option(
    "--include",
    "includes",
    multiple=True,
    metavar="NAME=EXPRESSION[,EXPRESSION…]",
    help="Values that entries have beside their keys.",
)
@_indexer_option
def create(
    design: str,
    file: str | None,
    indexes: tuple[str, ...],
    filters: tuple[str, ...],
    each: tuple[str, ...],
    includes: tuple[str, ...],
    url: str,
) -> None:
    r"""Store the design document DESIGN, from FILE or from --index.

    FILE is JSON; `-` is standard input.

    \b
    Examples:
      upr index create flights --index by_origin=origin --index by_hour=origin,time_hour
      upr index create flights --index late=origin --filter 'late=dep_delay > `60`'
      upr index create posts --index by_tag=tags,date --each by_tag=tags --include by_tag=title
      upr index create flights flights.json
    """
    if (file is None) == (not indexes):
        raise click.UsageError("give either a file or --index")
    if file is not None and (filters or each or includes):
        raise click.UsageError("a file has all in it; leave out --filter, --each and --include")
    body = _design(indexes, filters, each, includes) if file is None else _read_design(file)
    with _indexer(url) as client:
        client.create(design, body)
    print_line(f"created {design}")


def _read_design(file: str) -> bytes:
    """A design document in a file, or on standard input."""
    if file == "-":
        text = read_standard_input()
    else:
        with Path(file).open("rb") as stream:
            text = stream.read(DESIGN_BYTES_MAX + 1)
    if len(text) > DESIGN_BYTES_MAX:
        raise BadInputError(
            f"{'standard input' if file == '-' else file} has more than {DESIGN_BYTES_MAX:,} "
            "bytes, the limit of a design document; is it the right file?"
        )
    return text


def _design(
    indexes: tuple[str, ...],
    filters: tuple[str, ...],
    each: tuple[str, ...],
    includes: tuple[str, ...],
) -> object:
    definitions: dict[str, dict[str, object]] = {}
    for name, expressions in _definitions("index", indexes):
        definitions[name] = {"key": split_expressions(expressions)}
    for field, texts in ("filter", filters), ("each", each), ("include", includes):
        for name, text in _definitions(field, texts):
            if name not in definitions:
                raise click.UsageError(
                    f"--{field} {name}=… has no --index {name}=…; define that index, too"
                )
            definitions[name][field] = split_expressions(text) if field == "include" else text
    return {"indexes": definitions}


def _definitions(kind: str, texts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The name and the expressions of each option of a kind."""
    names: set[str] = set()
    for text in texts:
        name, equals, expressions = text.partition("=")
        if not (name and equals and expressions):
            missing_part = "an expression" if name and equals else "a name"
            raise click.UsageError(f"--{kind} {text!r} lacks {missing_part}; write NAME=EXPRESSION")
        if name in names:
            raise click.UsageError(f"the {kind} {name!r} is defined twice; leave out one of them")
        names.add(name)
        yield name, expressions


def split_expressions(text: str) -> list[str]:
    """The expressions of a key, which commas separate. A comma inside brackets or quotes belongs
    to an expression."""
    expressions, start, depth, quote, is_escaped = [], 0, 0, "", False
    for position, character in enumerate(text):
        if quote:
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"`":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            expressions.append(text[start:position])
            start = position + 1
    return [*expressions, text[start:]]


@index.command(cls=SecurityCommand)
@click.argument("design")
@_indexer_option
def drop(design: str, url: str) -> None:
    """Delete the design document DESIGN and its indexes."""
    if "/" in design:
        raise click.UsageError(
            f"{design!r} names an index, and a design is dropped with all its indexes: give the "
            "design alone; to drop one index, create the design again without it"
        )
    with _indexer(url) as client:
        client.drop(design)
    print_line(f"dropped {design}")


@index.command("list", cls=SecurityCommand)
@_indexer_option
@json_option
def list_indexes(url: str, as_json: bool) -> None:
    """List the indexes.

    The column disk_bytes is in bytes. behind counts the changes that are yet to be indexed. slices
    counts the slices that have a copy that is ready. trouble names the copies that are not ready,
    or cannot be written. Design documents with mistakes are reported on standard error.
    """
    with _indexer(url) as client:
        not_ready_reason = client.not_ready_reason()
        indexes, mistakes = client.indexes(), client.design_mistakes()
    if not_ready_reason:
        say(f"the indexer is starting: {not_ready_reason}")
    columns = ("name", "state", "entries", "disk_bytes", "behind")
    print_table(
        (*columns, "slices", "trouble"),
        [
            (*(row[column] for column in columns), _ready_slices(row), trouble_of(row))
            for row in indexes
        ],
        as_json=as_json,
    )
    for design, mistake in mistakes.items():
        say(f"the design {design} cannot be used: {mistake}")


def _ready_slices(index: dict[str, Any]) -> str:
    ready = sum(slice_["state"] == "ready" for slice_ in index["slices"])
    return f"{ready} of {len(index['slices'])}"


def trouble_of(index: dict[str, Any]) -> str:
    """The slices, or the copies of them, that are not ready, or stay behind."""
    troubles: list[str] = []
    for slice_ in index["slices"]:
        copies = slice_.get("replicas", [])
        for copy in copies or [slice_]:
            state, failure = copy["state"], copy.get("failure", "")
            if state != "ready" or failure:
                place = f" at {copy['node']}" if copies else ""
                # Of the others the status of the index tells why.
                reason = f": {failure}" if failure and state in ("ready", "building") else ""
                troubles.append(f"slice {slice_['slice']} {state}{place}{reason}")
    return "; ".join(troubles)


@index.command(cls=SecurityCommand)
@_indexer_option
@json_option
def nodes(url: str, as_json: bool) -> None:
    """List the nodes of the indexer.

    The column answers says whether all of a node's slices answer the node that is asked. behind
    counts the changes that are yet to be indexed, over all indexes and all copies of slices that
    the node keeps.
    """
    with _indexer(url) as client:
        rows, indexes = client.nodes(), client.indexes()
    behind: Counter[str] = Counter()
    for row in indexes:
        for slice_ in row["slices"]:
            for copy in slice_.get("replicas", []):
                behind[copy["node"]] += copy.get("behind", 0)
    print_table(
        ("url", "answers", "slices", "behind"),
        [
            (
                row["url"],
                "yes" if row["answers"] else "no",
                ",".join(map(str, row["slices"])),
                behind[row["url"]],
            )
            for row in rows
        ],
        as_json=as_json,
    )


@index.command(cls=SecurityCommand)
@click.argument("name", metavar="[DESIGN/INDEX]", required=False)
@_indexer_option
def status(name: str | None, url: str) -> None:
    """Print the status of an index, or of the indexer, as a JSON object."""
    with _indexer(url) as client:
        details = client.status() if name is None else client.index_status(name)
    print_json(details, indent=2)


def _key_parts(text: str) -> list[Any]:
    try:
        value = msgspec.json.decode(text.encode(errors="surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if text.startswith(_JSON_STARTS) or isinstance(error, msgspec.ValidationError):
            # As a word, it would mostly select nothing, and nobody would be told why.
            raise click.BadParameter(
                f"{text!r} is not JSON: {error}; write a JSON value, or a list of them"
            ) from error
        value = text  # a word without quotes, as people write it in a shell
    if _has_object(value):
        verb = "is" if isinstance(value, dict) else "has"
        raise click.BadParameter(
            f"{text!r} {verb} an object, and a key cannot; write strings, numbers, true, false, "
            "null and lists of these"
        )
    return value if isinstance(value, list) else [value]


def _has_object(value: object) -> bool:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            return True
        if isinstance(value, list):
            values += value
    return False


def _parse_change(text: str) -> WriteResult:
    change = _CHANGE.fullmatch(text)
    if change is None or int(change[1]) >= PARTITIONS_END:
        raise click.BadParameter(
            f"{text!r} is not a change; write PARTITION:HISTORY:NUMBER, PARTITION below "
            f"{PARTITIONS_END}, HISTORY in hexadecimal"
        )
    return WriteResult(
        PartitionId(int(change[1])),
        HistoryId(int(change[2], 16)),
        SeqNo(int(change[3])),
        Cas(0),
    )


@index.command(cls=SecurityCommand)
@click.argument("name", metavar="DESIGN/INDEX")
@click.option(
    "--prefix",
    "prefixes",
    multiple=True,
    type=_key_parts,
    metavar="KEY",
    help="Only keys that begin with this. Repeat it for several.",
)
@click.option("--from", "low", type=_key_parts, metavar="KEY", help="The lowest key.")
@click.option("--to", "high", type=_key_parts, metavar="KEY", help="The highest key.")
@click.option("--from-exclusive", is_flag=True, help="Exclude keys that begin with --from.")
@click.option("--to-exclusive", is_flag=True, help="Exclude keys that begin with --to.")
@click.option(
    "--range",
    "ranges",
    nargs=2,
    multiple=True,
    type=_key_parts,
    metavar="LOWEST HIGHEST",
    help="Only keys between these two. Repeat it for several.",
)
@click.option("--descending", is_flag=True, help="Print the highest key first.")
@click.option(
    "--distinct",
    type=number_type(1, 16),
    metavar="PARTS",
    help="Look only at so many first parts of the keys, and at each different beginning once.",
)
@click.option(
    "--limit",
    type=number_type(1, 10**12),
    metavar="NUMBER",
    help="Print at most this many entries.  [default: all]",
)
@click.option("--count", is_flag=True, help="Print only the number of entries.")
@click.option("--min", "min_key", is_flag=True, help="Print only the lowest key.")
@click.option("--max", "max_key", is_flag=True, help="Print only the highest key.")
@click.option(
    "--consistency",
    type=click.Choice(["any", "at_least", "now"]),
    default="now",
    show_default=True,
    help="How fresh the index must be: any; at least the changes of --written; or everything that "
    "the server has now.",
)
@click.option(
    "--written",
    multiple=True,
    type=_parse_change,
    metavar="PARTITION:HISTORY:NUMBER",
    help="A change that must be in the index: partition and number as `upr set` prints them, and "
    "the partition's history as `upr partitions --all` prints it. Repeat it for several.",
)
@click.option(
    "--timeout",
    type=number_type(0, 300),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the index to be that fresh.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Print how the scan was carried out, and no entries: what was read, and what it waited "
    "for. Without --limit, of the first 10,000 entries.",
)
@_indexer_option
def scan(
    name: str,
    prefixes: tuple[list[Any], ...],
    low: list[Any] | None,
    high: list[Any] | None,
    from_exclusive: bool,
    to_exclusive: bool,
    ranges: tuple[tuple[list[Any], list[Any]], ...],
    descending: bool,
    distinct: int | None,
    limit: int | None,
    count: bool,
    min_key: bool,
    max_key: bool,
    consistency: Literal["any", "at_least", "now"],
    written: tuple[WriteResult, ...],
    timeout: int,
    explain: bool,
    url: str,
) -> None:
    r"""Print the entries of an index, one JSON object per line.

    A KEY is a JSON value, or a list of the key's first parts. A word without quotes is a string;
    1 is a number, and '"1"' a string: `upr load` stores all values of a CSV file as strings.
    --count, --min and --max print what they say in place of the entries; several of them print one
    JSON object. Several of --prefix, --range, and --from with --to select what any of them selects.

    \b
    Examples:
      upr index scan flights/by_origin --prefix JFK
      upr index scan flights/by_hour --from '["JFK", "2013-07"]' --to '["JFK", "2013-08"]'
      upr index scan flights/by_origin --descending --limit 10
      upr index scan flights/by_hour --range '["JFK", "2013-07"]' '["JFK", "2013-08"]' --prefix EWR
      upr index scan flights/by_hour --distinct 1 --count
      upr index scan flights/by_hour --prefix JFK --min --max
      upr index scan flights/by_hour --prefix JFK --explain
    """
    is_summary = count or min_key or max_key
    if is_summary and limit is not None:
        raise click.UsageError("--count, --min and --max look at all entries; leave out --limit")
    ranges_to_scan = [
        *(IndexRange(prefix=prefix) for prefix in prefixes),
        *(IndexRange(low=lowest, high=highest) for lowest, highest in ranges),
        *_between(low, high, from_exclusive=from_exclusive, to_exclusive=to_exclusive),
    ]
    query: dict[str, Any] = {
        "ranges": ranges_to_scan or [{}],
        "distinct": distinct or 0,
        "consistency": _consistency(consistency, written),
        "written": written,
        "timeout_s": timeout,
    }
    summary_options: dict[str, Any] = {"count": count, "min_key": min_key, "max_key": max_key}
    page_limit = min(limit or _ENTRIES_MAX, _ENTRIES_MAX)
    with _indexer(url) as client, _options_in_errors(len(prefixes), len(ranges)):
        if explain:
            explanation = client.explain(
                name,
                **summary_options,
                **query,
                descending=descending,
                limit=None if is_summary else page_limit,
            )
            print_json(explanation, indent=2)
            return
        if is_summary:
            summary = client.summarize(name, **summary_options, **query)
            print_json(summary.count if count and not (min_key or max_key) else summary)
            return
        entries = client.scan_all(name, **query, descending=descending, limit=page_limit)
        with closing(entries):
            for entry in islice(entries, limit):
                print_json(entry)


@contextmanager
def _options_in_errors(prefixes: int, ranges: int) -> Iterator[None]:
    """Names the option in an error about one of the ranges, which are so many of --prefix, so many
    of --range, and one of --from and --to."""
    try:
        yield
    except IndexerError as error:
        field = _RANGE_FIELD.match(str(error))
        if field is None:
            raise
        option = {"prefix": "--prefix", "low": "--from", "high": "--to"}[field[2]]
        if prefixes <= int(field[1]) < prefixes + ranges:
            option = "--range"
        raise BadInputError(f"{option}: {str(error)[field.end() :]}") from error


def _consistency(
    consistency: Literal["any", "at_least", "now"], written: tuple[WriteResult, ...]
) -> Literal["any", "at_least", "now"]:
    """How fresh the index must be. With --written, the default means at least these changes."""
    if consistency == "at_least" and not written:
        raise click.UsageError("--consistency at_least needs --written, a change to wait for")
    return "at_least" if written and consistency == "now" else consistency


def _between(
    low: list[Any] | None, high: list[Any] | None, *, from_exclusive: bool, to_exclusive: bool
) -> list[IndexRange]:
    """The range between --from and --to; none if neither is given."""
    for end, is_exclusive, key in (("from", from_exclusive, low), ("to", to_exclusive, high)):
        if is_exclusive and key is None:
            raise click.UsageError(f"--{end}-exclusive is about --{end}; give that, too")
    if low is None and high is None:
        return []
    return [
        {
            "low": None if low is None else (low, not from_exclusive),
            "high": None if high is None else (high, not to_exclusive),
        }
    ]
