"""Sphinx's settings: `sphinx-build -W -b html docs docs/_build/html`.

``-t no_tutorials`` leaves the tutorials out; with ``-t no_reference`` as well the package is not
imported, and a build takes seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "botorch_fed"
author = "The botorch_fed developers"
copyright = author
version = release = re.findall(
    r'__version__ = "(.*)"', (ROOT / "botorch_fed" / "version.py").read_text()
)[0]
LEFT_OUT = [part for part in ("reference", "tutorials") if tags.has(f"no_{part}")]  # noqa: F821
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "myst_nb",
]
exclude_patterns = ["_build"]
default_role = "py:obj"  # `BasisGP` in a docstring links where there is something to link

html_theme = "pydata_sphinx_theme"
html_title = f"botorch_fed {release}"
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {page: [] for page in ("index", "getting_started", "choose", "results")}
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
templates_path = ["_templates"]

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autosummary_generate = "reference" not in LEFT_OUT
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # BoTorch's own are in BoTorch's documentation
autodoc_default_options = {"members": True, "show-inheritance": True}

nb_execution_mode = "off"  # tutorials are shown as they were saved from a full run
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
suppress_warnings = ["ref.citation"]  # a paper may be cited by a module without a page

if LEFT_OUT:
    exclude_patterns += LEFT_OUT
    # Other pages link and list those that are left out.
    suppress_warnings += ["toc.excluded", "toc.not_readable", "toc.not_included", "ref.doc"]
if "reference" not in LEFT_OUT:
    shutil.rmtree(DOCS / "reference" / "generated", ignore_errors=True)  # names that are gone
if "tutorials" not in LEFT_OUT:
    for notebook in (DOCS / "tutorials").glob("*.ipynb"):
        notebook.unlink()
    for notebook in (ROOT / "tutorials").glob("*.ipynb"):  # Sphinx reads below docs/ only
        shutil.copy2(notebook, DOCS / "tutorials")


def mathml(self: Any, node: Any) -> None:
    """Formulas as MathML, which browsers draw by themselves: no script, font or network."""
    block = node.tagname == "math_block"
    text = node.astext().strip()
    if block and r"\\" in text and r"\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    try:
        formula = tex2mathml(text, as_block=block)
    except MathError as error:
        raise ExtensionError(f"{node.source}:{node.line}: {text}: {error}") from error
    self.body.append(f'<div class="formula">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
