"""The build's hook: compiles the native kernel where there is a compiler.

Without one, or with `UPR_PURE_PYTHON=1`, the build goes on without it, and the wheel is one for any
system. `python hatch_build.py [folder]` compiles it in place, or into a folder; what stands in
`CFLAGS` is added.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT: Final = Path(__file__).resolve().parent
SOURCES: Final = ROOT / "upr_kernel" / "native"
LIBRARY: Final = "_native.abi3.so"

# The limited API of 3.11: one library for all later versions. No -march: a wheel runs on machines
# other than the one that built it.
LIMITED_API: Final = "0x030B0000"
FLAGS: Final = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
    "-Wno-cast-function-type",
)


class KernelBuildHook(BuildHookInterface[BuilderConfig]):
    """Adds the library to wheels and to editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compiles the library, and names the wheel after the system if that succeeds."""
        library = ROOT / "upr_kernel" / LIBRARY
        library.unlink(missing_ok=True)
        if os.environ.get("UPR_PURE_PYTHON", "0") not in ("", "0"):
            return
        try:
            compile_library(library)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"the kernel is not compiled, and will run in Python: {error}")
            return
        platform = re.sub(r"\W", "_", sysconfig.get_platform())
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/upr_kernel/{LIBRARY}")


def compile_library(library: Path) -> None:
    """Compiles the native kernel with the compiler in `CC`, or the one that built Python.

    Raises:
        OSError: There is no compiler.
        subprocess.CalledProcessError: It failed; its messages are on stderr.
    """
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    link = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    interface = (ROOT / "upr_kernel" / "__init__.py").read_text(encoding="utf-8")
    (revision,) = re.findall(r"^REVISION: Final = (\d+)$", interface, re.MULTILINE)
    # Into a file beside it first: a process that has the old library open keeps it.
    unfinished = library.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [
            *shlex.split(compiler),
            *FLAGS,
            *shlex.split(os.environ.get("CFLAGS", "")),
            *link,
            f"-DPy_LIMITED_API={LIMITED_API}",
            f"-DUPR_KERNEL_REVISION={revision}",
            f"-I{sysconfig.get_path('include')}",
            *map(str, sorted(SOURCES.glob("*.c"))),
            "-o",
            str(unfinished),
        ],
        check=True,
    )
    unfinished.replace(library)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "upr_kernel"
    folder.mkdir(parents=True, exist_ok=True)
    compile_library(folder / LIBRARY)
