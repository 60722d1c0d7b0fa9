"""Markdown to a small folder of HTML pages that need nothing from elsewhere.

Uses ``markdown-it-py``, which comes with ``rich``; where it is missing the pages are not rendered and that is said.
"""

from __future__ import annotations

import os
import re
import shutil
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

MENU = (
    ("docs/index.md", "Start"),
    ("docs/getting-started.md", "Getting started"),
    ("docs/concepts.md", "Concepts"),
    ("docs/data.md", "Data"),
    ("docs/models.md", "Models"),
    ("docs/encoders.md", "Encoders"),
    ("docs/methods/index.md", "Methods"),
    ("docs/measures.md", "Measures"),
    ("docs/how-to/index.md", "How to"),
    ("docs/configuration.md", "Configuration"),
    ("docs/cli.md", "Command line"),
    ("docs/results.md", "Results"),
    ("docs/bench.md", "Bench"),
    ("docs/performance.md", "Performance"),
    ("docs/reproduce.md", "Reproduce"),
)
STYLE = """
body{margin:0;font:16px/1.6 system-ui,sans-serif;color:#1a2530;background:#fdfdfb}
main{max-width:58rem;margin:0 auto;padding:1rem 1.5rem 4rem}
nav{border-bottom:1px solid #dde;padding:.7rem 1.5rem;background:#fff;display:flex;flex-wrap:wrap}
nav a{margin-right:1.1rem;text-decoration:none;white-space:nowrap} nav a[aria-current]{font-weight:bold;color:#1a2530}
a{color:#0b5a7a} h1,h2,h3{line-height:1.25} h2{margin-top:2.2em}
table{border-collapse:collapse;display:block;overflow-x:auto;font-size:.9em}
th{text-align:left} th,td{border-bottom:1px solid #dde;padding:.3em .7em;vertical-align:top}
code{font:.88em ui-monospace,monospace;background:#eef1f3;padding:.1em .3em;border-radius:3px}
pre{background:#eef1f3;padding:.8em 1em;overflow-x:auto;border-radius:4px} pre code{padding:0}
img{max-width:100%;border:1px solid #dde}
@media(prefers-color-scheme:dark){body{background:#12181d;color:#dfe6ea}nav{background:#161d23;border-color:#2b353c}
a{color:#7cc4e4}nav a[aria-current]{color:#dfe6ea}code,pre{background:#1e272d}th,td{border-color:#2b353c}}
"""


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    text = re.sub(r"[`*]|\[|\]\([^)]*\)", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def sources(root: Path) -> dict[Path, str]:
    """Every page and its address in the site: docs/ at the top, the root's pages under project/."""
    docs = {page: page.relative_to(root / "docs").with_suffix(".html").as_posix() for page in root.glob("docs/**/*.md")}
    return docs | {page: f"project/{page.stem.lower()}.html" for page in root.glob("*.md")}


def render(root: Path, out: Path) -> str:
    """Write the site and say in a line what was done."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        return "site: not rendered, markdown-it-py is not installed"
    parser = MarkdownIt("commonmark").enable("table")
    addresses = sources(root)
    if out.exists():
        shutil.rmtree(out)
    for page, address in sorted(addresses.items()):
        tokens = parser.parse(page.read_text(encoding="utf-8"))
        _prepare(tokens, page, root, out, addresses)
        title = next((tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"), page.stem)
        body = parser.renderer.render(tokens, parser.options, {})
        target = out / address
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_page(title.replace("`", ""), body, page, root, address, addresses), encoding="utf-8")
    return f"site: {len(addresses)} pages in {out.name}/"


def _prepare(tokens: list[Any], page: Path, root: Path, out: Path, addresses: dict[Path, str]) -> None:
    """Give headings their anchors and point links at what the site holds."""
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", slug(tokens[number + 1].content))
        for child in token.children or []:
            for attribute in ("href", "src"):
                if child.attrGet(attribute):
                    child.attrSet(
                        attribute, _address(str(child.attrGet(attribute)), page, root, out, addresses[page], addresses)
                    )


def _address(link: str, page: Path, root: Path, out: Path, here: str, addresses: dict[Path, str]) -> str:
    if link.startswith(("#", "http://", "https://", "mailto:")):
        return link
    path, sign, anchor = link.partition("#")
    target = Path(os.path.normpath(page.parent / unquote(path)))
    if target in addresses:
        found = addresses[target]
    elif target.is_file():  # a picture, an example, raw results: taken along
        found = f"files/{target.relative_to(root).as_posix()}"
        (out / found).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, out / found)
    else:
        return link
    return Path(os.path.relpath(found, Path(here).parent)).as_posix() + sign + anchor


def _page(title: str, body: str, page: Path, root: Path, here: str, addresses: dict[Path, str]) -> str:
    links = []
    for source, name in MENU:
        target = root / source
        if target in addresses:
            href = Path(os.path.relpath(addresses[target], Path(here).parent)).as_posix()
            current = ' aria-current="page"' if target == page else ""
            links.append(f'<a href="{escape(href)}"{current}>{escape(name)}</a>')
    return (
        '<!doctype html>\n<html lang="en-GB">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} – fedbicross</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<nav>{''.join(links)}</nav>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
