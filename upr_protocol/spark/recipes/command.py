"""What the commands have in common: a session, and how they end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, TypedDict

from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.base import PySparkRuntimeError
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.utils import is_remote

from upr_protocol.errors import UprError
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.recipes.failure import plain_errors
from upr_protocol.spark.source import UprDataSource
from upr_protocol.start import interrupt_handler

FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
CONNECTION: Final = 4
INTERRUPTED: Final = 128 + signal.SIGINT

JAVA_ENDS_S: Final = 10.0
"""Mostly it takes one."""

_TASK_LOGGER: Final = "org.apache.spark.executor.Executor"

_EXPRESSION_LOGGERS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""They have a page of JSON about a wrong expression, of which a command says a sentence."""

EXIT_CODES_HELP: Final = """\
exit codes:
  0    done
  1    it could not be done, or only in part
  2    the command line or an option is wrong
  3    the server refused
  4    no server there, or the connection was lost
  130  ended by Ctrl-C
"""

_CODES: Final = {
    "UPR_OPTION": USAGE,
    "UPR_UNREACHABLE": CONNECTION,
    "UPR_REFUSED": REFUSED,
    "UPR_SERVER": REFUSED,
    "UPR_NO_BUCKET": REFUSED,
    "UPR_LIMIT": REFUSED,
}


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that tells the exit codes, too.

    Args:
        description: What the script does.
    """
    arguments = argparse.ArgumentParser(
        description=description,
        epilog=EXIT_CODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_pair,
        help="one more option of the data source (docs/spark.md); may be given often",
    )
    return arguments


def add_query_arguments(arguments: argparse.ArgumentParser, once_help: str) -> None:
    """Adds what a query takes: its checkpoint, and when its batches begin."""
    arguments.add_argument(
        "--checkpoint", required=True, help="where the query keeps how far it is"
    )
    trigger = arguments.add_mutually_exclusive_group()
    trigger.add_argument("--interval", help='how often a batch begins, as "10 seconds"')
    trigger.add_argument("--once", action="store_true", help=once_help)


def add_write_option(arguments: argparse.ArgumentParser) -> None:
    """Adds the options of the bucket that a query writes to."""
    arguments.add_argument(
        "--write-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_pair,
        help="one more option of the write, as user or durability; may be given often",
    )


class QuerySettings(TypedDict):
    """What the recipes that start a query take alike.

    Attributes:
        available_now: Whether the query ends when it has all that there is now.
        interval: How often a batch begins; None for as soon as one is done.
        options: More options of the data source.
    """

    available_now: bool
    interval: str | None
    options: dict[str, str]


def query_settings(arguments: argparse.Namespace) -> QuerySettings:
    """What `parser` and `add_query_arguments` have read."""
    return {
        "available_now": arguments.once,
        "interval": arguments.interval,
        "options": dict(arguments.option),
    }


def run_query(query: StreamingQuery) -> int:
    """Waits for a query's end, and stops it however that comes. Returns the exit code."""
    say(f"the query runs: {query.id}")
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not like NAME=VALUE")
    return name, value


def spark_session(name: str) -> SparkSession:
    """The session that `spark-submit` describes, or the Spark Connect server that `SPARK_REMOTE`
    names; without them, one that uses all cores. What Ctrl-C does stays as it is.

    Args:
        name: What Spark calls the application.
    """
    # Workers are to be of the same Python, with the same packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    on_interrupt = signal.getsignal(signal.SIGINT)
    spark = SparkSession.builder.appName(name).getOrCreate()
    # Spark's own handler calls the JVM, also in the middle of another call to it.
    signal.signal(signal.SIGINT, on_interrupt)
    if not is_remote():
        # The log of a Spark Connect server is its operator's.
        spark.sparkContext.setLogLevel("ERROR")
        # It has a page of Java about each task that fails, of which a command says a sentence.
        jvm = spark._jvm  # noqa: SLF001  nothing else sets the level of one logger
        assert jvm is not None, "this is no Spark Connect"
        log4j = jvm.org.apache.logging.log4j
        log4j.core.config.Configurator.setLevel(_TASK_LOGGER, log4j.Level.OFF)
    for logger in _EXPRESSION_LOGGERS:
        PySparkLogger.getLogger(logger).setLevel(logging.CRITICAL)
    spark.dataSource.register(UprDataSource)
    return spark


def say(sentence: str) -> None:
    """Tells a sentence on standard error, at once."""
    if sys.stderr.isatty():
        # Spark's bar of progress may stand there.
        sys.stderr.write("\r\x1b[K")
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def print_result(result: object) -> None:
    """Prints what came of it on standard output."""
    sys.stdout.write(f"{result}\n")


def _exit_on_interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Ends the process. The bridge to the JVM cannot be interrupted inside a call and used again,
    and there is nothing to tidy up: what is not finished does not count, and leases lapse.

    The JVM ends with its Python, but has been seen not to: it is waited for, and not for long.
    `spark-submit` is one itself, and nobody's to end."""
    del signal_number, frame
    java = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001  nothing else knows it
    if java is not None:
        # What other threads have to say of a JVM that is gone is no news.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        java.terminate()
        try:
            java.wait(JAVA_ENDS_S)
        except subprocess.TimeoutExpired:
            java.kill()
    os._exit(INTERRUPTED)


def _first_sentence(error: PySparkException) -> str:
    """The first line of an error of Spark's that says something: some begin with an empty one."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def run(
    arguments: argparse.ArgumentParser,
    work: Callable[[SparkSession, argparse.Namespace], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Does a script's work; what can be expected to go wrong becomes a sentence and an exit code.

    Args:
        arguments: What the command line may say.
        work: What is to be done; gives the exit code.
        argv: The command line, where it is not the process's own.

    Returns:
        The exit code. A fault of ours keeps its traceback instead.
    """
    options = arguments.parse_args(argv)
    # One that is there already is another's.
    is_ours = SparkSession.getActiveSession() is None
    spark, on_interrupt = None, interrupt_handler()
    if is_ours:
        # Also while Spark starts, which takes seconds: no query runs yet.
        signal.signal(signal.SIGINT, _exit_on_interrupt)
    try:
        spark = spark_session(f"upr {arguments.prog.removesuffix('.py')}")
        if is_ours and is_remote():
            # Over Spark Connect a query runs on until somebody stops it, as `work` does at its end.
            signal.signal(signal.SIGINT, on_interrupt)
        with plain_errors():
            return work(spark, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UprError as error:
        say(f"{arguments.prog}: {error}")
        return _CODES.get(error.code, FAILED) if isinstance(error, PipelineError) else FAILED
    except PySparkException as error:
        if isinstance(error, PySparkRuntimeError) and spark is None:
            say(f"{arguments.prog}: Spark does not start; is Java 17 or newer there? {error}")
            return FAILED
        say(f"{arguments.prog}: {_first_sentence(error)}")
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"{arguments.prog}: {where}{error.strerror or error}")
        return FAILED
    except Exception as error:
        # Of the bridge to the JVM, for instance about a setting that Java refuses.
        java_error = getattr(error, "java_exception", None)
        if spark is not None or java_error is None:
            raise
        say(f"{arguments.prog}: Spark does not start: {str(java_error).splitlines()[0]}")
        return FAILED
    finally:
        if spark is not None and is_ours:
            spark.stop()
