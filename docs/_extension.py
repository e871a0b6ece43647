"""Sphinx extension of this documentation: formulas as MathML, exact links, and two checks of the built pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)

#: An element by which the browser loads a file from another site; a plain link does not.
_LOADS = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^>]*>|<link\b[^>]*\bhref=\"(?:https?:)?//[^>]*>"
)


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return str(tex2mathml(node.astext(), as_block=as_block)).strip()
    except MathError as error:
        _LOGGER.warning("not a formula that docutils knows: %s", error, location=node)
        return ""


def _inline(translator: Any, node: nodes.Element) -> None:
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.Element) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(_mathml(node, as_block=True) + "</div>\n")
    raise nodes.SkipNode


def _link_exact_names(app: Sphinx, doctree: nodes.document) -> None:
    """Prevent a link from `shape` in a parameter's type to the only class with an attribute `shape`."""
    for reference in doctree.findall(addnodes.pending_xref):
        reference.attributes.pop("refspecific", None)


def findings(html: str) -> list[str]:
    """Return the elements that load from another site, and the tables that were not parsed.

    Examples
    --------
    >>> findings('<p>a | b</p><img src="x.svg">')
    []
    >>> findings('<img src="https://x.org/a.png"><p>| a | b |</p>')
    ['loads from another site: <img src="https://x.org/a.png">', 'is a table that was not parsed: <p>| a | b |']
    """
    found = [f"loads from another site: {element}" for element in _LOADS.findall(html)]
    return found + [
        f"is a table that was not parsed: {text}" for text in re.findall(r"<p>\|[^<\n]{0,60}", html)
    ]


def _check_pages(app: Sphinx, exception: Exception | None) -> None:
    """Warn of defects in the built pages; ``sphinx-build -W`` makes them errors."""
    if exception is None and app.builder.format == "html":
        for page in sorted(Path(app.outdir).rglob("*.html")):
            for finding in findings(page.read_text(encoding="utf-8")):
                _LOGGER.warning("%s: %s", page.name, finding)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    # Browsers render MathML natively: no script, no fonts, no dependency but docutils.
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("doctree-read", _link_exact_names)
    app.connect("build-finished", _check_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
