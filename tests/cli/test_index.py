"""`upr index`, with an indexer as a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.indexer.processes import indexer_process
from tests.kit.index_http import a_node
from upr_protocol.cli.index import split_expressions, trouble_of
from upr_protocol.client import BlockingClient, WriteResult


@pytest.fixture
def indexer(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with indexer_process(bucket, tmp_path / "indexes") as started:
        yield started.url


def lines(text: str) -> list[tuple[list[object], str]]:
    rows = [json.loads(line) for line in text.splitlines()]
    return [(row["key"], row["id"]) for row in rows]


def test_indexes_are_made_listed_scanned_and_dropped(
    bucket: str, indexer: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlockingClient(bucket) as client:
        for index in range(6):
            client.set(f"k{index}", json.dumps({"city": "ab"[index % 2], "n": index}))
        write_result: WriteResult = client.set("own", '{"city": "c", "n": 7}')
    indexes = ("--index", "city=city", "--index", "both=city,n", "--filter", "both=n != `0`")
    created = run("index", "create", "d", *indexes, "--indexer", indexer)
    assert created.stdout == "created d\n"
    monkeypatch.setenv("UPR_INDEXER_URL", indexer)
    while True:
        rows = [json.loads(line) for line in run("index", "list", "--json").stdout.splitlines()]
        if [(row["name"], row["state"]) for row in rows] == [
            ("d/both", "ready"),
            ("d/city", "ready"),
        ]:
            break
    assert lines(run("index", "scan", "d/city", "--prefix", "b").stdout) == [
        (["b"], "k1"),
        (["b"], "k3"),
        (["b"], "k5"),
    ]
    between = ("--from", '["a", 2]', "--to", '["b", 3]', "--from-exclusive")
    assert lines(run("index", "scan", "d/both", *between).stdout) == [
        (["a", 4], "k4"),
        (["b", 1], "k1"),
        (["b", 3], "k3"),
    ]
    down = run("index", "scan", "d/both", "--descending", "--limit", "2")
    assert lines(down.stdout) == [(["c", 7], "own"), (["b", 5], "k5")]
    assert run("index", "scan", "d/both", "--count").stdout == "6\n"
    assert run("index", "scan", "d/city", "--count").stdout == "7\n"
    several = ("--range", '["a", 3]', '["b", 1]', "--prefix", '["b", 5]', "--descending")
    assert [key for key, _ in lines(run("index", "scan", "d/both", *several).stdout)] == [
        ["b", 5],
        ["b", 1],
        ["a", 4],
    ]
    distinct = run("index", "scan", "d/both", "--distinct", "1", "--descending")
    assert distinct.stdout == '{"key":["c"]}\n{"key":["b"]}\n{"key":["a"]}\n'
    assert run("index", "scan", "d/both", "--distinct", "1", "--count").stdout == "3\n"
    summary = run("index", "scan", "d/both", "--prefix", "b", "--count", "--min", "--max")
    assert summary.stdout == '{"count":3,"min":["b",1],"max":["b",5]}\n'
    explained = json.loads(run("index", "scan", "d/both", "--prefix", "b", "--explain").stdout)
    end = {"key": ["b"], "inclusive": True}
    assert explained["ranges"] == [{"low": end, "high": end}]
    assert (explained["entries_given"], explained["entries_read"]) == (3, 4)
    assert explained["freshness"] == "barrier"
    counted = json.loads(run("index", "scan", "d/both", "--count", "--explain").stdout)
    assert (counted["index_entries"], counted["entries_read"]) == (6, 0)
    change = f"{write_result.partition}:{write_result.history_id:x}:{write_result.seq}"
    own = run("index", "scan", "d/city", "--prefix", "c", "--written", change)
    assert lines(own.stdout) == [(["c"], "own")]
    assert json.loads(run("index", "status", "d/both").stdout)["entries"] == 6
    assert json.loads(run("index", "status").stdout)["connected"] is True
    tags = ("--index", "t=tags", "--each", "t=tags", "--include", "t=n,city")
    with BlockingClient(bucket) as client:
        client.set("tagged", '{"city": "a", "n": 1, "tags": ["y", "x"]}')
    assert run("index", "create", "e", *tags).stdout == "created e\n"
    while json.loads(run("index", "status", "d/both").stdout)["state"] != "ready" or not any(
        '"e/t","state":"ready"' in row for row in run("index", "list", "--json").stdout.splitlines()
    ):
        pass
    assert run("index", "scan", "e/t").stdout == (
        '{"key":["x"],"id":"tagged","included":[1,"a"]}\n'
        '{"key":["y"],"id":"tagged","included":[1,"a"]}\n'
    )
    assert run("index", "drop", "e").stdout == "dropped e\n"
    assert run("index", "drop", "d").stdout == "dropped d\n"
    while run("index", "list", "--json").stdout:
        pass
    refusal = run("index", "scan", "d/both", code=3)
    assert refusal.stderr == "upr: there is no index d/both; `upr index list` names all\n"


def test_a_design_is_read_from_standard_input_or_a_file(run: Run, tmp_path: Path) -> None:
    design = b'{"indexes": {"i": {"key": ["a"]}}}'
    file = tmp_path / "design.json"
    file.write_bytes(design)
    for argument, text in (("-", design), (str(file), None)):
        with a_node((200, b"{}")) as node:
            created = run("index", "create", "d", argument, "--indexer", node.url, input=text)
        assert created.stdout == "created d\n"
        assert (node.paths, node.bodies) == (["/v1/designs/d"], [design])


@pytest.mark.parametrize(
    ("options", "ids", "page_count"),
    [((), "ab", 2), (("--limit", "2"), "ab", 2), (("--limit", "1"), "a", 1)],
)
def test_the_pages_of_a_scan_are_of_one_moment(
    run: Run, options: tuple[str, ...], ids: str, page_count: int
) -> None:
    """A page of a later moment may lack an entry, or have it once more under another key."""
    first_page = b'{"entries":[{"key":[1],"id":"a"}],"continuation":"c","moment":"m"}'
    last_page = b'{"entries":[{"key":[2],"id":"b"}],"moment":"m"}'
    pages = [(200, first_page), (200, last_page)][:page_count]
    with a_node(*pages, (200, b"{}")) as node:
        scanned = run("index", "scan", "d/i", *options, "--indexer", node.url)
    assert "".join(document_id for _, document_id in lines(scanned.stdout)) == ids
    assert node.paths == [*(["/v1/indexes/d/i/scan"] * page_count), "/v1/moments/m"]
    first_query, *later_queries = map(json.loads, node.bodies[:page_count])
    assert first_query["consistency"] == "now"
    assert first_query["hold_s"] > 0
    for query in later_queries:
        assert (query["moment"], query["continuation"]) == ("m", "c")
        assert "consistency" not in query


@pytest.mark.parametrize(
    ("options", "place", "sentence"),
    [
        (("--prefix", "a", "--prefix", "b"), "ranges[1].prefix", "--prefix: too many"),
        (("--prefix", "a", "--range", "1", "2"), "ranges[1].low.key", "--range: too many"),
        (("--range", "1", "2", "--from", "3"), "ranges[1].low.key", "--from: too many"),
        (("--from", "3", "--to", "4"), "ranges[0].high.key", "--to: too many"),
        (("--distinct", "2"), "distinct", "distinct: too many"),
    ],
)
def test_an_error_about_a_range_names_its_option(
    run: Run, options: tuple[str, ...], place: str, sentence: str
) -> None:
    failure = {"code": "bad_query", "message": f"{place}: too many", "place": place}
    with a_node((400, json.dumps({"error": failure}).encode())) as node:
        refusal = run("index", "scan", "d/i", *options, "--indexer", node.url, code=2)
    assert refusal.stderr == f"upr: {sentence}\n"


def test_a_bad_definition_is_refused_with_its_place(indexer: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "design.json"
    path.write_text('{"indexes": {"i": {"key": ["a", "b["]}}}')
    refusal = run("index", "create", "d", str(path), "--indexer", indexer, code=2)
    assert "upr: indexes.i.key[1]: column 3" in refusal.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("create", "d"), "give either a file or --index"),
        (("create", "d", "--index", "x"), "--index 'x' lacks a name; write NAME=EXPRESSION"),
        (("create", "d", "--index", "=x"), "--index '=x' lacks a name; write NAME=EXPRESSION"),
        (("create", "d", "--index", "x="), "--index 'x=' lacks an expression"),
        (("create", "d", "--index", "x=a", "--filter", "x="), "--filter 'x=' lacks an expression"),
        (("create", "d", "--index", "x=a", "--each", "x="), "--each 'x=' lacks an expression"),
        (("create", "d", "/dev/zero"), "/dev/zero has more than 1,048,576 bytes, the limit of a"),
        (("drop", "d/i"), "'d/i' names an index, and a design is dropped with all its indexes"),
        (("create", "d", "--index", "x=a", "--index", "x=b"), "the index 'x' is defined twice"),
        (("create", "d", "--index", "x=a", "--filter", "y=b"), "--filter y=… has no --index y="),
        (("create", "d", "file.json", "--filter", "y=b"), "leave out --filter"),
        (("scan", "d/i", "--prefix", "{}"), "Invalid value for '--prefix': '{}' is an object"),
        (("scan", "d/i", "--prefix", '["a", b]'), """'--prefix': '["a", b]' is not JSON: JSON"""),
        (("scan", "d/i", "--from", '"a'), "is not JSON: Input data was truncated"),
        (("scan", "d/i", "--from", "[" * 100_000), "is not JSON: maximum recursion depth"),
        (("scan", "d/i", "--to", "1e999"), "is not JSON: Number out of range"),
        (("scan", "d/i", "--from-exclusive", "--to", "5"), "--from-exclusive is about --from"),
        (("scan", "d/i", "--to-exclusive", "--range", "1", "5"), "--to-exclusive is about --to"),
        (("scan", "d/i", "--prefix", '[["a", {}]]'), """'[["a", {}]]' has an object, and a key"""),
        (("scan", "d/i", "--from", "[" * 500 + "]" * 500), "--from: such deep lists"),
        (("scan", "d/i", "--written", "1:2"), "write PARTITION:HISTORY:NUMBER"),
        (("scan", "d/i", "--written", "1:2:-3"), "write PARTITION:HISTORY:NUMBER"),
        (("scan", "d/i", "--written", "1024:2:3"), "PARTITION below 1024"),
        (("scan", "d/i", "--written", "1:2:" + "9" * 19), "write PARTITION:HISTORY:NUMBER"),
        (("scan", "d/i", "--count", "--limit", "5"), "leave out --limit"),
        (("scan", "d/i", "--min", "--limit", "5"), "leave out --limit"),
        (("scan", "d/i", "--distinct", "0"), "0 is not from 1 to 16"),
        (("scan", "d/i", "--consistency", "at_least"), "needs --written"),
        (("list", "--indexer", "upr://x"), "write http://HOST:PORT"),
        (("create", "d", "--index", "x=\udcff"), "not UTF-8"),
        (("scan", "d/i", "--prefix", "\udcff"), "not UTF-8"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in run("index", *arguments, code=2).stderr


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("a", ["a"]),
        ("a,b.c", ["a", "b.c"]),
        ("[a, b],c", ["[a, b]", "c"]),
        ("join(',', [a, b]),{x: a, y: b}.x", ["join(',', [a, b])", "{x: a, y: b}.x"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("a == 'it\\'s, so',b", ["a == 'it\\'s, so'", "b"]),
        ("contains(`[1, 2]`, a),b", ["contains(`[1, 2]`, a)", "b"]),
        ("a,", ["a", ""]),
    ],
)
def test_commas_within_an_expression_do_not_divide_it(text: str, expressions: list[str]) -> None:
    assert split_expressions(text) == expressions


@pytest.mark.parametrize(
    ("slices", "trouble"),
    [
        ([{"slice": 0, "state": "ready"}], ""),
        ([{"slice": 0, "state": "failed", "failure": "too costly"}], "slice 0 failed"),
        (
            [{"slice": 0, "state": "ready", "failure": "full"}, {"slice": 1, "state": "building"}],
            "slice 0 ready: full; slice 1 building",
        ),
        (
            [{"slice": 0, "state": "ready", "replicas": [{"node": "n:1", "state": "missing"}]}],
            "slice 0 missing at n:1",
        ),
    ],
)
def test_a_list_names_the_slices_that_are_in_trouble(
    slices: list[dict[str, object]], trouble: str
) -> None:
    assert trouble_of({"slices": slices}) == trouble


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://mün..chen:1"])
@pytest.mark.parametrize(
    "arguments", [("list",), ("drop", "\udcff"), ("scan", "d/i", "--from", "x" * 3000)]
)
def test_an_unreachable_indexer_is_a_lost_connection(
    run: Run, url: str, arguments: tuple[str, ...]
) -> None:
    refusal = run("index", *arguments, "--indexer", url, code=4)
    assert f"the indexer at {url} does not answer" in refusal.stderr
