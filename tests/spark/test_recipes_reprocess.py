"""One bucket made of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tests.spark.bucket import FAR, Stored, change, contents, made_anew
from upr_protocol.chunk import Mutation
from upr_protocol.ids import Operation
from upr_protocol.spark.commands import reprocess as script
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.recipes import command, reprocess

NewBucket = Callable[..., str]

SCHEMA = "key STRING, value STRUCT<seats: INT, model: STRING>"
VALUE = "named_struct('model', upper(value.model), 'seats', value.seats)"


def planes(seats_of: dict[int, int]) -> list[Mutation]:
    """Planes with so many seats, by number."""
    return [
        Mutation(
            Operation.SET,
            b"k%d" % number,
            json.dumps({"seats": seats, "model": f"m{number}"}).encode(),
            flags=number,
            expiry=FAR,
        )
        for number, seats in seats_of.items()
    ]


def test_the_target_has_what_is_computed_of_each_item(
    spark: SparkSession, new_bucket: NewBucket, tmp_path: Path
) -> None:
    url, target = new_bucket(), new_bucket(4)
    seats_of: dict[int, int] = {}
    for round_number in range(3):
        # In the second round items leave the target and enter it; in the third some are deleted.
        new_seats = {number: 10 * ((number + 3 * round_number) % 10) for number in range(40)}
        change(url, planes(new_seats))
        seats_of |= new_seats
        if round_number == 2:
            change(url, [Mutation(Operation.DELETE, b"k%d" % number) for number in range(10)])
            seats_of = {number: seats for number, seats in seats_of.items() if number >= 10}
        query = reprocess(
            spark,
            url,
            target,
            str(tmp_path / "checkpoint"),
            key="concat('plane ', key)",
            value=VALUE,
            where="value.seats > 40",
            schema=SCHEMA,
            available_now=True,
            # Several tasks read what one partition has.
            options={"maxPartitionBytes": "300"},
        )
        query.awaitTermination()
        assert contents(target) == {
            b"plane k%d" % number: Stored(
                b'{"model":"M%d","seats":%d}' % (number, seats), number, FAR
            )
            for number, seats in seats_of.items()
            if seats > 40
        }


def test_a_source_that_lost_changes_fails_the_query(
    spark: SparkSession,
    new_bucket: NewBucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, target = new_bucket(), new_bucket()
    change(url, planes({1: 10}))
    words = [url, target, "--checkpoint", str(tmp_path / "checkpoint"), "--once"]
    assert command.run(script.argument_parser(), script.work, words) == 0
    assert set(contents(target)) == {b"k1"}
    made_anew(url)
    assert command.run(script.argument_parser(), script.work, words) != 0
    assert "UPR_ROLLBACK" in capsys.readouterr().err
    assert set(contents(target)) == {b"k1"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"interval": "1 second", "available_now": True}, "exclude each other"),
        ({"options": {"onRollback": "marker"}}, "the target cannot undo"),
        ({"value": "valeu"}, "valeu"),
        ({"key": "concat(key, value)"}, "value"),
    ],
)
def test_wrong_arguments_are_told_before_the_query_begins(
    spark: SparkSession,
    new_bucket: NewBucket,
    tmp_path: Path,
    arguments: dict[str, object],
    sentence: str,
) -> None:
    with pytest.raises(Exception, match=sentence) as caught:
        reprocess(spark, new_bucket(), new_bucket(), str(tmp_path), **arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, OptionError | AnalysisException)
