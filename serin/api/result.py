"""What the results of all stages have in common: whether the work was done, why, what it cost,
and its page."""

from __future__ import annotations

import webbrowser
from abc import abstractmethod
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from serin.errors import NotFound
from serin.pipeline.stage import StageResult
from serin.store.receipt import Receipt

_HEIGHT_PX = 600


class Result:
    """The result of a stage. `ran`: False when an earlier result was found. `why`: why it ran, or what was found.
    `receipt`: what the work cost; None when nothing was done."""

    path: Path
    ran: bool
    why: str
    receipt: Receipt | None

    def __init__(self, result: StageResult[Any]) -> None:
        self.path = Path(result.value.path)
        self.ran, self.why, self.receipt = result.ran, result.why, result.receipt

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def _facts(self) -> dict[str, object]: ...

    def _story(self) -> dict[str, object]:
        done: dict[str, object] = {"ran" if self.ran else "found": self.why}
        if self.receipt is not None:
            done["seconds"] = f"{self.receipt.seconds:.1f}"
            if self.receipt.advice:
                done["advice"] = self.receipt.advice
        return done

    def __repr__(self) -> str:
        facts = {**self._facts(), **self._story(), "path": self.path}
        width = max(map(len, facts))
        return "\n".join([self._title(), *(f"  {name:<{width}}  {value}" for name, value in facts.items())])

    def _repr_html_(self) -> str:
        return facts_table(self._title(), {**self._facts(), **self._story(), "path": self.path})


class Page:
    """A page on disk: HTML or Markdown. A notebook shows it; `open` shows it in a browser; `text` is its source."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise NotFound(kind="page", name=str(path), known=[])
        self.path = path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def open(self) -> None:
        """Shows the page in the default browser."""
        webbrowser.open(self.path.as_uri())

    def __str__(self) -> str:
        return f"page in {self.path}" if self._is_html else self.text

    def __repr__(self) -> str:
        return f"Page({str(self.path)!r})"

    def _repr_html_(self) -> str | None:
        """In a frame, so that its style does not touch the notebook; it has no script."""
        if not self._is_html:
            return None
        frame = f'style="width:100%;height:{_HEIGHT_PX}px;border:1px solid #ccc" sandbox=""'
        return f'<iframe {frame} srcdoc="{escape(self.text)}"></iframe>'

    def _repr_markdown_(self) -> str | None:
        return None if self._is_html else self.text

    @property
    def _is_html(self) -> bool:
        return self.path.suffix == ".html"


def facts_table(title: str, facts: Mapping[str, object]) -> str:
    """A title and a table of names and values, as HTML."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<div><strong>{escape(title)}</strong><table>{rows}</table></div>"
