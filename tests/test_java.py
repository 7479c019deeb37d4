"""What `make` does to find a Java for Spark, with stubs on the PATH."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import attrs
import pytest

from tests.kit.process import ROOT

TOOLS = ("sh", "sed", "head", "cp")


@attrs.frozen
class Machine:
    """A machine that has little more than a shell."""

    bin: Path

    def has(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def has_java(self, version: str, name: str = "java") -> None:
        self.has(name, java(version))

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / "sh", ROOT / "deploy" / "java.sh"],
            env={"PATH": str(self.bin), **variables},
            capture_output=True,
            text=True,
            check=False,
        )


def java(version: str) -> str:
    return f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in TOOLS:
        program = next(
            path
            for folder in os.environ["PATH"].split(":")
            if (path := Path(folder, name)).exists()
        )
        (tmp_path / name).symlink_to(program)
    machine = Machine(tmp_path)
    machine.has("id", "echo 1000")
    return machine


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1"])
def test_a_java_that_is_there(machine: Machine, version: str) -> None:
    machine.has_java(version)
    result = machine.run()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_442", "", None])
def test_without_java_and_without_root_it_says_what_to_install(
    machine: Machine, version: str | None
) -> None:
    if version is not None:
        machine.has_java(version)
    machine.has("apt-get", "echo called >&2")
    result = machine.run()
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Spark needs Java 17 or newer: install one")
    assert result.stderr.count("\n") == 1


def test_java_home_goes_before_the_path(machine: Machine) -> None:
    home = machine.bin / "home"
    (home / "bin").mkdir(parents=True)
    machine.has_java("11", "home/bin/java")
    machine.has_java("17")
    assert machine.run(JAVA_HOME=str(home)).returncode == 1
    machine.has_java("17", "home/bin/java")
    machine.has_java("11")
    assert machine.run(JAVA_HOME=str(home)).returncode == 0


@pytest.mark.parametrize("package", ["openjdk-17-jre-headless", "default-jre-headless"])
def test_root_installs_one(machine: Machine, package: str) -> None:
    machine.has("id", "echo 0")
    machine.has("installed", java("17.0.1"))
    copies = 'cp "$BIN/installed" "$BIN/java"'
    machine.has("apt-get", f'case "$*" in update*);; *" {package}") {copies};; *) exit 100;; esac')
    result = machine.run(BIN=str(machine.bin))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "Installing a Java for Spark; this is done once.\n"


def test_an_installable_java_that_is_too_old_fails(machine: Machine) -> None:
    machine.has("id", "echo 0")
    machine.has("installed", java("11"))
    machine.has("apt-get", 'case "$*" in install*) cp "$BIN/installed" "$BIN/java" ;; esac')
    result = machine.run(BIN=str(machine.bin))
    assert result.returncode == 1
    assert "Spark needs Java 17" in result.stderr
