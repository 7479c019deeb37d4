"""Which PySpark the data source accepts."""

from __future__ import annotations

import pytest

from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.versions import check_pyspark


@pytest.mark.parametrize("version", ["4.2.0", "4.3.0", "4.10.1", "4.3.0.dev1"])
def test_a_version_that_fits(version: str) -> None:
    check_pyspark(version)


@pytest.mark.parametrize("version", ["3.5.6", "4.0.1", "4.1.0", "5.0.0"])
def test_another_version_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(PipelineError, match=rf"UPR_PYSPARK.*4\.2.*{version}.*pip install"):
        check_pyspark(version)
