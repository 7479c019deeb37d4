"""`python -m upr_protocol.cli` is `upr`."""

from __future__ import annotations

from upr_protocol.cli import main

main(prog_name="upr")
