"""The command `upr-server`: one module a group of commands."""

from __future__ import annotations

from upr_server.cli.command import main

__all__ = ["main"]
