"""Structured logs on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def set_up_logging(level: str, form: Literal["console", "json"]) -> None:
    """Sends the log of this process to standard error, and of the libraries' what is a warning."""
    renderer: list[structlog.typing.Processor] = [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    ]
    if form == "json":
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    least = max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()])
    logging.basicConfig(stream=sys.stderr, level=least)
