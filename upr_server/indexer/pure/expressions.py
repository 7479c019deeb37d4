"""JMESPath over a document, and the document's key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import jmespath
from jmespath import exceptions, functions

from upr_protocol.errors import UprError
from upr_server.indexer.pure.interpreter import WORK_MAX, BoundedInterpreter, CostlyError
from upr_server.indexer.pure.paths import column_lookup, plain_lookup


class ExpressionError(UprError, ValueError):
    """A text is not a valid expression; the message says where it goes wrong."""


class _Functions(functions.Functions):  # type: ignore[misc]
    """JMESPath's functions, and `document_key()`. jmespath publishes no types."""

    key = b""

    @functions.signature()  # type: ignore[untyped-decorator]
    def _func_document_key(self) -> str:
        return self.key.decode(errors="surrogateescape")


class Expressions:
    """Expressions that are evaluated over the same documents. To be used by one thread at a time.

    Args:
        texts: The expressions.

    Attributes:
        columns: The look-ups, for many documents at once, of those that need no interpreter.
        are_plain: Whether these are all.

    Raises:
        ExpressionError: One of them is not valid.
    """

    def __init__(self, *texts: str) -> None:
        self._functions = _Functions()
        self._interpreter = BoundedInterpreter(jmespath.Options(custom_functions=self._functions))
        trees = [compile_expression(text) for text in texts]
        lookups = [plain_lookup(tree) for tree in trees]
        columns = map(column_lookup, trees)
        self.columns = [look_up for look_up in columns if look_up is not None]
        self.are_plain = len(self.columns) == len(texts)
        self._lookups = [
            lookup or partial(self._interpret, tree)
            for lookup, tree in zip(lookups, trees, strict=True)
        ]

    def _interpret(self, tree: Any, document: object) -> Any:
        try:
            return self._interpreter.visit(tree, document)
        except CostlyError:
            raise
        except Exception:  # noqa: BLE001
            # Not only JMESPathError: jmespath passes on what Python raises for a number in a
            # string, for strings compared with numbers, for infinity made an integer.
            return None

    def values(self, key: bytes, document: object) -> list[Any]:
        """The expressions' values for `document`; None where the document lacks what an expression
        asks for, or has it in a type that the expression cannot use. To walk through all of them
        costs no more than is left of `WORK_MAX`.

        Raises:
            CostlyError: They cost more than they may for one document.
        """
        self._functions.key = key
        self._interpreter.work_left = WORK_MAX
        values = [lookup(document) for lookup in self._lookups]
        self._interpreter.charge_values(values)
        return values

    @property
    def work(self) -> int:
        """What they have cost for the last document, in steps."""
        return WORK_MAX - self._interpreter.work_left

    def charge(self, work: int) -> None:
        """Counts what is about to be done with the last document's values; see `WORK_MAX`.

        Raises:
            CostlyError: It costs more than is left.
        """
        self._interpreter.charge(work)


def is_true(value: object) -> bool:
    """Whether JMESPath takes `value` for true: everything but false, null and empty values."""
    return bool(value) or (value == 0 and value is not False)


_COUNTS_FROM: Final = 1

LENGTH_MAX: Final = 4096
"""Characters of an expression: some 50 ms to compile."""

DEPTH_MAX: Final = 100
"""Expressions within expressions, as in `a || b || c`: each costs the interpreter's stack two calls
or three."""


def compile_expression(text: str) -> Any:
    """Compiles an expression. O(its length).

    Returns:
        Its tree, for an interpreter.

    Raises:
        ExpressionError: It is not valid, calls an unknown function, is too long or too deep; with
            the column.
    """
    if len(text) > LENGTH_MAX:
        raise ExpressionError(
            f"the expression has {len(text):,} characters; at most {LENGTH_MAX:,} are allowed"
        )
    try:
        compiled = jmespath.compile(text)
    except exceptions.EmptyExpressionError as error:
        raise ExpressionError("the expression is empty") from error
    except RecursionError as error:
        raise ExpressionError("the expression is too deep") from error
    except exceptions.ParseError as error:
        raise ExpressionError(
            f"column {error.lex_position + _COUNTS_FROM}: {_reason(error)}"
        ) from error
    for name, arguments in _calls(compiled.parsed, 0):
        function = _Functions.FUNCTION_TABLE.get(name)
        column = text.find(name) + _COUNTS_FROM
        if function is None:
            raise ExpressionError(f"column {column}: unknown function {name}()")
        signature = function["signature"]
        variadic = bool(signature) and bool(signature[-1].get("variadic"))
        if arguments < len(signature) or (arguments > len(signature) and not variadic):
            raise ExpressionError(
                f"column {column}: {name}() takes {len(signature)} arguments, not {arguments}"
            )
    return compiled.parsed


def _reason(error: exceptions.ParseError) -> str:
    if isinstance(error, exceptions.IncompleteExpressionError):
        return "the expression ends too early"
    if isinstance(error, exceptions.LexerError):
        hint = "; write a name with a - in double quotes" if error.token_value == "-" else ""
        return f"{error.message}{hint}"
    hint = "; write a number between backticks" if error.token_type.lower() == "number" else ""
    return f"unexpected {error.token_value!r}{hint}"


def _calls(node: dict[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    """The functions that are called below `node`, and with how many arguments."""
    if depth > DEPTH_MAX:
        raise ExpressionError(f"the expression is too deep: at most {DEPTH_MAX} within each other")
    if node["type"] == "function_expression":
        yield node["value"], len(node["children"])
    for child in node["children"]:
        if isinstance(child, dict):
            yield from _calls(child, depth + 1)
