"""Sphinx settings. Build with `make docs`; a warning is an error."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "te_fsdp"
author = "The te_fsdp authors"
project_copyright = "The te_fsdp authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# TransformerEngine is imported lazily by te_fsdp, so the pages build without it.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "te_fsdp"
html_theme_options = {
    name: {"code-font-size": "80%"} for name in ("light_css_variables", "dark_css_variables")
}


def outside_as_files(app, docname, source):
    """Turn links to pages outside of docs/, which GitHub shows, into downloads; MyST would look for pages."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def pictures_inline(app, docname, source):
    """Insert SVG pictures into the page, so that their text can be selected and follows the theme."""
    picture = "```{raw} html\n:file: \\1\n```"
    source[0] = re.sub(r"^!\[[^\]]*\]\((pictures/\w+\.svg)\)$", picture, source[0], flags=re.MULTILINE)


def setup(app):
    """Connect the two functions above; called by Sphinx."""
    app.connect("source-read", outside_as_files)
    app.connect("source-read", pictures_inline)
