"""Sphinx's settings: `sphinx-build -W -b html docs docs/_build/html`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "botorch_fed"
author = "The botorch_fed developers"
copyright = author
version = release = re.findall(
    r'__version__ = "(.*)"', (ROOT / "botorch_fed" / "version.py").read_text()
)[0]
extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Federated and private Bayesian optimisation on BoTorch",
    "page_width": "1200px",
    "body_max_width": "none",
}
html_static_path = ["_static"]
html_sidebars = {"**": ["about.html", "navigation.html", "relations.html", "searchbox.html"]}
html_copy_source = False
html_show_sourcelink = False
default_role = "py:obj"  # `BasisGP` in a docstring links where there is something to link
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # BoTorch's own are in BoTorch's documentation
autodoc_default_options = {"members": True, "show-inheritance": True}


def _plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read in the source; a page needs two things more.

    Indented tables keep their columns, and papers, which several docstrings cite under one name,
    are paragraphs.
    """
    new: list[str] = []
    last = ""  # the line of text before
    literal = False
    for line in _with_columns(lines):
        indented = line.startswith("    ")
        after_text = bool(last) and not last.startswith((" ", "..", "- ", "* ", "1."))
        if not literal and indented and new and not new[-1] and after_text:
            literal = not last.endswith("::")
            if literal:
                new += ["::", ""]
        elif line and not indented:
            literal = False
        if literal:
            line = re.sub(r"``(.*?)``", r"\1    ", line).rstrip()
        else:
            line = re.sub(r"^\.\. \[(\w+)\] ", r"[\1] ", line)
            if new and new[-1] and re.match(r"\[\w+\] ", line):
                new.append("")
            if new and re.match(r"   \S", line) and re.match(r"\[\w+\] ", last or " "):
                line = line.strip()
            line = re.sub(r"\[(\w+)\]_", r"[\1]", line)
        if line and not line.startswith(" "):
            last = line
        new.append(line)
    lines[:] = new


def _with_columns(lines: list[str]) -> list[str]:
    """Lines in which a paragraph that begins with a name and two spaces is an indented table."""
    new: list[str] = []
    columns = False
    for line in lines:
        if not line:
            columns = False
        elif re.match(r"\w+ {2,}\S", line) and not (new and new[-1]):
            columns = True
        new.append(f"    {line}" if columns else line)
    return new


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _plain, priority=100)
