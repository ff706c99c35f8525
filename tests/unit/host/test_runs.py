"""What a host shows: runs of a server elsewhere, logs without secrets, and the console's place."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serin import cli
from serin.errors import NameInvalid, PortTaken
from serin.host import console
from serin.host.console import ConsoleSettings, choose_place, is_installed
from serin.host.logs import mask_secrets
from serin.machine import environment
from serin.machine.ports import Claims, free_ports
from serin.store.runs import name_model, run_folder
from tests.fakes.prefect import FAILED_RUN, Server, prefect_at_work
from tests.kit.commands import serin
from tests.kit.stacks import stack_in

RUN = {**FAILED_RUN, "state_type": "COMPLETED", "state_name": "Completed", "state": {"message": "well done"}}


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, and a stack in this home that is up and works with it. (The stack's process is this one.)"""
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_KEY", "key-of-the-caller")
    with prefect_at_work() as server:
        server.answers = {
            "POST /flows/filter": (200, [{"id": "f", "name": "pipeline"}]),
            "POST /flow_runs/filter": (200, [RUN]),
            "POST /logs/filter": (200, [{"timestamp": "2026-11-15T10:00:01.5", "message": "published"}]),
        }
        stack_in(tmp_path, prefect_api_url=server.url)
        yield server


def test_a_company_server_is_asked_for_the_runs_of_our_pools_as_the_caller(company: Server) -> None:
    (run,) = json.loads(serin("runs", "list", "--json"))
    assert (run["name"], run["kind"], run["state"]) == ("brave-owl", "pipeline", "completed")
    assert run["model"] == "flights"
    bodies = [body for call, body in company.asked if call == "POST /flow_runs/filter"]
    assert [body["work_pools"] for body in bodies] == [{"name": {"any_": ["cpu", "gpu"]}}]
    assert {headers.get("authorization") for headers in company.headers} == {"Bearer key-of-the-caller"}


def test_one_run_on_a_company_server_is_shown_with_its_log(company: Server) -> None:
    told = serin("runs", "show", "brave-owl")
    assert "well done" in told
    assert "published" in told


def test_a_training_carries_the_name_of_its_model(home: Path) -> None:
    for name, model in (("train-1", "churn"), ("train-0", None)):
        folder = run_folder(home, name)
        if model:
            name_model(folder, "other")
            name_model(folder, model)
    listed = json.loads(serin("runs", "list", "--json"))
    assert {run["name"]: run["model"] for run in listed} == {"train-1": "churn", "train-0": None}
    assert json.loads(serin("runs", "show", "train-1", "--json"))["model"] == "churn"


def test_a_run_that_a_schedule_has_started_is_of_no_model_called_auto_scheduled(company: Server) -> None:
    company.answers["POST /flow_runs/filter"] = (200, [{**RUN, "tags": ["serin", "auto-scheduled"]}])
    assert json.loads(serin("runs", "list", "--json"))[0]["model"] is None


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


def test_the_console_stays_where_it_was_unless_that_port_is_taken() -> None:
    (last,) = free_ports(1)
    with Claims() as claims:
        first = choose_place(ConsoleSettings(), claims, last=last)
        assert (first.port, first.url) == (last, f"http://127.0.0.1:{last}")
        assert choose_place(ConsoleSettings(), claims, last=last).port != last
        with pytest.raises(PortTaken, match="SERIN_CONSOLE"):
            choose_place(ConsoleSettings(port=last), claims, last=None)


def test_behind_an_ingress_people_are_given_its_address() -> None:
    with Claims() as claims:
        found = choose_place(ConsoleSettings(url="https://serin.example.com/"), claims, last=None)
    assert found.url == "https://serin.example.com"


def test_a_missing_package_means_that_there_is_no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    monkeypatch.setattr(console, "_NEEDED", ("starlette", "a_package_that_nobody_has"))
    assert not is_installed()


def test_the_command_shows_both_secrets_or_one_and_replaces_it(home: Path) -> None:
    def secret(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, ["console", "secret", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    both = json.loads(secret("--json"))
    assert set(both) == {"viewer", "operator"}
    assert both["viewer"] != both["operator"]
    assert secret("operator") == f"{both['operator']}\n"
    assert secret("operator", "--rotate") != f"{both['operator']}\n"
    assert secret("viewer") == f"{both['viewer']}\n"
    with pytest.raises(NameInvalid, match="one of viewer, operator"):
        CliRunner().invoke(cli.app, ["console", "secret", "admin"], catch_exceptions=False)
