"""Renders the tutorial notebook as a page: its text, and its cells as code."""

from __future__ import annotations

import json
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/notebook/tutorial.ipynb"
_NOTE = (
    "This page is the notebook `examples/notebook/tutorial.ipynb`, without its outputs. Open it with\n"
    "`jupyter lab` or an editor to run it; the [Python API](../reference/python.md) describes each call.\n"
)


def render() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    title, *rest = [_page_of(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join([title, _NOTE, *rest]) + "\n"


def _page_of(kind: str, source: str) -> str:
    return source if kind == "markdown" else f"```python\n{source}\n```"
