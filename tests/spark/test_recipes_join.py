"""Two buckets joined into a third."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.kit.effort import effort
from tests.spark.bucket import FAR, change, contents, made_anew
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient
from upr_protocol.ids import Operation
from upr_protocol.spark.commands import join as script
from upr_protocol.spark.recipes import command, join
from upr_protocol.spark.recipes.join import INNER, LEFT
from upr_protocol.spark.recipes.lookup_history import LookupHistory

NewBucket = Callable[..., str]
Documents = dict[str, dict[str, Any]]

FLIGHTS = "key STRING, value STRUCT<plane: STRING, dest: STRING>"
PLANES = "key STRING, value STRUCT<seats: INT>"
VALUE = "named_struct('dest', left_value.dest, 'plane', right_key, 'seats', right_value.seats)"


def store(url: str, documents: Documents) -> None:
    """Sets keys to JSON documents, with flags and an expiry time."""
    change(
        url,
        [
            Mutation(
                Operation.SET, key.encode(), json.dumps(document).encode(), flags=7, expiry=FAR
            )
            for key, document in documents.items()
        ],
    )


def delete(url: str, *keys: str) -> None:
    change(url, [Mutation(Operation.DELETE, key.encode()) for key in keys])


def leases(url: str) -> int:
    """How many leases the bucket has."""
    with BlockingClient(url) as client:
        held: int = client.stats(client.address.bucket)["leases"]["held"]
        return held


def joined(flights: Documents, planes: Documents, how: str) -> Documents:
    """What the target has to hold."""
    return {
        key: {
            "dest": flight["dest"],
            "plane": flight["plane"],
            "seats": planes.get(flight["plane"], {"seats": None})["seats"],
        }
        for key, flight in flights.items()
        if how == LEFT or flight["plane"] in planes
    }


@pytest.mark.parametrize("how", effort([INNER], [INNER, LEFT]))
def test_the_target_follows_both_buckets(
    spark: SparkSession,
    new_bucket: NewBucket,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items come, change, name another partner and go, on both sides, also ones without partner.
    The first lookup has to be done again."""
    finish, answers = LookupHistory.finish_lookup, iter([False])
    monkeypatch.setattr(
        LookupHistory, "finish_lookup", lambda history: next(answers, True) and finish(history)
    )
    left, right, target = new_bucket(4), new_bucket(2), new_bucket(1)
    flights: Documents = {}
    planes: Documents = {}

    def catch_up() -> None:
        query = join(
            spark,
            left,
            right,
            target,
            str(tmp_path / "checkpoint"),
            on="value.plane",
            value=VALUE,
            how=how,
            left_schema=FLIGHTS,
            right_schema=PLANES,
            available_now=True,
        )
        query.awaitTermination()
        target_items = contents(target)
        documents = {key.decode(): json.loads(item.value) for key, item in target_items.items()}
        assert documents == joined(flights, planes, how)
        assert {item[1:] for item in target_items.values()} == {(7, FAR)}
        # That of the stream's last batch, and none of the items that were read.
        assert leases(left) <= 1

    flights |= {f"f{n}": {"plane": f"p{n % 4}", "dest": f"d{n}"} for n in range(12)}
    # What no item can have as its key is the key of no partner.
    flights |= {f"f{12 + n}": {"plane": "p" * n, "dest": "d"} for n in (0, 251)}
    planes |= {f"p{n}": {"seats": 100 + n} for n in range(3)}
    store(left, flights)
    store(right, planes)
    catch_up()
    assert not list(answers), "the lookup was done again"
    # On the right one gets other seats, one goes, one comes; and one that a flight waits for. On
    # the left a flight takes another plane, and one goes.
    planes["p0"] = {"seats": 5}
    planes["p3"] = {"seats": 6}
    del planes["p1"]
    store(right, {"p0": planes["p0"], "p3": planes["p3"]})
    delete(right, "p1")
    flights["f0"] = {"plane": "p2", "dest": "there"}
    flights["f1"] = {"plane": "p9", "dest": "far"}
    del flights["f2"]
    planes["p9"] = {"seats": 9}
    store(left, {"f0": flights["f0"], "f1": flights["f1"]})
    delete(left, "f2")
    store(right, {"p9": planes["p9"]})
    catch_up()


def test_a_bucket_that_lost_changes_fails_the_query(
    spark: SparkSession,
    new_bucket: NewBucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left, right, target = new_bucket(2), new_bucket(2), new_bucket(2)
    store(left, {"a": {"x": 1}})
    store(right, {"1": {"y": 2}})
    words = [left, right, target, "--checkpoint", str(tmp_path / "checkpoint"), "--once"]
    words += ["--on", "length(key)"]
    assert command.run(script.argument_parser(), script.work, words) == 0
    assert json.loads(contents(target)[b"a"].value) == {"left": '{"x": 1}', "right": '{"y": 2}'}
    made_anew(right)
    assert command.run(script.argument_parser(), script.work, words) != 0
    assert "UPR_ROLLBACK" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"how": "outer"}, "how is 'outer', and not one of inner, left"),
        ({"interval": "1 second", "available_now": True}, "exclude each other"),
        ({"options": {"onRollback": "marker"}}, "the target cannot undo"),
        ({"on": "value.nothing"}, "value"),
        ({"value": "right_valeu"}, "right_valeu"),
        ({"left_schema": "key STRING"}, "has to have key and value"),
    ],
)
def test_wrong_arguments_of_a_join_are_told_before_the_query_begins(
    spark: SparkSession, tmp_path: Path, arguments: dict[str, Any], sentence: str
) -> None:
    left, right, target = (f"upr://127.0.0.1:1/{name}" for name in "abc")
    with pytest.raises(Exception, match=sentence):
        join(spark, left, right, target, str(tmp_path), **arguments)
