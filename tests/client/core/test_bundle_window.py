"""The window of bundles, against a list of all that was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.client.core.bundle_window import BUNDLE_S, BUNDLES_MAX, BundleWindow

STEPS = st.lists(
    st.one_of(
        # Eighths of a millisecond are exact.
        st.tuples(st.just("wait"), st.integers(0, 200).map(lambda eighths: eighths / 8000)),
        st.tuples(st.just("send"), st.none()),
        st.tuples(st.just("answer"), st.integers(0, 2 * BUNDLES_MAX)),
    ),
    max_size=80,
)


@given(STEPS)
def test_a_window_counts_what_has_no_answer_and_is_not_old(
    steps: list[tuple[str, float | int | None]],
) -> None:
    window, now = BundleWindow(), 0.0
    unanswered: list[tuple[int, float]] = []
    for number, (step, value) in enumerate(steps):
        if step == "wait":
            assert isinstance(value, float)
            now += value
        elif step == "answer" and unanswered:
            answered = unanswered.pop(int(value or 0) % len(unanswered))
            window.note_answered(answered[0])
        elif step == "send" and window.opens_at(now) <= now:
            window.note_sent(number, now)
            unanswered.append((number, now))
        ends = sorted(sent + BUNDLE_S for _, sent in unanswered if sent + BUNDLE_S > now)
        expected = ends[0] if len(ends) >= BUNDLES_MAX else now
        assert window.opens_at(now) == expected
        assert len(ends) <= BUNDLES_MAX
