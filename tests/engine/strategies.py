"""What Hypothesis' tests of the engine draw from."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from upr_protocol.chunk import CounterDelta, Mutation
from upr_protocol.ids import Cas, Operation, SeqNo

# Few keys, so that they meet; enough for some to stay alone in old arrays.
KEYS: Final = [b"key %d" % index for index in range(40)]
SOME_KEYS: Final = st.sampled_from(KEYS)
NUMERIC: Final = [str(value).encode() for value in (0, 7, (1 << 64) - 1, 1 << 64)]
VALUES: Final = st.one_of(
    st.just(b""), st.sampled_from(NUMERIC), st.binary(max_size=12), st.just(bytes(300))
)
SIZES: Final = st.sampled_from([1, 1, 2, 5, 17, 63, 64, 65, 200])
EXPIRIES: Final = st.sampled_from([0, 0, 0, 1, 90, 105, 120])
COUNTS: Final = [Operation.INCREMENT, Operation.DECREMENT]
DELTAS: Final = st.builds(
    CounterDelta,
    st.sampled_from([0, 1, 5, (1 << 64) - 1]),
    st.sampled_from([0, 10]),
    st.booleans(),
)


@st.composite
def requests(draw: st.DrawFn, keys: st.SearchStrategy[bytes] = SOME_KEYS) -> Mutation:
    """Any operation of a publisher."""
    op = draw(st.sampled_from([op for op in Operation if op is not Operation.EXPIRE]))
    value = draw(DELTAS).encode() if op in COUNTS else draw(VALUES)
    cas = Cas(draw(st.sampled_from([0, 0, 0, 1, 12345])))
    flags, expiry = draw(st.integers(0, 3)), draw(EXPIRIES)
    return Mutation(op, draw(keys), value, SeqNo(0), cas, flags, expiry)
