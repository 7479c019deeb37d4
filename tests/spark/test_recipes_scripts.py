"""The scripts: what they do, and how they end. One by Python alone, and all of them inside the
tests' own session. `test_cluster.py` submits them to Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.kit.process import ROOT
from tests.spark.bucket import change, contents, contents_of_rows, drop, put
from tests.spark.class_archive import JAVA_OPTIONS
from upr_protocol.spark import commands
from upr_protocol.spark.__main__ import main
from upr_protocol.spark.commands import (
    backup,
    bulk_load,
    join,
    latest_state,
    reprocess,
    restore,
    snapshot,
)
from upr_protocol.spark.recipes import command

NewBucket = Callable[..., str]
SCRIPTS = Path(commands.__path__[0])
PATIENCE_S = 110.0


def environment() -> Mapping[str, str]:
    here = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": JAVA_OPTIONS,
    }
    return {**os.environ, **here}


def ran(script: ModuleType, *arguments: object) -> int:
    """A script's exit code, in the session that there is."""
    return command.run(script.argument_parser(), script.work, [str(word) for word in arguments])


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *words],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("class_archive")
def test_ctrl_c_ends_it(new_bucket: NewBucket, tmp_path: Path) -> None:
    url = new_bucket()
    change(url, put(range(10)))
    table = str(tmp_path / "table")
    script = str(SCRIPTS / "latest_state.py")
    with started(script, url, table, "--checkpoint", str(tmp_path / "checkpoint")) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("batch 0: 10 keys changed"):
                break
        else:
            pytest.fail("it ended: " + "".join(lines))
        os.killpg(process.pid, signal.SIGINT)
        error_text = process.stderr.read()
        assert process.wait(PATIENCE_S) == command.INTERRUPTED, "".join(lines) + error_text
        assert "Traceback" not in error_text, error_text
    assert contents_of_rows(DeltaTable(table).to_pyarrow_table().to_pylist()) == contents(url)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("class_archive")
def test_ctrl_c_ends_it_while_spark_starts(tmp_path: Path) -> None:
    """Spark's own handler would call the JVM, in the middle of another call to it."""
    script = str(SCRIPTS / "snapshot.py")
    with started(script, "upr://127.0.0.1:1/none", str(tmp_path / "snapshot")) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "To adjust logging level" in line:
                break
        else:
            pytest.fail("it ended: " + "".join(lines))
        os.killpg(process.pid, signal.SIGINT)
        error_text = process.stderr.read()
        assert process.wait(PATIENCE_S) == command.INTERRUPTED, "".join(lines) + error_text
        assert "Traceback" not in error_text, error_text


def test_ctrl_c_over_spark_connect_stops_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process just ended, the query would run on at Spark's server."""
    stopped: list[str] = []
    query: Any = SimpleNamespace(
        id="a query",
        awaitTermination=lambda: signal.raise_signal(signal.SIGINT),
        stop=lambda: stopped.append("query"),
    )
    session = SimpleNamespace(stop=lambda: stopped.append("session"))
    monkeypatch.setattr(command, "SparkSession", SimpleNamespace(getActiveSession=lambda: None))
    monkeypatch.setattr(command, "spark_session", lambda _: session)
    monkeypatch.setattr(command, "is_remote", lambda: True)
    monkeypatch.setattr(command, "_exit_on_interrupt", lambda *_: pytest.fail("it just ended"))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = command.run(ArgumentParser(), lambda *_: command.run_query(query), [])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert code == command.INTERRUPTED
    assert stopped == ["query", "session"]


@pytest.mark.parametrize("script", [latest_state, snapshot, backup, restore, bulk_load])
def test_help_needs_no_java(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run(
            script.argument_parser(), lambda *_: pytest.fail("it did something"), ["--help"]
        )
    assert caught.value.code == 0
    assert "130  ended by Ctrl-C" in capsys.readouterr().out


def test_a_recipe_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "bulk_load     Loads files into a bucket." in text
    assert main(["--file", "snapshot"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text().startswith('"""Writes what a bucket')
    with pytest.raises(SystemExit):
        main(["snapshot", "--help"])
    assert "usage: python -m upr_protocol.spark snapshot" in capsys.readouterr().out
    assert main(["snapshots"]) == command.USAGE
    assert "There are backup, bulk_load" in capsys.readouterr().err


def test_without_java_it_says_so() -> None:
    assert script_without_java("--help").returncode == 0
    process = script_without_java("upr://127.0.0.1:1/b", "/nowhere/at/all")
    assert process.returncode == command.FAILED
    assert "is Java 17 or newer there?" in process.stderr
    assert "Traceback" not in process.stderr


def script_without_java(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables_without_java = {
        name: value for name, value in environment().items() if name != "JAVA_HOME"
    }
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "snapshot.py"), *arguments],
        env={**variables_without_java, "PATH": "/usr/bin/nothing"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_spark_that_does_not_start_is_told_in_a_sentence(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a setting that Java refuses: the memory of executors, or a master."""

    def start(_: str) -> SparkSession:
        assert spark._jvm is not None
        return cast("SparkSession", spark._jvm.java.io.FileInputStream("/nowhere"))

    monkeypatch.setattr(command, "spark_session", start)
    parser = ArgumentParser("snapshot")
    assert command.run(parser, lambda *_: pytest.fail("it did something"), []) == command.FAILED
    error_text = capsys.readouterr().err
    assert error_text.startswith("snapshot: Spark does not start: java.io.FileNotFoundException:")
    assert error_text.count("\n") == 1


def test_back_and_forth(
    spark: SparkSession,
    new_bucket: NewBucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, target = new_bucket(), new_bucket()
    folder, table = tmp_path / "backup", tmp_path / "table"
    change(url, put(range(20)))
    assert ran(backup, url, folder) == 0
    change(url, drop(range(5)))
    assert ran(backup, url, folder, "--option", "leaseSeconds=60") == 0
    assert ran(restore, folder, target, "--through", 1) == 0
    assert contents(target) == contents(url)
    assert ran(restore, folder, target) == command.FAILED
    assert "25 rows of 2 increments" in capsys.readouterr().out
    words = (url, table, "--checkpoint", tmp_path / "checkpoint", "--once")
    assert ran(latest_state, *words) == 0
    table_rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert contents_of_rows(table_rows) == contents(url)
    rows = tmp_path / "rows.json"
    rows.write_text('{"key": "a", "value": "1"}\n')
    assert ran(bulk_load, target, rows, "--format", "json") == 0
    assert len(contents(target)) == 16


def test_errors_are_a_sentence_and_a_code(
    spark: SparkSession,
    new_bucket: NewBucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = new_bucket()
    folder = tmp_path / "folder"
    missing_url = url + "-missing"
    away = "upr://127.0.0.1:1/bucket"
    few = ("--option", "timeoutSeconds=1")
    query = ("--checkpoint", tmp_path / "checkpoint", "--once")
    for code, words in (
        (command.USAGE, (snapshot, "http://host/bucket", folder)),
        (command.REFUSED, (snapshot, missing_url, folder)),
        (command.CONNECTION, (snapshot, away, folder, *few)),
        (command.FAILED, (bulk_load, url, tmp_path / "nowhere")),
        (command.REFUSED, (latest_state, missing_url, tmp_path / "table", *query)),
        (command.REFUSED, (reprocess, url, missing_url, *query)),
        (command.REFUSED, (join, url, url, missing_url, *query)),
        (command.FAILED, (reprocess, url, url, *query, "--where", "value.seats > 1")),
        # Spark's sentence about these begins on its second line.
        (command.FAILED, (reprocess, url, url, *query, "--where", "value.seats >")),
        (command.FAILED, (reprocess, url, url, *query, "--schema", "key STRIN, value STRING")),
        (command.FAILED, (snapshot, url, folder, "--option", "valueSchema=a INTT")),
        (command.FAILED, (reprocess, url, url, *query[:2], "--interval", "ten seconds")),
        (command.USAGE, (reprocess, url, url, *query, "--write-option", "user=bob")),
        (command.USAGE, (join, url, url, url, *query, "--write-option", "user=bob")),
    ):
        script, *arguments = words
        assert isinstance(script, ModuleType)
        assert ran(script, *arguments) == code
        error_text = capsys.readouterr().err
        assert error_text.count("\n") == 1, error_text
        assert ("UPR_NO_BUCKET" in error_text) == (code == command.REFUSED)
        assert "Traceback" not in error_text
        _, _, sentence = error_text.partition(": ")
        assert sentence.strip(), words
    with pytest.raises(SystemExit, match="2"):
        ran(snapshot, url, folder, "--option", "nothing")
