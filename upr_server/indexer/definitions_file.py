"""The definitions of all indexes in a file, for the next start."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from upr_server.indexer.pure.definition import (
    DefinitionError,
    IndexDefinition,
    IndexName,
    parse_design,
)


class DefinitionsFile:
    """The definitions of all indexes, as they were last.

    While a partition is streamed again from its beginning, no catalog has its design documents. An
    indexer that starts then must not take their indexes for dropped: it would remove them, and
    build them again.

    Args:
        path: The file: a JSON object of design documents.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, known_designs: Collection[str]) -> dict[IndexName, IndexDefinition]:
        """The definitions that were saved last; none if the file is not there, or cannot be read:
        the catalogs mostly have all of them. Takes as long as to parse the design documents.

        Args:
            known_designs: The names of designs that are left out, as the catalogs have them.
        """
        try:
            designs = msgspec.json.decode(self._path.read_bytes(), type=dict[str, msgspec.Raw])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}
        definitions: dict[IndexName, IndexDefinition] = {}
        for name in designs.keys() - known_designs:
            # Another version may have other rules.
            with suppress(DefinitionError):
                for index, definition in parse_design(name, bytes(designs[name])).indexes.items():
                    definitions[IndexName(name, index)] = definition
        return definitions

    def save(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Writes the file.

        Raises:
            OSError: It cannot be written. Then there is none: an older one might name what the
                index files are not.
        """
        designs: dict[str, dict[str, dict[str, IndexDefinition]]] = {}
        for name, definition in definitions.items():
            indexes = designs.setdefault(name.design, {"indexes": {}})["indexes"]
            indexes[name.index] = definition
        try:
            # A crash may leave a part of it, which is no JSON, and so is not read.
            self._path.write_bytes(msgspec.json.encode(designs))
        except OSError:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            raise
