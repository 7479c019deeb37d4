"""Plain expressions have the values that JMESPath gives them."""

from __future__ import annotations

from typing import Any, Final

import jmespath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.indexer.pure.expressions import compile_expression
from upr_server.indexer.pure.paths import column_lookup, plain_lookup

_NAMES: Final = st.sampled_from(("a", "b", '"a b"'))
_STEPS: Final = st.one_of(_NAMES.map(".{}".format), st.integers(-3, 3).map("[{}]".format))
_PATHS: Final = st.tuples(
    st.one_of(_NAMES, st.just("@"), st.integers(-2, 2).map("[{}]".format)),
    st.lists(_STEPS, max_size=4),
).map(lambda drawn: drawn[0] + "".join(drawn[1]))
_LITERALS: Final = st.sampled_from(("'x'", "''", '`"x"`', "`1`", "`0`", "`true`", "`null`", "`[]`"))
_TESTS: Final = st.tuples(
    st.tuples(_PATHS, _LITERALS), st.sampled_from((" == ", " != ", " < ")), st.booleans()
).map(lambda drawn: drawn[1].join(drawn[0][:: -1 if drawn[2] else 1]))
_DOCUMENTS: Final = st.recursive(
    st.sampled_from((None, True, False, 0, 1, 1.0, "x", "", "a")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(("a", "b", "a b")), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.one_of(_PATHS, _TESTS), _DOCUMENTS)
def test_a_plain_expression_has_the_value_that_jmespath_gives(text: str, document: Any) -> None:
    lookup = plain_lookup(compile_expression(text))
    if lookup is None:
        return
    expected = jmespath.search(text, document)
    actual = lookup(document)
    assert (actual, type(actual)) == (expected, type(expected))
    look_up = column_lookup(compile_expression(text))
    assert look_up is not None
    values = look_up([document, None, document])
    none_value = lookup(None)
    assert list(map(repr, values)) == list(map(repr, [expected, none_value, expected]))


@pytest.mark.parametrize("text", ["a", "a.b", "a[0].b[-1]", "[1]", "@", "a.b == 'x'", "'x' != a"])
def test_common_expressions_are_plain(text: str) -> None:
    assert plain_lookup(compile_expression(text)) is not None


@pytest.mark.parametrize("text", ["a[*]", "a == `1`", "a == b", "a < 'x'", "length(a)", "a || b"])
def test_other_expressions_need_the_interpreter(text: str) -> None:
    assert plain_lookup(compile_expression(text)) is None
    assert column_lookup(compile_expression(text)) is None
