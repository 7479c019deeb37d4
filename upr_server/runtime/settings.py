"""Settings: defaults, a TOML file, the environment, the command line.

Each overrides the one before. What can be set are the fields of a struct, and their types are
checked, whole, before anything is opened.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from upr_protocol.errors import UprError

S = TypeVar("S", bound=msgspec.Struct)


class ConfigError(UprError):
    """The configuration says something that cannot be."""


def load_settings(
    kind: type[S],
    prefix: str,
    path: Path | None,
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    ignored: Collection[str] = (),
) -> S:
    """The settings from `path` (if any), then `environment`, then `options`.

    Args:
        kind: What can be set.
        prefix: An environment variable is a field's name in capitals behind this. The one that
            names the file, `config`, is not looked at.
        path: A TOML file.
        environment: Environment variables.
        options: By field, what the command line says; None where it says nothing.
        ignored: Names that are not looked for in the environment.

    Raises:
        ConfigError: With the name of what is wrong, and what it should be.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            settings |= tomllib.loads(path.read_text("utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"{path} cannot be read: {reason}") from error
    for variable, text in environment.items():
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name != "config" and name not in ignored:
            if name not in kind.__struct_fields__:
                raise ConfigError(
                    f"invalid configuration: the environment variable {variable} names no setting; "
                    "correct its name, or remove it"
                )
            settings[name] = text
    settings |= {name: value for name, value in options.items() if value is not None}
    try:
        # Not strict: the environment has only text.
        return msgspec.convert(settings, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid configuration: {error}{_advice(kind, str(error))}") from error


def refuse_without(needed: str, value: object, **settings: object) -> None:
    """Refuses settings that have no use without another one, if that is not set.

    Args:
        needed: The name of that one.
        value: Its value; false if it is not set.
        settings: The others, with their values.

    Raises:
        ConfigError: One of them is set, and `needed` is not.
    """
    for name, setting in settings.items():
        if setting and not value:
            raise ConfigError(
                f"{name} has no use without {needed}: set {needed}, too, or leave out {name}"
            )


def _advice(kind: type[msgspec.Struct], sentence: str) -> str:
    """What to write instead, where a setting is one of some words: msgspec's sentence does not say
    which there are."""
    name = sentence.rpartition("$.")[2].rstrip("`")
    for field in msgspec.structs.fields(kind):
        if field.name == name and get_origin(field.type) is Literal:
            *others, last = get_args(field.type)
            return f"; use {', '.join(others)} or {last}"
    return ""
