"""`python -m upr_protocol.cli` is `upr`."""

from __future__ import annotations

from functools import partial

from upr_protocol.cli import main
from upr_protocol.start import run_command

if __name__ == "__main__":
    run_command("upr", lambda: partial(main, prog_name="upr"))
