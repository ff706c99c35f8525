"""MkDocs hooks: add the generated pages and the repository's root pages to the site, and check links to files."""

from __future__ import annotations

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import api_page
import command_page
import errors_page
import notebook_page
import spec_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger("mkdocs.hooks.serin")

GENERATED = {
    "reference/python.md": api_page.render,
    "reference/command.md": command_page.render,
    "reference/spec.md": spec_page.render,
    "reference/errors.md": errors_page.render,
    "tutorial/notebook.md": notebook_page.render,
}
# Pages of the repository's root that are also pages of the site.
COPIED = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "project/readme.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_MERMAID = re.compile(
    r"^```mermaid.*?^```\n", re.DOTALL | re.MULTILINE
)  # GitHub draws it; a page would fetch a script
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand `adr/*.md` in the navigation to every decision."""
    decisions = sorted(path.name for path in (ROOT / "docs/adr").glob("[0-9]*.md"))
    config.nav = _expand(config.nav, {"adr/*.md": [f"adr/{name}" for name in decisions]})
    return config


def _expand(nav: Any, globs: dict[str, list[str]]) -> Any:
    if isinstance(nav, list):
        return [
            item for entry in nav for item in (globs[entry] if entry in [*globs] else [_expand(entry, globs)])
        ]
    if isinstance(nav, dict):
        return {title: _expand(value, globs) for title, value in nav.items()}
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, render in GENERATED.items():
        files.append(File.generated(config, path, content=render()))
    for source, path in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=_MERMAID.sub("", text)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite links that leave docs/: to a page of the site where there is one, else to the file's path as text."""
    path = page.file.src_uri
    source = next((root for root, copy in COPIED.items() if copy == path), f"docs/{path}")

    def rewrite(match: re.Match[str]) -> str:
        return _rewritten(match, source=source, page=path)

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewrite, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewrite, markdown[end:])])


def _rewritten(match: re.Match[str], *, source: str, page: str) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    file = normpath(str(PurePosixPath(source).parent / target))
    if file.startswith("docs/"):
        inside = file.removeprefix("docs/")
    elif file in COPIED:
        inside = COPIED[file]
    elif (ROOT / file).exists():
        return f"`{file}`" if text.strip("`") == file else f"{text} (`{file}`)"
    else:
        LOG.warning("%s: the link to '%s' leads to no file of the repository", source, target)
        return match[0]
    return f"[{text}]({relpath(inside, str(PurePosixPath(page).parent))}{anchor})"
