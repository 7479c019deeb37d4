"""Where a command begins."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import upr_protocol
from tests.storage.small_directory import make
from upr_protocol.start import run_command


def test_ctrl_c_as_soon_as_it_is_an_exception_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_number: int, handler: object) -> None:
        if handler is signal.default_int_handler:
            raise KeyboardInterrupt

    monkeypatch.setattr(signal, "getsignal", lambda _number: signal.default_int_handler)
    monkeypatch.setattr(signal, "signal", interrupt)
    with pytest.raises(SystemExit) as exit_info:
        run_command("upr", lambda: lambda: pytest.fail("the command ran"))
    assert exit_info.value.code == 130


SCRIPTS = Path(upr_protocol.__file__).parent / "spark" / "commands"


@pytest.mark.parametrize(
    ("arguments", "first_module"),
    [
        pytest.param(["-c", "from upr_protocol.entry import upr; upr()"], "click", id="upr"),
        pytest.param(["-m", "upr_protocol.cli"], "click", id="-m upr_protocol.cli"),
        pytest.param(["-m", "upr_server.entry"], "click", id="upr-server"),
        pytest.param(
            ["-c", "from upr_server.indexer.command import main; main()"], "click", id="upr-indexer"
        ),
        pytest.param(["-m", "upr_protocol.spark", "snapshot"], "msgspec", id="-m ...spark"),
        pytest.param(["-m", "upr_protocol.spark.commands.join"], "msgspec", id="-m ...join"),
        *(
            pytest.param([str(path)], "msgspec", id=path.name)
            for path in sorted(SCRIPTS.glob("[!_]*.py"))
        ),
    ],
)
def test_ctrl_c_while_python_imports(arguments: list[str], first_module: str) -> None:
    """`first_module` is about the first that takes long. Python tells of each, once imported."""
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip().partition(".")[0] == first_module:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert [line for line in rest.splitlines() if not line.startswith("import time:")] == []


@pytest.mark.parametrize("program", ["upr_protocol.entry:upr", "upr_server.entry:upr_server"])
def test_a_help_text_for_which_the_disk_has_no_room(program: str) -> None:
    module, function = program.split(":")
    code = f"import sys; from {module} import {function}; sys.argv = ['', '--help']; {function}()"
    with open("/dev/full", "wb") as full_device:
        ran = subprocess.run(
            [sys.executable, "-c", code], stdout=full_device, stderr=subprocess.PIPE, check=False
        )
    name = function.replace("_", "-")
    sentence = f"{name}: the output cannot be written: No space left on device\n"
    assert (ran.returncode, ran.stderr.decode()) == (1, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--help >&-", "the output cannot be written: Bad file descriptor"),
        ("set upr://127.0.0.1:1/b key - <&-", "standard input: Bad file descriptor"),
    ],
)
def test_a_closed_stream_is_an_error_and_no_connection_takes_its_place(
    arguments: str, sentence: str
) -> None:
    code = "from upr_protocol.entry import upr; upr()"
    ran = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {arguments}', sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"upr: {sentence}\n")


@pytest.mark.parametrize("command", ["check", "dump", "mend", "restore --new-histories"])
def test_a_command_that_reads_a_directory_loads_nothing_of_a_server(
    command: str, tmp_path: Path
) -> None:
    """That took more than half of its time."""
    make(tmp_path / "data")
    code = (
        "import sys; from upr_server.cli import main; main(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('trio', 'structlog') if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *command.split(), "--data-dir", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == "[]\n"
