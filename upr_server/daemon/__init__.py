"""What both daemons are made with, whatever they do: settings, logs, listeners, and their ends."""

from upr_server.daemon.collector import rare_collections
from upr_server.daemon.failure import first_failure
from upr_server.daemon.listeners import ListenError, listening, parse_listen
from upr_server.daemon.log import set_up_logging
from upr_server.daemon.settings import ConfigError, load_settings
from upr_server.daemon.signals import run_until_signal
from upr_server.daemon.surroundings import Door, Surroundings

__all__ = [
    "ConfigError",
    "Door",
    "ListenError",
    "Surroundings",
    "first_failure",
    "listening",
    "load_settings",
    "parse_listen",
    "rare_collections",
    "run_until_signal",
    "set_up_logging",
]
