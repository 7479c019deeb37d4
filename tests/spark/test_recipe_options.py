"""Options that recipes refuse, before they need a session of Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.recipes import (
    backup,
    bulk_load,
    join,
    keep_latest_state,
    reprocess,
    restore,
    snapshot,
)

NO_SESSION: Final[Any] = None
NO_FRAME: Final[Any] = None
URL: Final = "upr://127.0.0.1:1/bucket"


@pytest.mark.parametrize("name", ["writeId", "writeid"])
def test_a_recipe_that_writes_more_than_once_takes_no_name_of_a_write(
    name: str, tmp_path: Path
) -> None:
    """The server would refuse the second write, as the first one with other rows."""
    options, checkpoint = {name: "mine"}, str(tmp_path)
    for start in (
        lambda: restore(NO_SESSION, tmp_path, URL, options=options),
        lambda: reprocess(NO_SESSION, URL, URL, checkpoint, write_options=options),
        lambda: join(NO_SESSION, URL, URL, URL, checkpoint, write_options=options),
    ):
        with pytest.raises(OptionError, match="the option writeId is not for this recipe"):
            start()


@pytest.mark.parametrize("name", ["key", "keyPrefix", "partitions"])
def test_a_join_is_of_all_keys(name: str, tmp_path: Path) -> None:
    """Its streams would not tell of a partner with another key that changes."""
    with pytest.raises(OptionError, match=f"the option {name} is not for a join"):
        join(NO_SESSION, URL, URL, URL, str(tmp_path), options={name: "1"})


@pytest.mark.parametrize("name", ["keyColumn", "valueColumn", "deadLetterPath"])
def test_a_load_takes_no_option_that_it_sets(name: str) -> None:
    """It wrote other columns than named, or counted refused rows as written."""
    with pytest.raises(OptionError, match=f"the option {name} is not for you to give"):
        bulk_load(NO_FRAME, URL, options={name: "id"})


@pytest.mark.parametrize("name", ["keyColumn", "operationColumn", "url", "operation", "casColumn"])
def test_a_recipe_takes_no_option_that_names_its_columns(name: str, tmp_path: Path) -> None:
    """It wrote other columns than its own, or ignored the option."""
    options, checkpoint = {name: "id"}, str(tmp_path)
    for start in (
        lambda: restore(NO_SESSION, tmp_path, URL, options=options),
        lambda: reprocess(NO_SESSION, URL, URL, checkpoint, write_options=options),
        lambda: join(NO_SESSION, URL, URL, URL, checkpoint, write_options=options),
    ):
        with pytest.raises(OptionError, match=f"the option {name} is not for you to give"):
            start()


@pytest.mark.parametrize("name", ["startingTimestamp", "endingTimestamp", "buckets", "index"])
def test_a_copy_is_of_what_one_bucket_has_now(name: str, tmp_path: Path) -> None:
    """The refusal named options that nobody had given, as `startingOffsets`."""
    for copy in (snapshot, backup):
        with pytest.raises(OptionError, match=f"the option {name} is not for this recipe"):
            copy(NO_SESSION, URL, tmp_path / "copy", options={name: "5"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"endingOffsets": "latest"}, "the option endingOffsets is for a read"),
        ({"startingOffset": "latest"}, "perhaps startingOffsets was meant"),
        ({"valueSchema": "seats INT"}, "the option valueSchema is not for this recipe"),
    ],
)
def test_a_wrong_option_of_a_stream_is_told_before_the_query_begins(
    options: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    """The query began, and failed with pages of Java; with a `valueSchema`, in its first batch."""
    table, checkpoint = str(tmp_path / "table"), str(tmp_path)
    with pytest.raises(OptionError, match=sentence):
        keep_latest_state(NO_SESSION, URL, table, checkpoint, options=options)
    with pytest.raises(OptionError, match=sentence):
        reprocess(NO_SESSION, URL, URL, checkpoint, options=options)
    with pytest.raises(OptionError, match=sentence):
        join(NO_SESSION, URL, URL, URL, checkpoint, options=options)


@pytest.mark.parametrize("name", ["metadata", "includeValue"])
def test_a_table_needs_all_its_columns(name: str, tmp_path: Path) -> None:
    """The query began, and failed in its first batch."""
    with pytest.raises(OptionError, match=f"Leave out {name}=false"):
        keep_latest_state(NO_SESSION, URL, "/a", str(tmp_path), options={name: "false"})
