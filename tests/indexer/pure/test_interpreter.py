"""What expressions may cost, and that the bound changes nothing else."""

from __future__ import annotations

from typing import Any, Final

import jmespath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.indexer.pure.hostile_expressions import DOCUMENT, HOSTILE
from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.expressions import (
    LENGTH_MAX,
    ExpressionError,
    Expressions,
    compile_expression,
)
from upr_server.indexer.pure.extractor import AVERAGE_WORK_MAX, EXCESS_WORK_MAX, Extractor
from upr_server.indexer.pure.interpreter import WORK_MAX, BoundedInterpreter, CostlyError


@pytest.mark.parametrize("text", HOSTILE)
def test_a_costly_expression_ends_early(text: str) -> None:
    """Each of these would take gigabytes, or hours."""
    with pytest.raises(CostlyError, match="cost more than 100,000 steps"):
        Expressions(text).values(b"k", DOCUMENT)


def _many(text: str, count: int) -> str:
    return "[" + ",".join([text] * count) + "]"


@pytest.mark.parametrize(
    ("text", "document"),
    [
        # To write a number as text takes the square of its length: 5,000 of them 1.3 s.
        ("to_string(n)", {"n": [10**4000] * 5000}),
        ("sort_by(n, &to_string(@))", {"n": [10**4000] * 5000}),
        # Equal strings are compared to their ends.
        (_many("a==s", 700), {"a": "x" * 100_000, "s": "x" * 99_999 + "y"}),
        ("to_string(@)", {"n": ["x" * 100] * WORK_MAX}),
        (_many("n[][]", 500), {"n": [1] * (WORK_MAX + 1)}),
        (_many("n[::2]", 500), {"n": [1] * 1000}),
        (_many("reverse(a)", 350), {"a": "x" * 100_000}),
        ("map(&map(&map(&[@, @], [@, @]), [@, @]), n)", {"n": [1] * 50_000}),
        ("*.*.*.*|[]|[*].[@, @][]", {"o": {str(n): {"q": {"r": 1}} for n in range(50_000)}}),
    ],
)
def test_what_is_in_a_document_counts(text: str, document: Any) -> None:
    with pytest.raises(CostlyError, match="cost more than 100,000 steps"):
        Expressions(text).values(b"k", document)


def test_the_bound_is_for_each_document_and_all_expressions_together() -> None:
    quarter = "n" + "|[@,@][]" * 11
    expressions = Expressions(quarter)
    for _ in range(5):
        assert len(expressions.values(b"k", DOCUMENT)[0]) == 3 << 11
    with pytest.raises(CostlyError):
        Expressions(*[quarter] * 5).values(b"k", DOCUMENT)


_NAMES: Final = st.sampled_from(("a", "s", "n", "o", "p", "q", "@", "`1`", "'x'"))


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(pair, st.sampled_from((".", " | ", " || ", " && ", " == ", " < "))).map(
            lambda drawn: drawn[1].join(
                f"({operand})" if drawn[1] != "." else operand for operand in drawn[0]
            )
        ),
        pair.map(lambda drawn: f"[{drawn[0]}, {drawn[1]}]"),
        pair.map(lambda drawn: f"{{a: {drawn[0]}, q: {drawn[1]}}}"),
        st.tuples(inner, st.sampled_from(("[*]", "[]", "[0]", "[1:]", ".*", "[?q]"))).map("".join),
        st.tuples(
            st.sampled_from(("length", "to_string", "sort", "reverse", "type", "values", "max")),
            inner,
        ).map(lambda drawn: f"{drawn[0]}({drawn[1]})"),
        pair.map(lambda drawn: f"join({drawn[0]}, {drawn[1]})"),
        pair.map(lambda drawn: f"contains({drawn[0]}, {drawn[1]})"),
        pair.map(lambda drawn: f"map(&{drawn[0]}, {drawn[1]})"),
    )


_DOCUMENTS: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(("", "x", "y")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("asnopq"), inner, max_size=3)
    ),
    max_leaves=10,
)


def outcome(evaluate: Any) -> Any:
    try:
        return evaluate()
    except Exception as error:  # noqa: BLE001
        return type(error)


@given(text=st.recursive(_NAMES, _larger, max_leaves=8), document=_DOCUMENTS)
def test_within_the_bound_every_result_is_that_of_the_library(text: str, document: Any) -> None:
    try:
        parsed = compile_expression(text)
    except ExpressionError:
        return
    interpreter = BoundedInterpreter(jmespath.Options())
    bounded = outcome(lambda: interpreter.visit(parsed, document))
    assert repr(bounded) == repr(outcome(lambda: jmespath.search(text, document)))
    assert interpreter.work_left < WORK_MAX


def test_a_long_expression_is_refused_before_it_is_compiled() -> None:
    compile_expression("a" * LENGTH_MAX)
    with pytest.raises(ExpressionError, match="900,000 characters; at most 4,096"):
        compile_expression("'" + "x" * 899_998 + "'")


def test_an_index_that_costs_too_much_is_left_out_and_a_rare_document_is_not() -> None:
    extractor = Extractor(IndexDefinition(("length(n[*].[@,@][])",)))
    large = {"n": list(range(WORK_MAX))}
    for _ in range(3):
        assert not extractor.entries(b"k", large)[0]
        for _ in range(WORK_MAX // AVERAGE_WORK_MAX + 1):
            assert extractor.entries(b"k", {"n": [1]})[0]
    assert (extractor.too_costly, extractor.failure) == (3, "")
    for _ in range(EXCESS_WORK_MAX // (WORK_MAX - AVERAGE_WORK_MAX)):
        assert not extractor.failure
        extractor.entries(b"k", large)
    assert not extractor.failure
    extractor.entries(b"k", large)
    assert "cost more than 100,000 steps" in extractor.failure
    assert not extractor.entries(b"k", {"n": [1]})[0]


def test_an_index_that_costs_too_much_on_average_is_left_out() -> None:
    """No document costs more than it may, and all together hold up the other indexes."""
    extractor = Extractor(IndexDefinition((_many("to_string(@)", 250),)))
    document = {"a": "x" * 1000, "n": list(range(100))}
    documents = 0
    while not extractor.failure:
        extractor.entries(b"k", document)
        documents += 1
    assert "more than 2,000 for most of them" in extractor.failure
    assert (extractor.too_costly, documents < 60) == (0, True)


def test_the_entries_of_an_array_do_not_leave_an_index_out() -> None:
    extractor = Extractor(IndexDefinition(("n",), each="n"))
    for _ in range(20):
        assert len(extractor.entries(b"k", {"n": list(range(1900))})[0]) == 1900
    assert extractor.failure == ""
