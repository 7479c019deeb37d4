"""What expressions may cost, and that the bound changes nothing else."""

from __future__ import annotations

from typing import Any, Final

import jmespath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.pure.definition import IndexDefinition
from upr_server.indexer.pure.expressions import LENGTH_MAX, ExpressionError, Expressions, check
from upr_server.indexer.pure.extractor import COSTLY_MAX, COSTLY_SHARE, Extractor
from upr_server.indexer.pure.interpreter import WORK_MAX, BoundedInterpreter, CostlyError

DOCUMENT: Final = {"a": "x" * 1000, "s": "x", "n": [3, 1, 2], "o": {"p": [{"q": 1}, {"q": "y"}]}}

HOSTILE: Final = (
    "s" + "|join('',[@,@])" * 31,
    "s" + "|[@,@]" * 22,
    "n" + "|[@,@][]" * 40,
    "n" + "|[@,@,@,@,@,@,@,@,@,@][]" * 12,
    "to_string(n" + "|[@,@]" * 30 + ")",
    "(n" + "|[@,@]" * 30 + ") == (n" + "|[@,@]" * 30 + ")",
    "contains(n" + "|[@,@]" * 30 + ", `1`)",
    "n" + "|[@,@,@,@,@,@,@,@][]" * 5 + "|" + "map(&length(@), [@,@])[]",
    "o" + "|{a: @, b: @}" * 40,
    "join(a, n[*]" + "|[@,@,@,@,@,@,@,@][]" * 4 + "|[*].to_string(@))",
    "a" + "|join(@,['','',''])" * 20,
    "n" + "|[@,@,@,@,@,@,@,@,@][]" * 3 + "|[[@],[@],[@]][]" * 3 + "[*].[@[:],@[:]]" * 6,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_costly_expression_ends_early(text: str) -> None:
    """Each of these would take gigabytes, or hours."""
    with pytest.raises(CostlyError, match="cost more than 100,000 steps"):
        Expressions(text).values(b"k", DOCUMENT)


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
        parsed = check(text)
    except ExpressionError:
        return
    interpreter = BoundedInterpreter(jmespath.Options())
    bounded = outcome(lambda: interpreter.visit(parsed, document))
    assert repr(bounded) == repr(outcome(lambda: jmespath.search(text, document)))
    assert interpreter.work_left < WORK_MAX


def test_a_long_expression_is_refused_before_it_is_compiled() -> None:
    check("a" * LENGTH_MAX)
    with pytest.raises(ExpressionError, match="900,000 characters; at most 4,096"):
        check("'" + "x" * 899_998 + "'")


def test_an_index_that_costs_too_much_is_left_out_and_a_rare_document_is_not() -> None:
    extractor = Extractor(IndexDefinition(("length(n[*].[@,@][])",)))
    large = {"n": list(range(WORK_MAX))}
    for _ in range(3):
        assert not extractor.entries(b"k", large)[0]
        for _ in range(COSTLY_SHARE):
            assert extractor.entries(b"k", {"n": [1]})[0]
    assert (extractor.too_costly, extractor.failure) == (3, "")
    for _ in range(COSTLY_MAX):
        assert not extractor.failure
        extractor.entries(b"k", large)
    assert not extractor.failure
    extractor.entries(b"k", large)
    assert "cost more than 100,000 steps" in extractor.failure
    assert not extractor.entries(b"k", {"n": [1]})[0]
