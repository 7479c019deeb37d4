"""`python -m tests.fuzz`: Atheris looks for bytes that break a promise (`make fuzz` installs it).

What it finds is saved below `.fuzz/found`, and the command that repeats it is printed; what it
learned of how to get far is kept in `.fuzz/corpus`, for the next time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).with_name("corpus")
WORK: Final = Path(".fuzz")
NAMES: Final = sorted(folder.name for folder in CORPUS.iterdir())

INPUT_BYTES_MAX: Final = 4096
INPUT_TIMEOUT_S: Final = 10
MEMORY_MIB_MAX: Final = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzzes the targets that are named, one after the other, or all; 1 when something was found.
    With `--file` or `--hex`, runs a target on one input."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all if none"
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target; 60 if not given")
    parser.add_argument("--file", type=Path, help="an input to repeat")
    parser.add_argument("--hex", type=bytes.fromhex, help="the same, as it stands here")
    options = parser.parse_args(arguments)
    names = options.targets or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(NAMES)}")
    data: bytes | None = options.file.read_bytes() if options.file else options.hex
    if data is not None:
        from tests.fuzz.targets import TARGETS

        for name in names:
            TARGETS[name](data)
        return 0
    if len(names) == 1:
        _fuzz(names[0], options.seconds)
    # libFuzzer ends the process that it ran in.
    run = (sys.executable, "-m", "tests.fuzz", f"--seconds={options.seconds}")
    codes = [subprocess.run([*run, name], check=False).returncode for name in names]
    return int(any(codes))


def _fuzz(name: str, seconds: int) -> None:
    """Ends the process: with 0 when nothing was found."""
    import atheris

    # Before anything imports them: what it is not told of is not instrumented. construct reads most
    # of the messages.
    with atheris.instrument_imports(include=["upr_protocol", "upr_server", "construct"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    learned, findings = WORK / "corpus" / name, WORK / "found"
    learned.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)

    def run(data: bytes) -> None:
        try:
            target(data)
        except Exception:
            # libFuzzer's own name for it.
            path = findings / f"{name}-crash-{sha1(data, usedforsecurity=False).hexdigest()}"
            sys.stderr.write(f"\nto repeat: python -m tests.fuzz {name} --file {path}\n")
            raise

    options = {
        "max_total_time": seconds,
        "max_len": INPUT_BYTES_MAX,
        "timeout": INPUT_TIMEOUT_S,
        "rss_limit_mb": MEMORY_MIB_MAX,
        "artifact_prefix": f"{findings}/{name}-",
        "print_final_stats": 1,
    }
    flags = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup([name, *flags, str(learned), str(CORPUS / name)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
