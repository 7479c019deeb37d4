"""What S1, S2 and S3 share: Spark, and what it reads and writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.kit.errors import CannotMeasureError
from benchmarks.kit.figures import Figure, Spread
from benchmarks.kit.machine import check_disk
from benchmarks.kit.processes import UprServer, Worker
from benchmarks.kit.processor import adopt, children_of, tree_s
from benchmarks.kit.upkeep import rest
from benchmarks.kit.work import PARTITIONS

ROWS: Final = 2_000_000
"""256 MB of keys and values."""

NOTHING: Final = ""
"""The sink that drops what it gets."""

EMPTY: Final = f"empty:{ROWS}"
"""The Python data source that does nothing: the bound of any other, as source and as sink."""

WARM_UPS: Final = 5
"""Rounds before those that count, of both sides. Java compiles for about so long: reads of all
columns took 1.73 s, 1.43, 1.41, 1.32, 1.29, 1.23 and then 1.12 to 1.22."""

FEW_COLUMNS: Final = 2
ALL_COLUMNS: Final = 12


@attrs.frozen
class Moved:
    """Rows that Spark moved.

    Attributes:
        seconds: How long it took, with all that Spark does before and after.
        processor_s: Processor time, by process; `client` is all of Spark's together.
    """

    seconds: float
    processor_s: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Rows a second."""
        return ROWS / self.seconds


class Spark(Worker):
    """A Spark of two cores, in processes of its own.

    What is measured has one, and its peers have another. What our data source does to the processes
    that it runs in would otherwise count for them, too.
    """

    def __init__(self) -> None:
        if shutil.which("java") is None:
            raise CannotMeasureError(
                "java is missing: install it with `apt-get install openjdk-17-jre-headless`"
            )
        super().__init__("spark")
        self.answer()

    def make(self, folder: Path) -> str:
        """Writes the rows as Parquet, and says where."""
        self.ask(make=ROWS, sink=str(folder))
        return str(folder)

    def check(self, source: str) -> None:
        """Counts the rows.

        Raises:
            CannotMeasureError: They are not as many as there should be.
        """
        _check(self.ask(source=source, count=True)["rows"])

    def move(
        self,
        source: str,
        sink: str,
        server: UprServer | None = None,
        columns: int = ALL_COLUMNS,
    ) -> Moved:
        """Moves all rows; each place is a bucket's URL, a folder, `EMPTY` or `NOTHING`. Of a bucket
        or `EMPTY` it reads all columns, or `FEW_COLUMNS`: key and value."""
        return self._timed(server, source=source, sink=sink, columns=columns)

    def stream(self, source: str, server: UprServer | None = None) -> Moved:
        """Streams all rows to nothing, with a checkpoint of its own."""
        return self._timed(server, source=source, stream=True)

    def _timed(self, server: UprServer | None, **command: Any) -> Moved:
        if server is not None:
            server.lap()
        answer = self.ask(**command)
        if answer["rows"] is not None:
            _check(answer["rows"])
        servers = {} if server is None else server.lap()
        return Moved(answer["seconds"], {**servers, "client": answer["processor_s"]})

    def __exit__(self, *error: Any) -> None:
        # Nobody waits for Java.
        processor_s = sum(map(tree_s, children_of(self.pid)))
        super().__exit__(*error)
        adopt(processor_s)


def _check(rows: int) -> None:
    if rows != ROWS:
        raise CannotMeasureError(f"there are {rows:,} rows, not {ROWS:,}")


def load(spark: Spark, server: UprServer, folder: Path) -> str:
    """Writes the rows to the bucket, and as Parquet what a read of it gives: the same rows, in the
    same columns. Gives the folder of that.

    Raises:
        CannotMeasureError: Rows are missing.
    """
    spark.move(spark.make(folder / "rows"), server.url)
    rest(server)
    copy = str(folder / "copy")
    spark.move(server.url, copy)
    for source in (server.url, copy):
        spark.check(source)
    return copy


def beside_parquet(
    row: str,
    text: str,
    peer_name: str,
    move: Callable[[Spark, str, UprServer | None], Moved],
    runs: int,
    say: Callable[[str], None],
) -> list[Figure]:
    """A row about getting all rows out of a bucket, against getting them out of Parquet.

    Args:
        row: The row's name.
        text: What is measured.
        peer_name: What it is compared with.
        move: Does it once, of a bucket's URL and its server, or of a folder.
        runs: How often, after `WARM_UPS`.
        say: Is told how it goes on.
    """
    check_disk()
    say(f"{row}: writing {ROWS:,} rows")
    ours: list[Moved] = []
    files: list[Moved] = []
    empties: list[Moved] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        UprServer(partitions=PARTITIONS) as server,
        Spark() as spark,
        Spark() as peer_spark,
    ):
        copy = load(spark, server, Path(folder))
        for index in range(-WARM_UPS, runs):
            moved = move(spark, server.url, server)
            file = move(peer_spark, copy, None)
            empty = move(peer_spark, EMPTY, None)
            if index < 0:
                continue
            ours.append(moved)
            files.append(file)
            empties.append(empty)
            say(
                f"  run {index + 1}: {moved.rate:,.0f} rows/s; Parquet {file.rate:,.0f}; "
                f"the empty source {empty.rate:,.0f}"
            )
    return [
        Figure.more_is_better(
            row=row,
            text=text,
            unit="rows/s",
            ours=rates(ours),
            peer=rates(files),
            peer_name=peer_name,
            first_bar=0.5,
            aim=1.0,
            details=details(ours, files),
        ),
        against_empty(row, ours, empties, first_bar=0.7, aim=0.9),
    ]


def against_empty(
    row: str, ours: Sequence[Moved], empties: Sequence[Moved], *, first_bar: float, aim: float
) -> Figure:
    """The same runs against the Python data source that does nothing."""
    return Figure.more_is_better(
        row=f"{row} empty",
        text="The same runs.",
        unit="rows/s",
        ours=rates(ours),
        peer=rates(empties),
        peer_name="the same with a Python data source that does nothing, 10,000 rows a batch",
        first_bar=first_bar,
        aim=aim,
    )


def rates(runs: Sequence[Moved]) -> Spread:
    """Of all runs."""
    return Spread.of([run.rate for run in runs])


def details(ours: Sequence[Moved], peers: Sequence[Moved]) -> dict[str, Any]:
    """Processor time of all processes."""
    return {
        **{f"{role}_ns_per_mutation": _a_row(ours, role).to_json() for role in ours[0].processor_s},
        **{
            f"{role}_busy": round(
                Spread.of([run.processor_s[role] / run.seconds for run in ours]).median, 2
            )
            for role in ours[0].processor_s
        },
        "parquet_client_ns_per_row": _a_row(peers, "client").to_json(),
        "rows": ROWS,
    }


def _a_row(runs: Sequence[Moved], role: str) -> Spread:
    return Spread.of([run.processor_s[role] / ROWS * 1e9 for run in runs])
