"""Encrypted connections of drivers and executors, with the certificates that options name."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.kit.certificates import Certificates
from tests.spark.reads import load
from tests.spark.server import blocking_server
from upr_protocol.client import Address, BlockingClient
from upr_protocol.security import Security


def test_spark_shows_and_checks_certificates(
    spark: SparkSession, certificates: Certificates
) -> None:
    ca = str(certificates.authority.ca)
    files = {
        "ca": ca,
        "cert": str(certificates.client.cert),
        "certKey": str(certificates.client.key),
    }
    settings = ("--tls-certificate", str(certificates.server.cert), "--tls-client-ca", ca)
    key = ("--tls-key", str(certificates.server.key))
    with blocking_server(*settings, *key) as server:
        url = server.url("b").replace("upr://", "uprs://")
        security: Security = certificates.security_of(certificates.client)
        with BlockingClient(Address.parse(url.removesuffix("b"), security)) as client:
            client.create_bucket("b", 2)
        rows = spark.range(20).selectExpr("CAST(id AS STRING) AS key", "'text' AS value")
        writer = rows.write.format("upr").mode("append")
        writer.option("url", url).options(**files).save()
        frame = load(spark, url, "key STRING, value STRING", **files)
        assert {row.key for row in frame.collect()} == {str(number) for number in range(20)}
        for less in ({}, {"ca": ca}):
            with pytest.raises(PySparkException, match=r"\[UPR_TLS\]"):
                load(spark, url, "key STRING", **less).collect()
        with pytest.raises(PySparkException, match=r"\[UPR_TLS\]"):
            writer.option("url", url).option("cert", "").option("certKey", "").save()
        with pytest.raises(PySparkException, match=r"\[UPR_OPTION\].*begins with uprs://"):
            load(spark, server.url("b"), **files)
