"""Which PySpark the data source accepts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.process import ROOT, environment
from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.versions import check_pyspark


@pytest.mark.parametrize("version", ["4.2.0", "4.3.0", "4.10.1", "4.3.0.dev1"])
def test_a_version_that_fits(version: str) -> None:
    check_pyspark(version)


@pytest.mark.parametrize("version", ["3.5.6", "4.0.1", "4.1.0", "5.0.0"])
def test_another_version_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(PipelineError, match=rf"UPR_PYSPARK.*4\.2.*{version}.*pip install"):
        check_pyspark(version)


@pytest.mark.parametrize(
    ("arguments", "begin"),
    [
        (("-m", "upr_protocol.spark"), "[UPR_PYSPARK]"),
        (("-c", "import upr_protocol.spark"), "Trace"),
    ],
)
def test_a_command_ends_with_the_sentence_alone(
    arguments: tuple[str, str], begin: str, tmp_path: Path
) -> None:
    (tmp_path / "pyspark.py").write_text('__version__ = "4.1.2"')
    result = subprocess.run(
        (sys.executable, *arguments),
        cwd=ROOT,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(begin)
    assert result.stderr.endswith("pip install 'upr-server[spark]'\n")
    assert (result.stderr.count("\n") == 1) == (begin != "Trace")
