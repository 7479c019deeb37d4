"""Structured logs on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

from upr_server.runtime.log_writer import LogWriter, RepeatLimit


def set_up_logging(level: str, form: Literal["console", "json"]) -> None:
    """Sends the log of this process to standard error, and of the libraries' what is a warning. To
    log never waits: see `log_writer`.

    Args:
        level: The least severe event that is logged.
        form: `console` for people, `json` for machines.
    """
    limit = RepeatLimit()
    shared: list[structlog.typing.Processor] = [
        limit,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderers: list[structlog.typing.Processor]
    if form == "json":
        shared.append(structlog.processors.format_exc_info)
        renderers = [structlog.processors.JSONRenderer()]
    else:
        # Where the package rich is installed, the default would print the values of local
        # variables: keys, documents, passwords.
        renderers = [
            _escape_unprintable,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = LogWriter(sys.stderr.fileno())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    handler.start(limit.report)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("upr_server").setLevel(level.upper())


def _escape_unprintable(
    _logger: object, _method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A processor of structlog that escapes what a terminal might obey, in the texts of an event.
    Strangers choose some of them. The console's form does it only in texts with a space or an end
    of a line."""
    for name, value in event_dict.items():
        if isinstance(value, str) and not value.isprintable():
            event_dict[name] = value.encode("unicode_escape").decode()
    return event_dict
