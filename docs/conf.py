"""The documents as a site: `make docs`. docs/adr/0016 says why Sphinx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Protocol

import upr_protocol.client

project: Final = "UPR"
author: Final = "The UPR maintainers"
project_copyright: Final = "The UPR maintainers"

extensions: Final = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
exclude_patterns: Final = ["_build", "protocol.in.md"]

# Documents are written for the repository's pages, too: plain Markdown, links between files.
myst_heading_anchors: Final = 4
myst_fence_as_directive: Final = ["mermaid"]
suppress_warnings: Final = ["myst.header"]

html_theme: Final = "furo"
html_title: Final = "UPR"
html_show_copyright: Final = False

autodoc_default_options: Final = {
    "members": True,
    "member-order": "groupwise",
    "show-inheritance": True,
}
autodoc_typehints: Final = "signature"
autodoc_typehints_format: Final = "short"
autodoc_member_order: Final = "groupwise"
napoleon_google_docstring: Final = True
napoleon_numpy_docstring: Final = False
# In this code, one backtick stands around code, as in Markdown.
default_role: Final = "code"

assert upr_protocol.client.__all__, "the reference lists what the package exports"

PAGES: Final = {"CHANGELOG": "changelog", "CONTRIBUTING": "contributing", "README": "index"}
"""Documents at the top of the repository, and their pages."""

TAKEN_FROM: Final = {page: f"{name}.md" for name, page in PAGES.items()}

LICENSE_URL: Final = "https://www.apache.org/licenses/LICENSE-2.0"

TOP_LEVEL: Final = re.compile(r"\]\((?:\.\./)?(CHANGELOG|CONTRIBUTING|README)\.md\b")
"""A link to a document at the top of the repository, which is a page of the site too."""


class Sphinx(Protocol):
    """What is used of `sphinx.application.Sphinx`; the checks run where Sphinx is not installed."""

    def connect(self, event: str, callback: object) -> int:
        """Has `callback` called at an event."""


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _make_pages_of_links)
    app.connect("autodoc-skip-member", _skip_tuple_fields)


def _make_pages_of_links(_app: Sphinx, name: str, source: list[str]) -> None:
    """Leads links to the repository's folders and top-level documents to their pages."""
    if name in TAKEN_FROM:
        path = Path(__file__).parents[1] / TAKEN_FROM[name]
        source[0] += "\n" + path.read_text(encoding="utf-8").replace("](docs/", "](")
    top = "../" * name.count("/")
    text = TOP_LEVEL.sub(lambda link: f"]({top}{PAGES[link[1]]}.md", source[0])
    for link, page in ("adr/", "adr/index.md"), ("LICENSE", LICENSE_URL):
        text = text.replace(f"]({link})", f"]({page})")
    source[0] = text


def _skip_tuple_fields(
    _app: Sphinx, _what: str, _name: str, member: object, skip: bool, _options: object
) -> bool:
    """Leaves out the fields of named tuples: the docstrings of the classes have them, and a field
    that is described twice is an error."""
    return skip or type(member).__name__ == "_tuplegetter"
