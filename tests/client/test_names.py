"""The names that `upr_protocol.client` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import upr_protocol.client


@pytest.mark.parametrize("name", upr_protocol.client.__all__)
def test_each_name_is_what_its_module_calls_so(name: str) -> None:
    value = getattr(upr_protocol.client, name)
    # A name of a type has none of its own.
    assert getattr(value, "__name__", name) in (name, "Callable")
    assert name in dir(upr_protocol.client)


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Conumer'"):
        _ = getattr(upr_protocol.client, "Conumer")  # noqa: B009  type checkers know that it is wrong
    with pytest.raises(ImportError, match="Conumer"):
        exec("from upr_protocol.client import Conumer")


@pytest.mark.parametrize(
    ("imports", "unneeded"),
    [
        pytest.param(
            "from upr_protocol.client import BlockingClient, BlockingConsumer",
            "upr_protocol.client.index_client upr_protocol.client.local_copy sqlite3 http.client",
            id="blocking client",
        ),
        pytest.param(
            "from upr_protocol.client import connect, consume, publisher",
            "upr_protocol.client.blocking upr_protocol.client.index_client sqlite3 http.client",
            id="client over Trio",
        ),
        pytest.param(
            "import upr_server.app, upr_server.cli.serve",
            "upr_protocol.client.blocking upr_protocol.client.index_client "
            "upr_protocol.client.local_copy upr_protocol.client.rollback sqlite3 http.client",
            id="server",
        ),
    ],
)
def test_what_a_program_does_not_use_is_not_imported(imports: str, unneeded: str) -> None:
    """That took a third of the processor time of a server's imports."""
    code = (
        f"import sys; {imports}; "
        f"print(*[name for name in {unneeded.split()} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "\n"
