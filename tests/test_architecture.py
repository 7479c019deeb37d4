"""Who may import whom: the tree keeps every contract, and each contract notices being broken.

The contracts stand in `pyproject.toml`. Here a copy of the tree gets one forbidden import, and
exactly the contract that forbids it must break. What is planted is always a new leaf, or imports
one, so that no other contract sees a chain of imports through it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("upr_protocol", "upr_server")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: Final[list[dict[str, Any]]] = PROJECT["tool"]["importlinter"]["contracts"]
PURE: Final[list[str]] = next(c for c in CONTRACTS if c["id"] == "purity")["source_modules"]

# (the contract, who imports, what it imports)
FORBIDDEN: Final[list[tuple[str, str, str]]] = [
    ("protocol-stands-alone", "upr_protocol.client", "upr_server.net"),
    ("protocol-stands-alone", "upr_protocol.wire", "upr_server.engine"),
    ("protocol-stands-alone", "upr_protocol.cli", "upr_server.config"),
    ("protocol-layers", "upr_protocol.chunk", "upr_protocol.wire"),
    ("protocol-layers", "upr_protocol.bucket_event", "upr_protocol.wire"),
    ("protocol-layers", "upr_protocol.wire", "upr_protocol.session"),
    ("protocol-layers", "upr_protocol.session", "upr_protocol.client"),
    ("protocol-layers", "upr_protocol.client", "upr_protocol.cli"),
    ("protocol-layers", "upr_protocol.client", "upr_protocol.spark"),
    ("protocol-layers", "upr_protocol.spark", "upr_protocol.cli"),
    ("protocol-layers", "upr_protocol.cli", "upr_protocol.spark"),
    ("protocol-layers", "upr_protocol.room_without_a_layer", "json"),
    ("values-in-order", "upr_protocol.ids", "upr_protocol.chunk"),
    ("values-in-order", "upr_protocol.ids", "upr_protocol.bucket_event"),
    ("values-in-order", "upr_protocol.ids", "upr_protocol.limits"),
    ("values-in-order", "upr_protocol.errors", "upr_protocol.failover"),
    ("values-in-order", "upr_protocol.chunk", "upr_protocol.failover"),
    ("server-layers", "upr_server.engine", "upr_server.storage"),
    ("server-layers", "upr_server.engine", "upr_server.net"),
    ("server-layers", "upr_server.storage", "upr_server.net"),
    ("server-layers", "upr_server.storage", "upr_server.config"),
    ("server-layers", "upr_server.config", "upr_server.replication"),
    ("server-layers", "upr_server.daemon", "upr_server.config"),
    ("server-layers", "upr_server.daemon", "upr_server.engine"),
    ("server-layers", "upr_server.net", "upr_server.replication"),
    ("server-layers", "upr_server.net", "upr_server.events"),
    ("server-layers", "upr_server.events", "upr_server.net"),
    ("server-layers", "upr_server.engine", "upr_server.events"),
    ("server-layers", "upr_server.storage", "upr_server.events"),
    ("server-layers", "upr_server.net", "upr_server.app"),
    ("server-layers", "upr_server.app", "upr_server.cli"),
    ("server-layers", "upr_server.room_without_a_layer", "json"),
    ("indexer-is-an-outsider", "upr_server.indexer", "upr_server.engine"),
    ("indexer-is-an-outsider", "upr_server.indexer", "upr_server.storage"),
    *(("purity", module, "time") for module in PURE),
    ("purity", "upr_protocol.session", "trio"),
    ("purity", "upr_protocol.wire", "socket"),
    ("purity", "upr_protocol.wire", "pathlib"),
    ("purity", "upr_server.engine", "random"),
    ("purity", "upr_server.engine", "threading"),
    ("pyspark-has-one-room", "upr_protocol.client", "pyspark"),
    ("pyspark-has-one-room", "upr_protocol.cli", "pyspark"),
    ("pyspark-has-one-room", "upr_server.net", "pyspark"),
    ("deltalake-has-one-room", "upr_protocol.spark", "deltalake"),
    ("deltalake-has-one-room", "upr_protocol.client", "deltalake"),
    ("lmdb-has-one-room", "upr_server.storage", "lmdb"),
    ("lmdb-has-one-room", "upr_server.events", "lmdb"),
    ("lmdb-has-one-room", "upr_server.net", "lmdb"),
    ("lmdb-has-one-room", "upr_server.indexer", "lmdb"),
    ("lmdb-has-one-room", "upr_protocol.client", "lmdb"),
]

# (who imports, what it imports): what the contracts must not stand in the way of
ALLOWED: Final[list[tuple[str, str]]] = [
    ("upr_protocol.spark", "pyspark"),
    ("upr_protocol.spark", "upr_protocol.client"),
    ("upr_protocol.client", "trio"),
    ("upr_server.storage.lmdb_store", "lmdb"),
    ("upr_server.indexer", "upr_protocol.client"),
    ("upr_server.indexer", "upr_server.daemon"),
    ("upr_server.replication", "upr_server.storage"),
    ("upr_server.events", "upr_server.storage"),
    ("upr_server.events", "upr_server.engine"),
    ("upr_server.app", "upr_server.indexer"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree, to be spoiled."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def broken_contracts(tree: Path) -> list[str]:
    """The ids of the contracts that `lint-imports` finds broken in `tree`."""
    run = subprocess.run(
        [
            sys.executable,
            *("-c", "from importlinter.cli import lint_imports_command as main; main()"),
            *("--no-cache", "--no-logo"),
        ],
        cwd=tree,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", run.stdout, re.MULTILINE))
    assert verdicts.keys() == {c["name"] for c in CONTRACTS}, run.stdout + run.stderr
    broken = [c["id"] for c in CONTRACTS if verdicts[c["name"]] == "BROKEN"]
    assert run.returncode == (1 if broken else 0)
    return broken


def plant(tree: Path, importer: str, imported: str) -> None:
    """Add to `tree` an import of something in `imported` by something in `importer`."""
    target = _leaf(tree, imported, "planted_target") if _is_ours(imported) else imported
    source = _leaf(tree, importer, "planted_importer")
    with _file(tree, source).open("a") as file:
        file.write(f"\nimport {target}\n")


def _leaf(tree: Path, room: str, name: str) -> str:
    """A module to write to: `room` itself where that is a module, a new one in it if a package."""
    if _file(tree, room).exists():
        return room
    folder = _file(tree, room).with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (folder, *folder.parents):
        if parent == tree:
            break
        (parent / "__init__.py").touch()
    (folder / f"{name}.py").touch()
    return f"{room}.{name}"


def _file(tree: Path, module: str) -> Path:
    return tree.joinpath(*module.split(".")).with_suffix(".py")


def _is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in PACKAGES


def test_the_tree_keeps_every_contract(tree: Path) -> None:
    assert broken_contracts(tree) == []


def test_every_contract_has_a_violation_to_notice() -> None:
    assert {contract for contract, _, _ in FORBIDDEN} == {c["id"] for c in CONTRACTS}


@pytest.mark.parametrize(("contract", "importer", "imported"), FORBIDDEN)
def test_a_planted_violation_breaks_exactly_its_contract(
    tree: Path, contract: str, importer: str, imported: str
) -> None:
    plant(tree, importer, imported)
    assert broken_contracts(tree) == [contract]


@pytest.mark.parametrize(("importer", "imported"), ALLOWED)
def test_what_the_house_needs_is_allowed(tree: Path, importer: str, imported: str) -> None:
    if importer.endswith("lmdb_store"):  # the one that is a module and may still be missing
        _file(tree, importer).parent.mkdir(exist_ok=True)
        (_file(tree, importer).parent / "__init__.py").touch()
        _file(tree, importer).touch()
    plant(tree, importer, imported)
    assert broken_contracts(tree) == []
