"""What must not stand in a log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from serin.machine import environment
from serin.stack.host.logs import mask_secrets

PASSWORD = "xK3-very_secret"


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a handler of the root logger writes, in a process whose environment holds secrets."""
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", f"serin:{PASSWORD}")
    monkeypatch.setenv("SERIN_SEARCH_STORAGE", "postgresql://optuna:hunter-22@db/optuna")
    monkeypatch.setenv("SHORT_TOKEN", "no")
    before, written = logging.getLogRecordFactory(), io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger().addHandler(handler)
    mask_secrets()
    yield written
    logging.getLogger().removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_a_secret_in_a_line_or_its_arguments_is_masked(stream: io.StringIO) -> None:
    logging.getLogger("some.library").warning("login serin:%s to %s", PASSWORD, {"password": PASSWORD})
    assert stream.getvalue() == "login ******** to {'password': '********'}\n"


def test_a_secret_in_a_traceback_is_masked(stream: io.StringIO) -> None:
    try:
        raise ConnectionError("postgresql://optuna:hunter-22@db/optuna does not answer")
    except ConnectionError:
        logging.getLogger("some.library").exception("no storage")
    assert "postgresql://optuna:********@db/optuna does not answer" in stream.getvalue()
    assert "hunter-22" not in stream.getvalue()


def test_a_line_without_a_secret_is_left_alone(stream: io.StringIO) -> None:
    logging.getLogger("some.library").warning("no %s in %d lines", "error", 7)
    assert stream.getvalue() == "no error in 7 lines\n"


def test_masking_twice_wraps_once(stream: io.StringIO) -> None:
    before = logging.getLogRecordFactory()
    mask_secrets()
    assert logging.getLogRecordFactory() is before


def test_what_is_too_short_to_be_a_secret_is_none(stream: io.StringIO) -> None:
    assert "no" not in environment.secrets()
