"""Progress is shown once: a bar on a terminal, else lines, and nothing where the program has its own handlers."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serin.api.progress import progress_lines, share_done, showing_progress
from serin.machine.log_times import log_at
from serin.training.launch.progress import describe

STEP = {"event": "step", "epoch": 1, "epochs": 2, "step": 1500, "steps": 6000, "loss": 0.5, "rows_per_s": 9e5}
LOG = logging.getLogger("serin.pipeline.train")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def alone() -> Iterator[None]:
    """The logger as in a program that has configured nothing. (pytest adds its handlers when a test is called.)"""
    logger = logging.getLogger("serin")
    pytests, logger.handlers, logger.propagate = logger.handlers, [], False
    yield
    logger.handlers, logger.propagate = pytests, True


def test_a_line_about_a_training_step_or_a_piece_says_how_much_is_done() -> None:
    assert share_done(describe(STEP) or "") == 0.25
    assert share_done("fitting: 3 of 12 pieces") == 0.25
    assert share_done("epoch 1/2 done: valid_auc 0.7312 (best so far)") is None


def test_lines_are_shown_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with alone():
        with showing_progress("training"):
            LOG.info("%s", describe(STEP))
        LOG.info("after the block")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("step 1,500/6,000, loss 0.5000, 900,000 rows/s")


def test_a_line_shows_its_own_time_and_not_that_of_its_arrival(capsys: pytest.CaptureFixture[str]) -> None:
    with alone(), showing_progress("training"):
        for later_s in (-10.0, 1000.0, 2000.0):
            log_at(LOG, "epoch done", time.time() + later_s)
    shown = [float(line.partition(" s  ")[0]) for line in capsys.readouterr().err.splitlines()]
    assert shown[0] == 0.0  # of a machine whose clock is behind
    assert shown[1] >= 1000.0
    assert shown[2] >= 2000.0


def test_a_terminal_shows_a_bar_and_keeps_the_lines_that_are_not_about_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with alone(), progress_lines(), showing_progress("training"), showing_progress("within"):
        LOG.info("training on the CPU: 1 process")
        LOG.info("%s", describe(STEP))
    assert shown.getvalue().count("s  training on the CPU: 1 process\n") == 1
    assert " 25%" in shown.getvalue()
    assert "s  epoch 1/2, step" not in shown.getvalue(), "it is the bar's"


def test_nothing_is_added_where_the_program_has_its_own_handlers(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serin")
    with showing_progress("training"):
        LOG.info("a line")
    assert [record.getMessage() for record in caplog.records] == ["a line"]
    assert capsys.readouterr().err == ""
