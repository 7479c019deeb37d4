"""docs/spark.md: every option, column, code and recipe is in it, and its links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from tests.kit.process import ROOT
from upr_protocol.spark import read_options, recipes, write_options
from upr_protocol.spark.options import SourceOptions
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.schema import INDEX_COLUMNS, READ_COLUMNS, UNPARSED
from upr_protocol.spark.write_options import WriteOptions

DOCUMENT: Final = ROOT / "docs" / "spark.md"
TEXT: Final = DOCUMENT.read_text()
PACKAGE: Final = ROOT / "upr_protocol" / "spark"
COMMANDS: Final = PACKAGE / "commands"
URL: Final = {"url": "upr://host/bucket"}
ROWS: Final = StructType([StructField(name, StringType()) for name in ("op", "key", "value")])

READ, STREAM, WRITE = "Options of a read", "More options of a stream", "Options of a write"


def section(heading: str) -> str:
    """What stands below a heading, up to the next."""
    (text,) = re.findall(rf"^## {heading}\n((?s:.*?))(?=^## |\Z)", TEXT, re.MULTILINE)
    return str(text)


def table(heading: str) -> dict[str, str]:
    """The tables below a heading: the rest of each row, by each name in its first column."""
    rows = re.findall(r"^\| (`.*?) \| (.*)$", section(heading), re.MULTILINE)
    return {name: cells for names, cells in rows for name in re.findall(r"`(\w+)`", names)}


class Watched(SourceOptions):
    """Remembers what it was asked for."""

    asked: Final[set[str]] = set()

    def refuse_unknown(self) -> None:
        super().refuse_unknown()
        self.asked.update(self._known_names.values())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], set[str]]:
    """Gives the options that a parser asks for."""
    monkeypatch.setattr(read_options, "SourceOptions", Watched)
    monkeypatch.setattr(write_options, "SourceOptions", Watched)

    def watch(parse: Callable[[], object]) -> set[str]:
        Watched.asked.clear()
        parse()
        return set(Watched.asked)

    return watch


def test_every_option_is_in_its_table(asked: Callable[[Callable[[], object]], set[str]]) -> None:
    a_read = asked(lambda: ReadOptions.parse(URL))
    a_stream = asked(lambda: ReadOptions.parse(URL, streaming=True))
    assert a_read == set(table(READ))
    assert a_stream - a_read == set(table(STREAM))
    assert a_read - a_stream == {
        *("deduplicate", "endingOffsets", "endingTimestamp"),
        *("index", "indexer", "indexPrefix", "indexFrom", "indexTo"),
    }
    a_write = asked(
        lambda: WriteOptions.parse({**URL, "operation": "apply"}, ROWS, overwrite=False)
    )
    assert a_write == set(table(WRITE))


def test_the_defaults_are_as_documented() -> None:
    defaults: dict[str, str] = {}
    for heading in (READ, STREAM):
        for name, cells in table(heading).items():
            default = cells.partition(" | ")[0].strip("`")
            if default not in ("required", "none", "all"):
                defaults[name] = default
    options = ReadOptions.parse({**URL, **defaults}, streaming=None)
    assert options == ReadOptions.parse(URL, streaming=None)
    assert len(defaults) == 13

    defaults = {}
    for name, cells in table(WRITE).items():
        default = cells.partition(" | ")[0].strip("`")
        if default not in ("required", "none") and name != "operationColumn":
            defaults[name] = default
    write = WriteOptions.parse({**URL, **defaults}, ROWS, overwrite=False)
    assert write == WriteOptions.parse(URL, ROWS, overwrite=False)
    assert len(defaults) == 8


def test_every_operation_column_and_code_is_in_it() -> None:
    for word in (*write_options.OPERATIONS, write_options.APPLY):
        assert f"`{word}`" in table(WRITE)["operation"]
    assert set(table("Columns")) == {*READ_COLUMNS, *INDEX_COLUMNS, UNPARSED}
    codes = {
        code
        for path in PACKAGE.rglob("*.py")
        for code in re.findall(r'"(UPR_[A-Z_]+)"', path.read_text())
    }
    assert len(codes) > 15
    assert set(table("Error codes")) == codes


def test_every_recipe_and_command_is_in_it() -> None:
    text = section("Recipes")
    for path in COMMANDS.glob("[a-z]*.py"):
        assert f"python -m upr_protocol.spark {path.stem} " in text
    for name in recipes.__all__:
        if name[0].islower():
            assert name in TEXT


def test_its_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    anchors = {heading.lower().replace(",", "").replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", TEXT)) <= anchors
    for path in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (DOCUMENT.parent / path).exists(), path
    assert "docs/spark.md" in (ROOT / "README.md").read_text()
