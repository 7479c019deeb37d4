"""The package rich, for processes that are to have none. See `tests/kit/process.py`."""

raise ImportError("import-linter brings this package, and users do not have it")
