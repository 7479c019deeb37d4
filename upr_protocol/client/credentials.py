"""Passwords in files."""

from __future__ import annotations

import os
import stat
from typing import Final

from upr_protocol.errors import CredentialsError
from upr_protocol.security import Credentials

_FILE_BYTES_MAX: Final = 4096


def resolve_credentials(credentials: Credentials | None) -> Credentials | None:
    """The credentials to log in with. If they name a file, the password is read from it now.

    Raises:
        CredentialsError: The file cannot be read, has no password, or others can read it.
    """
    if credentials is None or not credentials.password_file:
        return credentials
    return Credentials(credentials.user, read_password(credentials.password_file))


def read_password(path: str) -> str:
    """The password in the first line of a file.

    Raises:
        CredentialsError: The file cannot be read, has no password, or others can read it.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise CredentialsError(
            f"the file with the password, {path}, cannot be read: {error.strerror}"
        ) from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise CredentialsError(
            f"others can use the password in {path}: take that right away with "
            f"`chmod o=,g-w {path}`"
        )
    line = content.partition(b"\n")[0].removesuffix(b"\r")
    try:
        password = line.decode()
    except UnicodeDecodeError as error:
        raise CredentialsError(f"the first line of {path} is not UTF-8") from error
    if not password:
        raise CredentialsError(f"the first line of {path} is empty: write the password there")
    return password
