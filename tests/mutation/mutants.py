"""Mutants of a module: its source with one expression or statement changed."""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Final

import attrs

UNTESTED: Final = frozenset({"__repr__", "check_invariants", "statistics", "recount"})
"""Functions that serve the tests or people, and decide nothing."""

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@attrs.frozen
class Mutant:
    """A changed module.

    Attributes:
        line: The number of the changed line.
        before: The expression or statement.
        after: What stands in its place.
        source: The whole module.
    """

    line: int
    before: str
    after: str
    source: str


def mutants_of(source: str, random: Random) -> list[Mutant]:
    """One mutant for each line that can be broken, by line; `random` chooses how."""
    by_line: dict[int, list[Mutant]] = defaultdict(list)
    for node, changed in _changes(ast.parse(source)):
        mutant = _mutant(source, node, ast.unparse(changed))
        by_line[mutant.line].append(mutant)
    return [random.choice(by_line[line]) for line in sorted(by_line)]


def _mutant(source: str, node: ast.expr | ast.stmt, after: str) -> Mutant:
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    start = sum(map(len, lines[:first])) + node.col_offset
    end = sum(map(len, lines[:last])) + node.end_col_offset
    encoded = source.encode()
    if isinstance(node, ast.expr):
        after = f"({after})"
    changed = encoded[:start] + after.encode() + encoded[end:]
    return Mutant(node.lineno, encoded[start:end].decode(), after, changed.decode())


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Nodes of a tree, each with one that can take its place."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name not in UNTESTED:
                for statement in node.body:
                    yield from _changes_of(statement)
        elif isinstance(node, ast.stmt):
            yield from _changes_of(node)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    if isinstance(node, ast.stmt):
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom) or _is_docstring(node):
            return
        yield from _changed_statements(node)
    elif isinstance(node, ast.expr):
        changed = _changed_expression(node)
        if changed is not None:
            yield node, changed
    if isinstance(node, ast.ClassDef):
        yield from _changes(node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _changes(ast.Module([node], []))
    else:
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "annotation", None):
                yield from _changes_of(child)


def _changed_statements(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    if _may_go(node):
        yield node, ast.Pass()
    if isinstance(node, ast.Return) and not _is_none(node.value):
        yield node, ast.Return(ast.Constant(None))
    if isinstance(node, ast.If | ast.While):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _may_go(node: ast.stmt) -> bool:
    """Whether a module without this statement still defines all its names."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise | ast.Continue)


def _changed_expression(node: ast.expr) -> ast.expr | None:
    changed = copy.copy(node)
    if isinstance(changed, ast.Compare) and len(changed.ops) == 1:
        changed.ops = [_COMPARISONS[type(changed.ops[0])]()]
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        return changed.operand
    elif isinstance(changed, ast.BinOp) and type(changed.op) in _OPERATORS:
        changed.op = _OPERATORS[type(changed.op)]()
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, bool):
        changed.value = not changed.value
    elif isinstance(changed, ast.Constant) and type(changed.value) is int:
        changed.value += 1
    elif isinstance(changed, ast.Name) and changed.id in ("min", "max"):
        changed.id = "max" if changed.id == "min" else "min"
    else:
        return None
    return changed
