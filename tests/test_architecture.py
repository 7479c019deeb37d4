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
PACKAGES: Final = ("upr_kernel", "upr_protocol", "upr_server")
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: Final[list[dict[str, Any]]] = PROJECT["tool"]["importlinter"]["contracts"]

VIOLATIONS: Final[dict[str, tuple[str, str]]] = {
    "protocol-imports-no-server": ("upr_protocol.cli", "upr_server.config"),
    "kernel-imports-no-other-package": ("upr_kernel", "upr_protocol.limits"),
    "protocol-layers": ("upr_protocol.concurrency", "upr_protocol.transport"),
    "values-in-order": ("upr_protocol.chunk", "upr_protocol.failover"),
    "server-layers": ("upr_server.net", "upr_server.events"),
    "indexer-imports-no-server": ("upr_server.indexer", "upr_server.storage"),
    "purity": ("upr_server.engine", "random"),
    "server-imports-client-package-only": ("upr_server.net", "upr_protocol.client.operator"),
    "pyspark-in-spark-only": ("upr_protocol.client", "pyspark"),
    "deltalake-in-recipes-only": ("upr_protocol.spark", "deltalake"),
    "lmdb-in-stores-only": ("upr_server.storage", "lmdb"),
    "no-import-cycles": ("upr_protocol.session.rules", "upr_protocol.session.session"),
}
"""By contract: an importer, and what it must not import. import-linter has tests of its own: one
violation a contract shows that the contract stands in the configuration as it is meant."""


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
    assert list(VIOLATIONS) == [c["id"] for c in CONTRACTS]


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_planted_violation_breaks_exactly_its_contract(tree: Path, contract: str) -> None:
    plant(tree, *VIOLATIONS[contract])
    assert broken_contracts(tree) == [contract]
