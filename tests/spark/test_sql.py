"""SQL: temporary views read and write, as docs/spark.md shows; tables are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tests.kit.documents import fenced_code
from tests.kit.process import ROOT
from upr_protocol.client import BlockingClient
from upr_protocol.ids import Durability
from upr_protocol.spark.errors import OptionError
from upr_protocol.spark.read_options import ReadOptions

NewBucket = Callable[..., str]

URL = "upr://127.0.0.1:12000/planes"


def statements() -> list[str]:
    """The SQL of the document."""
    (block,) = fenced_code((ROOT / "docs" / "spark.md").read_text(), "sql")
    return [statement for statement in block.split(";") if statement.strip()]


def test_the_document_s_views_read_and_write(spark: SparkSession, new_bucket: NewBucket) -> None:
    url = new_bucket(1)
    create_planes, select, create_new, insert = (
        statement.replace(URL, url) for statement in statements()
    )
    try:
        spark.sql(create_new)
        spark.sql(insert)
        spark.sql(create_planes)
        assert spark.sql(select).first() == ("737", 149)

        with BlockingClient(url, durability=Durability.PERSISTED) as client:
            client.set("N2", '{"seats": 1, "model": "737"}')
        # A view shows what it showed before.
        assert spark.sql(select).first() == ("737", 149)
        spark.sql(create_planes)
        assert spark.sql(select).first() == ("737", 150)
    finally:
        for name in ("planes", "new_planes"):
            spark.catalog.dropTempView(name)


def test_a_table_is_refused_with_what_to_do(spark: SparkSession, new_bucket: NewBucket) -> None:
    sentence = r"UPR_OPTION\] .*CREATE TEMPORARY VIEW"
    url = new_bucket(1)
    with pytest.raises(AnalysisException, match=sentence):
        spark.sql(f"CREATE TABLE of_upr USING upr OPTIONS (url '{url}')")
    # Spark asks nobody about a table whose columns are named.
    spark.sql(f"CREATE TABLE of_upr (key STRING) USING upr OPTIONS (url '{url}')")
    try:
        with pytest.raises(AnalysisException, match=sentence):
            spark.table("of_upr").collect()
    finally:
        spark.sql("DROP TABLE of_upr")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": URL, "provider": "upr", "owner": "ada", "option.url": URL}, "a table.*VIEW"),
        ({"url": URL, "provider": "upr", "owner": "ada", "path": "file:/t"}, "a table.*VIEW"),
        ({}, r"url is missing.*\.option.*VIEW"),
        ({"url": URL, "owner": "ada"}, "no option owner"),
    ],
)
def test_what_comes_of_a_table_is_no_misspelt_option(
    options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(OptionError, match=sentence):
        ReadOptions.parse(options)
