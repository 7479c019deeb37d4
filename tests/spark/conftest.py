"""One Spark session and one server for all tests of the data source."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.kit.process import ROOT
from tests.spark.class_archive import JAVA_OPTIONS, make_archive
from tests.spark.server import BlockingServer, blocking_server
from tests.spark.spark_home import make_spark_home
from upr_protocol.spark import UprDataSource

SPARK_OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}
"""For every session that the tests make, also in processes of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sockets to the JVM are left to the collector by PySpark itself."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


def java_is_there() -> bool:
    """Whether PySpark will find a Java."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=os.path.join(home, "bin") if home else None) is not None


@pytest.fixture(scope="session", autouse=True)
def spark_home() -> Iterator[None]:
    """Each Spark of these tests has the folder that `tests.spark.spark_home` makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(make_spark_home()))
        yield


@pytest.fixture(scope="session")
def class_archive(spark_home: None) -> None:
    """The classes that the tests' JVMs map; see `tests.spark.class_archive`."""
    make_archive()


@pytest.fixture(scope="session")
def spark(class_archive: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session of two cores in which the data source is known. Spark runs a task that fails once
    more, as on a cluster; it would not by itself on one machine."""
    if not java_is_there():
        pytest.fail("these tests need Java 17 or newer: `make test` installs it, or says how")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder.master("local[2,2]").appName("tests")
        builder = builder.config("spark.local.dir", str(tmp_path_factory.mktemp("spark")))
        builder = builder.config(
            "spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse"))
        )
        for name, value in SPARK_OPTIONS.items():
            builder = builder.config(name, value)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
            session = builder.getOrCreate()
            session.sparkContext.setLogLevel("ERROR")
            session.dataSource.register(UprDataSource)
            yield session
            session.stop()
            gc.collect()


@pytest.fixture(scope="session")
def server() -> Iterator[BlockingServer]:
    """A server that all tests share; each makes buckets of its own. A test that kills it takes its
    own: `blocking_server`."""
    with blocking_server() as running:
        yield running


_BUCKETS = count()


@pytest.fixture
def new_bucket(server: BlockingServer) -> Callable[..., str]:
    """Makes a bucket of 8 partitions, or as many as are asked for; gives its URL."""

    def make(partitions: int = 8, quota_bytes: int = 0) -> str:
        return server.create_bucket(f"bucket-{next(_BUCKETS)}", partitions, quota_bytes)

    return make
