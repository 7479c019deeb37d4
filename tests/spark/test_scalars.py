"""Reading imports no pandas, which Arrow does for a scalar of its own making."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.process import ROOT, environment
from upr_protocol.client import BlockingClient
from upr_protocol.spark.scalars import (
    bool_scalar,
    int8_scalar,
    int32_scalar,
    int64_scalar,
    text_array,
    text_scalar,
)

NewBucket = Callable[..., str]

READ = """
import sys
from upr_protocol.spark.batch_reader import BatchReader
from upr_protocol.spark.read_options import ReadOptions
from upr_protocol.spark.schema import default_schema

options = ReadOptions.parse({"url": sys.argv[1]})
reader = BatchReader(options, default_schema(options), 1)
rows = [row for task in reader.partitions() for batch in reader.read(task) for row in batch["op"]]
print(len(rows), "pandas" in sys.modules)
import pandas
"""


def test_a_read_imports_no_pandas(new_bucket: NewBucket) -> None:
    url = new_bucket()
    with BlockingClient(url) as client:
        for index in range(5):
            client.set(f"key-{index}", b"value")
        client.delete("key-0")
    process = subprocess.run(
        [sys.executable, "-c", READ, url],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    # Pandas is installed here, or the test would say nothing.
    assert process.returncode == 0, process.stderr
    rows, has_pandas = process.stdout.split()
    assert int(rows) >= 5
    assert has_pandas == "False"


@given(st.lists(st.text()))
def test_texts(texts: list[str]) -> None:
    array = text_array(texts)
    array.validate(full=True)
    assert array.equals(pa.array(texts, pa.string()))


@given(st.integers(-128, 127), st.booleans(), st.text())
def test_scalars(value: int, flag: bool, text: str) -> None:
    assert int8_scalar(value).equals(pa.scalar(value, pa.int8()))
    assert int32_scalar(value << 24).equals(pa.scalar(value << 24, pa.int32()))
    assert int64_scalar(value << 56).equals(pa.scalar(value << 56, pa.int64()))
    assert bool_scalar(flag).equals(pa.scalar(flag))
    assert text_scalar(text).equals(pa.scalar(text))
