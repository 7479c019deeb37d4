"""Giving a data directory its first users, before a server uses it."""

from __future__ import annotations

from pathlib import Path

from upr_protocol.users import Users
from upr_server.storage.directory import lock_for_writing, prepare
from upr_server.storage.errors import DataDirectoryError
from upr_server.storage.users_file import UsersFile


def save_first_users(path: Path, users: Users) -> None:
    """Gives the data directory its users; it is made if it is not there. A directory whose file of
    users was deleted gets them, too.

    Raises:
        DataDirectoryError: It has users already, a server uses it, or it cannot be written.
        CorruptionError: The users that it has are damaged.
        DiskFullError: There is no room.
    """
    prepare(path)
    with lock_for_writing(path):
        file = UsersFile(path)
        if not file.is_missing():
            # Damage is told as such.
            file.load()
            raise DataDirectoryError(
                f"{path} has users already; start the server, and change them with `upr user`"
            )
        file.save(users.to_json().encode())
