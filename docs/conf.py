"""Configuration of the Sphinx build; the tables that restate code are written before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _generate

import lowprec

_generate.write()

project = "lowprec"
author = "lowprec contributors"
project_copyright = author
version = release = lowprec.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_copybutton",
    "_extension",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_generated"]
nitpicky = False

# What parts of lowprec are for; the pages are built without them.
autodoc_mock_imports = ["dask", "torch"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
# One parameter a line where a signature is longer.
maximum_signature_line_length = 80
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_rtype = False

# Commands are copied without their prompt, and without their output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["lowprec.css"]
html_title = f"lowprec {version}"
