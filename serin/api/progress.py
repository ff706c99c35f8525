"""What Serin logs, shown while a stage works: a bar on a terminal or in a notebook, else lines.

A program that configures logging itself sees what Serin logs by its own handlers, and nothing is added: a display is
attached only where neither the logger `serin` nor the root logger has a handler. Progress is logged at INFO.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from html import escape
from typing import Any

_LOGGER = "serin"
_DONE = re.compile(r"\bstep (?P<done>[\d,]+)/(?P<all>[\d,]+)|: (?P<part>\d+) of (?P<parts>\d+) pieces$")


class _Lines:
    """Lines on stderr, each with the seconds since the first one could come."""

    def __init__(self) -> None:
        self._began = time.time()

    def show(self, text: str, share: float | None, created: float) -> None:  # noqa: ARG002 (the text says it)
        """A line and its own time; `share` of the work that is done, when the line is only about that."""
        sys.stderr.write(f"{_since(self._began, created)}  {text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        pass


class _Terminal(_Lines):
    """A spinner, a bar and the time at the bottom of a terminal. Lines about anything but the share go above it."""

    def __init__(self, title: str) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        super().__init__()
        latest = progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.BarColumn(bar_width=20),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            latest,
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # results are for another stream
        )
        self._task = self._progress.add_task(title, total=None)
        self._progress.start()

    def show(self, text: str, share: float | None, created: float) -> None:
        if share is None:
            line = f"{_since(self._began, created)}  {text}"
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._progress.update(self._task, description=text)
        else:
            self._progress.update(self._task, description=text, completed=share, total=1.0)

    def close(self) -> None:
        self._progress.stop()


class _Notebook(_Lines):
    """A bar with the latest line under a cell; when the work has ended, the time and the lines, folded."""

    def __init__(self, title: str) -> None:
        shown: Any = importlib.import_module("IPython.display")  # there, for this is a notebook
        self._html = shown.HTML
        super().__init__()
        self._title, self._lines = title, list[str]()
        self._handle = shown.display(self._page("", None), display_id=True)

    def show(self, text: str, share: float | None, created: float) -> None:
        if share is None:
            self._lines.append(f"{_since(self._began, created)}  {text}")
        self._handle.update(self._page(text, share))

    def close(self) -> None:
        lines = escape("\n".join(self._lines))
        title = f"{escape(self._title)}: {time.time() - self._began:.1f} s"
        self._handle.update(self._html(f"<details><summary>{title}</summary><pre>{lines}</pre></details>"))

    def _page(self, text: str, share: float | None) -> Any:
        value = "" if share is None else f'value="{share:.3f}"'
        seconds = time.time() - self._began
        return self._html(
            f"<div>{escape(self._title)} <progress max=1 {value}></progress> {seconds:.0f} s {escape(text)}</div>"
        )


class ProgressHandler(logging.Handler):
    """Passes what is logged to a display."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.display = _Lines()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.display.show(text, share_done(text), record.created)


def _since(began: float, created: float) -> str:
    """A line of another machine, whose clock may be behind, is not older than what it is about."""
    return f"{max(created - began, 0.0):6.1f} s"


def share_done(text: str) -> float | None:
    """How much of the work is done, by a line that counts steps or pieces; None for any other line."""
    found = _DONE.search(text)
    if found is None:
        return None
    done, total = (
        int((found[a] or found[b]).replace(",", "")) for a, b in (("done", "part"), ("all", "parts"))
    )
    return min(done / max(total, 1), 1.0)


def progress_lines() -> AbstractContextManager[None]:
    """Within the block, what Serin logs is shown as lines on stderr."""
    return _attached(ProgressHandler())


@contextmanager
def without_progress_lines() -> Iterator[None]:
    """Within the block, no lines of progress are shown: a process that runs for days logs with times instead."""
    logger = logging.getLogger(_LOGGER)
    hidden = [handler for handler in logger.handlers if isinstance(handler, ProgressHandler)]
    for handler in hidden:
        logger.removeHandler(handler)
    try:
        yield
    finally:
        for handler in hidden:
            logger.addHandler(handler)


@contextmanager
def showing_progress(title: str) -> Iterator[None]:
    """Within the block, what Serin logs is shown as suits the place; `title` says what the work is."""
    logger = logging.getLogger(_LOGGER)
    own = next((handler for handler in logger.handlers if isinstance(handler, ProgressHandler)), None)
    if own is None and logger.hasHandlers():
        yield
    elif own is None:
        handler = ProgressHandler()
        with _attached(handler), _live(handler, title):
            yield
    else:
        with _live(own, title):
            yield


@contextmanager
def _attached(handler: ProgressHandler) -> Iterator[None]:
    logger = logging.getLogger(_LOGGER)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def _live(handler: ProgressHandler, title: str) -> Iterator[None]:
    before = handler.display
    if type(before) is not _Lines:  # within a block that shows its progress already
        yield
        return
    if _in_notebook():
        handler.display = _Notebook(title)
    elif sys.stderr.isatty():
        handler.display = _Terminal(title)
    try:
        yield
    finally:
        shown, handler.display = handler.display, before
        shown.close()


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; IPython in a terminal is a terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"
