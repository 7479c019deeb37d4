"""Options as Spark hands them over: texts by name, the names in lower case.

Spark passes on options with misspelt names, and nobody notices. So `SourceOptions` remembers which
options were looked up, and refuses the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

from upr_protocol.client import Address, AddressError, Credentials, Security, TlsSettings
from upr_protocol.spark.errors import OptionError

T = TypeVar("T")

_PATHS: Final = frozenset({"path", "paths"})
"""Options that Spark makes of the path of `load`, `save` or `start`."""

_OF_TABLES: Final = frozenset({"owner", "provider"})
"""Properties that Spark hands over as options when `CREATE TABLE` asks for the columns."""

_IN_SQL: Final = "CREATE TEMPORARY VIEW planes USING upr OPTIONS (url 'upr://host:port/bucket')"

_NUMBER: Final = re.compile(r"[0-9]+")

TIMEOUT_S_DEFAULT: Final = 600
"""A server that is not there for so long wants a person."""

TIMEOUT_S_MAX: Final = 7 * 24 * 3600

IDLE_INTERVAL_S_LEAST: Final = 30
IDLE_INTERVAL_S_MOST: Final = 300
"""Connections for requests say nothing while a worker is busy with Spark: after twice the interval
the server takes the worker for dead, and it has to connect again."""


CONNECTION_OPTIONS: Final = frozenset(
    {"url", "ca", "cert", "certkey", "user", "passwordfile", "timeoutseconds"}
)
"""Options of every read and write that say how to connect, in lower case."""


def connection_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options that say how to connect, out of the options of a read or write."""
    return {name: text for name, text in options.items() if name.lower() in CONNECTION_OPTIONS}


class SourceOptions:
    """The options of one read or write.

    Args:
        options: By name, in whatever case.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): str(value) for name, value in options.items()}
        self._known_names: dict[str, str] = {}

    def text(self, name: str, default: T) -> str | T:
        """An option's text; `default` when it was not given."""
        self._known_names[name.lower()] = name
        return self._values.get(name.lower(), default)

    def required(self, name: str, example: str) -> str:
        """The text of an option that must be given."""
        text = self.text(name, None)
        if not text:
            raise OptionError(f'the option {name} is missing: .option("{name}", "{example}")')
        return text

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """One of a few words."""
        text = self.text(name, default)
        for word in choices:
            if text.lower() == word.lower():
                return word
        raise OptionError(f"the option {name} is {text!r}, and not one of {', '.join(choices)}")

    def flag(self, name: str, *, default: bool) -> bool:
        """`true` or `false`."""
        return self.choice(name, "true" if default else "false", ("true", "false")) == "true"

    def number(self, name: str, default: T, *, low: int = 0, high: int = (1 << 63) - 1) -> int | T:
        """A whole number from `low` to `high`; `default` when it was not given."""
        text = self.text(name, None)
        if text is None:
            return default
        # Python's own rules are wider: `1_0`, and digits of other scripts.
        with suppress(ValueError):
            value = int(text) if _NUMBER.fullmatch(text) else -1
            if low <= value <= high:
                return value
        raise OptionError(
            f"the option {name} is {text!r}, and no whole number from {low} to {high}"
        )

    def timeout_s(self) -> int:
        """How long to go on without a server, in seconds: the option `timeoutSeconds`."""
        return self.number("timeoutSeconds", TIMEOUT_S_DEFAULT, low=1, high=TIMEOUT_S_MAX)

    def address(self, *, has_bucket: bool = True) -> Address:
        """The bucket, or only where it is, and how to connect and log in: the options `url`, `ca`,
        `cert`, `certKey`, `user` and `passwordFile`."""
        url = self.text("url", "")
        if not url:
            # A query of a table comes without any option.
            raise OptionError(
                'the option url is missing: .option("url", "upr://host:port/bucket"), or in SQL '
                f"{_IN_SQL}; the options of a table do not arrive here"
            )
        if "@" in url:
            # The sentence of the address would name options of commands. It is not shown, either.
            raise OptionError(
                "the option url has a user or a password, which Spark would show in its plans and "
                "logs: name the user in the option user, and in passwordFile a file with the "
                "password"
            )
        tls = TlsSettings(self.text("ca", ""), self.text("cert", ""), self.text("certKey", ""))
        security = Security(None if tls == TlsSettings() else tls, self._credentials())
        try:
            address = Address.parse(url, security)
            if has_bucket:
                address.with_bucket()
        except AddressError as error:
            raise OptionError(f"the option url: {error}") from error
        if address.bucket and not has_bucket:
            raise OptionError(
                f"the option url is {url!r}: with buckets or bucketPattern it names no bucket"
            )
        return address

    def _credentials(self) -> Credentials | None:
        user, password_file = self.text("user", ""), self.text("passwordFile", "")
        if "password" in self._values:
            raise OptionError(
                "there is no option password, because Spark shows options in its plans and logs: "
                "write the password into a file that others cannot read, and name it in the option "
                "passwordFile"
            )
        if bool(user) != bool(password_file):
            raise OptionError(
                "the options user and passwordFile go together: the user, and the file with the "
                "password, on the driver and on each executor"
            )
        return Credentials(user, password_file=password_file) if user else None

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuses options that there are, and that are not for what is asked here.

        Args:
            names: The options.
            reason: What they are for, and what to do.

        Raises:
            OptionError: One of them was given.
        """
        for name in names:
            if name.lower() in self._values:
                raise OptionError(f"the option {name} {reason}")

    def refuse_unknown(self) -> None:
        """Refuses the options that were not looked up.

        Raises:
            OptionError: There is an option that is unknown here.
        """
        if self._values.keys() >= _OF_TABLES:
            raise OptionError(
                "a table cannot be of this data source, as Spark does not give the options of a "
                f"table to the queries of it: use a view, as in {_IN_SQL}"
            )
        for name in self._values:
            if name in _PATHS:
                # It is not shown: it may have a password.
                raise OptionError(
                    "the path of load, save or start has no meaning for this data source: leave it "
                    "out. The option url names the bucket"
                )
            if name not in self._known_names:
                near = difflib.get_close_matches(name, self._known_names, 1)
                hint = f"; perhaps {self._known_names[near[0]]} was meant" if near else ""
                option_names = ", ".join(sorted(self._known_names.values(), key=str.lower))
                raise OptionError(f"there is no option {name}{hint}. There are {option_names}")


def idle_interval_s(timeout_s: int) -> int:
    """The idle interval with which a server that is silent on an open connection is taken for dead
    after `timeout_s`: twice the interval. From 60 s to 10 minutes."""
    return max(IDLE_INTERVAL_S_LEAST, min(IDLE_INTERVAL_S_MOST, timeout_s // 2))
