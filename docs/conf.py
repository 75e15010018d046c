"""Sphinx builds the documentation from Markdown; ``make docs`` treats every warning as an error."""

import cadenza

project = "Cadenza"
author = copyright = "The Cadenza authors"
version = release = cadenza.__version__

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

html_theme = "alabaster"
html_theme_options = {
    "description": "Train and ship your own agentic coding model",
    "fixed_sidebar": True,
    # A command of 100 characters, and a row of the tables of keys, fit beside the sidebar.
    "page_width": "1240px",
    "body_max_width": "1000px",
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_sourcelink = False
