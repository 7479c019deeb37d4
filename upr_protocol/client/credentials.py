"""Passwords in files."""

from __future__ import annotations

import os
import stat
from typing import Final

from upr_protocol.errors import CredentialsError
from upr_protocol.security import Credentials

_FILE_BYTES_MAX: Final = 4096


def resolve_credentials(credentials: Credentials | None) -> Credentials | None:
    """The credentials to log in with. If they name a file, the password is read from it now, and
    again at the next connection.

    Raises:
        CredentialsError: The file cannot be read, has no password, or others can read it; or it is
            a pipe or a device, which has the password once.
    """
    if credentials is None or not credentials.password_file:
        return credentials
    path = credentials.password_file
    if is_read_once(path):
        raise CredentialsError(
            f"the password is read at each connection, and {path} is no file that has it each "
            "time: write the password into a file"
        )
    return Credentials(credentials.user, read_password(path))


def is_read_once(path: str) -> bool:
    """Whether it is a pipe or a device, as the shell's `<(...)` or /dev/stdin: what was read of it
    is gone."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def read_password(path: str) -> str:
    """The password in the first line of a file. Of a pipe or a device, no more than that line is
    read.

    Raises:
        CredentialsError: The file cannot be read, has no password, or others can read it.
    """
    try:
        # Without a buffer: what follows the line is for whoever reads there next.
        with open(path, "rb", buffering=0) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.readline(_FILE_BYTES_MAX)
    except OSError as error:
        raise CredentialsError(
            f"the file with the password, {path}, cannot be read: {error.strerror}"
        ) from error
    # Who may open a pipe or a device says little of who can read what comes through it.
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise CredentialsError(
            f"others can use the password in {path}: take that right away with "
            f"`chmod o=,g-w {os.path.realpath(path)}`"
        )
    line = content.removesuffix(b"\n").removesuffix(b"\r")
    try:
        password = line.decode()
    except UnicodeDecodeError as error:
        raise CredentialsError(
            f"the first line of {path} is not UTF-8: write it in UTF-8"
        ) from error
    if not password:
        raise CredentialsError(f"the first line of {path} is empty: write the password there")
    return password
