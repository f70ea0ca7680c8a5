"""How Sphinx builds the pages. `make docs` treats every warning as an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import fedshard

project = "fedshard"
author = "The fedshard authors"
copyright = author
release = version = fedshard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "recipe_reference"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3  # so that links to headings are checked
autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_title = "fedshard"
exclude_patterns = ["_build"]
