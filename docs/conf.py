"""Sphinx's settings: ``make docs`` builds ``site/``.

The source folder is the repository, not ``docs/``, so that a link from a page to CONTRIBUTING.md, an example or a
stored result leads somewhere on the site as well as in the repository.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import fedbicross
from fedbicross.bench import publish, suite

project = "fedbicross"
author = "The fedbicross authors"
release = fedbicross.__version__
language = "en"

root_doc = "docs/index"
include_patterns = ["docs/**.md", "C*.md", "SECURITY.md", "configs/README.md", "results/README.md"]
exclude_patterns = [".venv", "data", "runs", "site"]  # large folders that need not be searched for pages
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
smartquotes_action = "qe"  # not dashes: `--set` stays what one types
myst_heading_anchors = 4  # GitHub's own

autodoc_member_order = "bysource"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}  # else it is written out in five lines
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"fedbicross {release}"
html_extra_path = ["_site"]  # the way from the top to docs/index.html
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False
html_copy_source = False
html_math_renderer = "mathml"


def mathml(translator: nodes.NodeVisitor, node: nodes.math | nodes.math_block) -> None:
    """Mathematics as MathML, which browsers know: MathJax would be fetched from another machine."""
    block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def table_of_cells(app: Sphinx, problem: Exception | None) -> None:
    """The page of all benched cells, and the cells that it links to."""
    out, cells = Path(app.outdir), Path(app.srcdir) / "results" / "bench" / "cells"
    if problem is None and cells.is_dir():
        shutil.copytree(cells, out / "results" / "bench" / "cells", dirs_exist_ok=True)
        to = out / "docs" / "table.html"
        names = [name for name in suite.builtin() if name != "smoke"]
        publish.write(to, publish.render(names, "html", out / "results" / "bench", to), "html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", table_of_cells)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
