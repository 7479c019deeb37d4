"""Checks a commit's first line; git's commit-msg hook calls it with the message's file.

The line is what a stranger reads in a year, in a list of hundreds: an imperative of at most 72
characters that says what changes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

SUBJECT_CHARACTERS_MAX: Final = 72
"""What `git log --oneline` shows on a line of 80 columns."""

WORDS_MIN: Final = 3
""""Types" says nothing; "Type the session's events" does."""

MADE_BY_GIT: Final = re.compile(r"Merge |Revert |fixup! |squash! ")
"""Beginnings that git writes itself."""

NOT_IMPERATIVE: Final = re.compile(
    r"(a|an|the|it|its|this|that|these|those|what|who|which|when|where|how|no|not|some|one|all"
    r"|\w{2,}ed|\w{3,}ing)",
    re.IGNORECASE,
)
"""First words of a sentence that tells instead of asking: "The flag is gone", "Added a flag"."""

IMPERATIVE: Final = {"bring", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
"""Imperatives that look like something else."""


def problems(subject: str) -> list[str]:
    """What is wrong with a first line; empty when it is fine."""
    if MADE_BY_GIT.match(subject):
        return []
    first = subject.partition(" ")[0]
    complaints = []
    if len(subject) > SUBJECT_CHARACTERS_MAX:
        complaints.append(f"it has {len(subject)} characters; at most {SUBJECT_CHARACTERS_MAX} fit")
    if len(subject.split()) < WORDS_MIN:
        complaints.append("it is too short to say what changes")
    if not first[:1].isupper():
        complaints.append("it does not begin with a capital letter")
    if NOT_IMPERATIVE.fullmatch(first) and first.lower() not in IMPERATIVE:
        complaints.append(
            f'begin with an imperative ("Add", "Reject", "Rename"), not with "{first}"'
        )
    if subject.endswith("."):
        complaints.append("it ends with a full stop")
    return complaints


def main(path: str) -> int:
    """Prints what is wrong with the message in a file; returns the exit code."""
    subject = Path(path).read_text(encoding="utf-8").partition("\n")[0]
    wrong = problems(subject)
    for sentence in wrong:
        print(f"commit message: {sentence}: {subject!r}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
