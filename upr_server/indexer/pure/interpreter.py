"""Evaluating JMESPath within a bound.

An expression of 200 bytes can ask for more than any machine has: `a | [@, @] | [@, @] | …` doubles
its result with each step, and `join` makes strings of it. So everything that an evaluation does is
charged before it is done, and a document that costs more than `WORK_MAX` ends it.
"""

from __future__ import annotations

from typing import Any, Final

from jmespath import visitor

from upr_protocol.errors import UprError

WORK_MAX: Final = 100_000
"""What all expressions of an index may cost for one document. A unit is a step of an evaluation, a
value that it copies, or `_CHARACTERS` of a string: some 0.5 µs, so that a document takes 50 ms at
most, and its strings 6 MB."""

_CHARACTERS: Final = 64

_LONG_BITS: Final = 512
"""Writing a number as text takes the square of its length: up to here, less than a step."""

_SHALLOW: Final = frozenset(
    ("length", "type", "not_null", "keys", "values", "to_array", "map", "merge")
)
"""Functions that look at no more than the first level of their arguments."""


def _scalar_work(value: object) -> int:
    """What it may take to copy, compare or write a value that holds no others. O(1)."""
    if isinstance(value, str):
        return len(value) // _CHARACTERS
    if isinstance(value, int):
        return (value.bit_length() // _LONG_BITS) ** 2
    return 0


class CostlyError(UprError):
    """The expressions cost more than they may for this document."""


class BoundedInterpreter(visitor.TreeInterpreter):  # type: ignore[misc]
    """JMESPath's interpreter, with a bound on what it does.

    Attributes:
        work_left: What it may still cost. Set it before a document.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.work_left = WORK_MAX

    def charge(self, work: int) -> None:
        """Counts what is about to be done.

        Raises:
            CostlyError: It would exceed the bound.
        """
        self.work_left -= work
        if self.work_left < 0:
            raise CostlyError(f"the expressions cost more than {WORK_MAX:,} steps for a document")

    def charge_value(self, value: object) -> None:
        """Counts a value that is about to be walked through: each place where it has another one,
        as often as it stands there. O(work left)."""
        work = 0
        values = [value]
        while values:
            value = values.pop()
            work += 1
            if isinstance(value, list):
                values += value
            elif isinstance(value, dict):
                values += value.values()
                work += sum(map(len, value)) // _CHARACTERS
            else:
                work += _scalar_work(value)
            if work + len(values) > self.work_left:
                break
        self.charge(work + len(values))

    def charge_values(self, values: list[Any]) -> None:
        """Counts `values` and everything in them; see `charge_value`. O(values) if they are neither
        arrays nor objects, as most keys are."""
        work = 1 + len(values)
        for value in values:
            if isinstance(value, list | dict):
                self.charge_value(values)
                return
            work += _scalar_work(value)
        self.charge(work)

    def visit(self, node: Any, *arguments: Any, **options: Any) -> Any:
        """Takes one step."""
        self.work_left -= 1
        if self.work_left < 0:
            self.charge(0)
        return super().visit(node, *arguments, **options)

    def visit_flatten(self, node: Any, value: Any) -> Any:
        """Makes one list of lists."""
        base = self.visit(node["children"][0], value)
        if not isinstance(base, list):
            return None
        # The elements first: a document may have millions, and even to look at them takes time.
        self.charge(len(base))
        self.charge(sum(len(element) for element in base if isinstance(element, list)))
        flat: list[Any] = []
        for element in base:
            if isinstance(element, list):
                flat += element
            else:
                flat.append(element)
        return flat

    def visit_slice(self, node: Any, value: Any) -> Any:
        """Copies a part of a list."""
        if isinstance(value, list):
            self.charge(len(value))
        return super().visit_slice(node, value)

    def visit_comparator(self, node: Any, value: Any) -> Any:
        """Compares two values, which may have the same part many times."""
        left, right = (self.visit(child, value) for child in node["children"])
        if type(left) is type(right):
            self.charge_value(left)
            self.charge_value(right)
        children = [{"type": "literal", "value": side, "children": []} for side in (left, right)]
        return super().visit_comparator({**node, "children": children}, value)

    def visit_function_expression(self, node: Any, value: Any) -> Any:
        """Calls a function, which may walk through its arguments and join their strings."""
        arguments = [self.visit(child, value) for child in node["children"]]
        for argument in arguments:
            if node["value"] not in _SHALLOW:
                self.charge_value(argument)
            elif isinstance(argument, list | dict):
                self.charge(len(argument))
        if node["value"] == "join":
            separator, strings = arguments
            if isinstance(separator, str) and isinstance(strings, list):
                self.charge(len(separator) * len(strings) // _CHARACTERS)
        return self._functions.call_function(node["value"], arguments)
