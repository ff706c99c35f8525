"""What an operator does reaches the controller and its journal; what others try does not."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serin.formats.policy import Policy, write_policy
from serin.host.wiring import key_file
from serin.machine.audit import audit_file
from serin.monitoring.alerts.book import read_alerts
from serin.rollout.decide.plan import Plan
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import ModelStatus, history, model_status
from serin.spec.roles import Role
from serin.store.store import Store
from tests.fakes.rollout import FakeJudge
from tests.fakes.running_controller import running_controller
from tests.kit.waiting import until
from tests.unit.console.conftest import Visitor, visitor
from tests.unit.console.scenes import fire

MODEL = "flights"
ABORT = f"/models/{MODEL}/rollout/abort"


@contextmanager
def rollout(home: Path) -> Iterator[Path]:
    """Version 2 waits at its first step."""
    plan = Plan(drain_s=0.1, warmup_s=0.0, bake_s=0.0)
    with running_controller(home, MODEL, FakeJudge(step_s=3600.0, bake_s=0.0)):
        for version in (1, 2):
            home_rollouts(home).mailbox.ask(
                Command(kind="start", model=MODEL, version=version, by="ann", plan=plan)
            )
            _until(home, lambda state: state.live == 1 and state.rollout.phase in ("promoted", "shifting"))
        _until(home, lambda state: state.rollout.phase == "shifting")
        yield home


@pytest.fixture
def rolling(home: Path) -> Iterator[Path]:
    with rollout(home):
        yield home


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For tests in which nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch, rollout(tmp_path_factory.mktemp("waiting")) as home:
        patch.setenv("SERIN_HOME", str(home))
        yield home


def _until(home: Path, reached: Callable[[ModelStatus], bool]) -> None:
    until(
        lambda: (state := model_status(home, MODEL)) and reached(state),
        said=lambda: model_status(home, MODEL),
    )


def act(somebody: Visitor, kind: str, **more: str) -> int:
    path = f"/models/{MODEL}/rollout/{kind}"
    return somebody.post(path, {**somebody.form(path), **more}).status_code


def test_an_operator_pauses_resumes_and_aborts_and_the_journal_says_who(rolling: Path) -> None:
    operator = visitor(rolling).login("operator", "Ada L.")
    for kind, why in (("pause", "lunch"), ("resume", ""), ("abort", "looks <bad>")):
        assert act(operator, kind, why=why) == 303
    _until(rolling, lambda state: state.rollout.phase == "rolled_back")
    by = {decision.by for decision in history(rolling, MODEL) if decision.command}
    assert "Ada L. (console operator)" in by
    page = operator.get(f"/models/{MODEL}/rollout").text
    assert "looks &lt;bad&gt;" in page
    assert "Ada L. (console operator)" in page


def test_an_operator_promotes_and_rolls_back(rolling: Path) -> None:
    operator = visitor(rolling).login("operator")
    assert act(operator, "promote", why="the evidence is enough") == 303
    _until(rolling, lambda state: state.live == 2 and not state.rollout.running)
    shown = operator.get(f"/models/{MODEL}/rollout").text
    (note,) = re.findall(r'<p class="note" id="act-\d+">.*?: (.*?)</p>', shown)
    assert note == "promote by console operator: the evidence is enough"
    assert act(operator, "rollback", version="1", why="a complaint") == 303
    _until(rolling, lambda state: state.live == 1 and not state.rollout.running)


def test_an_operator_returns_to_an_edition_of_the_lookups_by_its_name(rolling: Path) -> None:
    operator = visitor(rolling).login("operator")
    assert act(operator, "promote", why="the evidence is enough") == 303
    _until(rolling, lambda state: state.live == 2 and not state.rollout.running)
    assert act(operator, "rollback", version="latest", why="a complaint") == 400
    assert act(operator, "rollback", version="1e2", why="a complaint") == 303
    _until(rolling, lambda state: (state.live, state.live_edition) == (1, 2) and not state.rollout.running)
    assert "version 1e2" in operator.get(f"/models/{MODEL}").text


def test_a_viewer_is_shown_no_buttons_and_refused(waiting: Path) -> None:
    viewer, operator = visitor(waiting).login("viewer"), visitor(waiting).login("operator")
    assert "rollout/abort" not in viewer.get(f"/models/{MODEL}/rollout").text
    assert viewer.get(ABORT).status_code == 403
    fields = operator.form(ABORT)
    token = viewer.get("/alerts").text.partition('name="csrf" value="')[2].partition('"')[0]
    assert viewer.post(ABORT, {**fields, "csrf": token}).status_code == 403
    _nothing_happened(waiting)


@pytest.mark.parametrize(
    ("change", "origin", "status"),
    [
        ({"csrf": ""}, "http://127.0.0.1:8090", 403),
        ({"csrf": "0" * 64}, "http://127.0.0.1:8090", 403),
        ({}, "http://evil.example", 403),
        ({}, "null", 403),
        ({"rollout": "another"}, "http://127.0.0.1:8090", 409),
    ],
)
def test_a_forged_abort_is_refused(waiting: Path, change: dict[str, str], origin: str, status: int) -> None:
    operator = visitor(waiting).login("operator")
    fields = operator.form(ABORT)
    assert operator.post(ABORT, {**fields, **change}, origin=origin).status_code == status
    _nothing_happened(waiting)


def test_a_token_of_another_session_is_refused(waiting: Path) -> None:
    stolen = visitor(waiting).login("operator").form(ABORT)
    assert visitor(waiting).login("operator").post(ABORT, stolen).status_code == 403
    assert visitor(waiting).post(ABORT, stolen).status_code == 401
    _nothing_happened(waiting)


@pytest.mark.parametrize("kind", ["promote", "abort", "rollback"])
@pytest.mark.parametrize(
    ("why", "problem"), [(" ", "needs a reason for the journal"), ("x" * 501, "at most 500 characters")]
)
def test_what_moves_traffic_at_once_needs_a_reason_that_is_kept_whole(
    waiting: Path, kind: str, why: str, problem: str
) -> None:
    operator = visitor(waiting).login("operator")
    path = f"/models/{MODEL}/rollout/{kind}"
    assert 'name="why" maxlength="500" autofocus required' in operator.get(path).text
    answer = operator.post(path, {**operator.form(path), "why": why})
    assert answer.status_code == 400
    assert problem in answer.text
    _nothing_happened(waiting)


def test_what_the_controller_refuses_is_shown_with_its_reason(waiting: Path) -> None:
    operator = visitor(waiting).login("operator")
    path = f"/models/{MODEL}/rollout/resume"
    answer = operator.post(path, operator.form(path))
    assert answer.status_code == 409
    assert "the controller refused" in answer.text


def with_key(home: Path, name: str, role: Role = "release") -> Visitor:
    _, key = key_file(home).create(name, role=role)
    somebody = visitor(home)
    somebody.client.headers["authorization"] = f"Bearer {key}"
    return somebody


@pytest.mark.parametrize("kind", ["approve", "promote"])
@pytest.mark.parametrize(
    ("seen", "status", "problem"),
    [
        ({}, 400, "needs the version that you have seen"),
        ({"version": "1"}, 409, "the rollout that runs is of version 2"),
        ({"rollout": "another"}, 409, "another rollout has started"),
    ],
)
def test_a_program_gives_traffic_only_to_the_version_that_it_has_seen(
    waiting: Path, kind: str, seen: dict[str, str], status: int, problem: str
) -> None:
    path = f"/models/{MODEL}/rollout/{kind}"
    answer = with_key(waiting, f"{kind}-{len(seen)}{status}{problem[:3]}").post(path, {"why": "x", **seen})
    assert answer.status_code == status
    assert problem in answer.json()["error"]
    _nothing_happened(waiting)


def test_what_another_began_between_the_page_and_the_command_is_not_promoted(
    waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller compares, so nothing can come between its look and its decision."""
    seen = replace(
        model_status(waiting, MODEL), rollout=replace(model_status(waiting, MODEL).rollout, id="old")
    )
    monkeypatch.setattr("serin.console.actions.status_of", lambda *_: seen)
    monkeypatch.setattr("serin.console.views.models.status_of", lambda *_: seen)
    operator = visitor(waiting).login("operator")
    path = f"/models/{MODEL}/rollout/promote"
    answer = operator.post(path, operator.form(path) | {"why": "x"})
    assert answer.status_code == 409
    assert "another rollout has begun since, of version 2" in answer.text
    _nothing_happened(waiting)


def test_where_the_policy_asks_for_approvals_nobody_gives_traffic_to_what_they_started(rolling: Path) -> None:
    write_policy(Store.open(), Policy(approval=True))
    same, other = visitor(rolling).login("operator", "ann"), visitor(rolling).login("operator", "Ada")
    path = f"/models/{MODEL}/rollout/promote"
    refused = same.post(path, same.form(path) | {"why": "mine"})
    assert refused.status_code == 403
    assert "ann has started this rollout: somebody else must promote it" in refused.text
    assert act(same, "approve") == 403
    _nothing_happened(rolling)
    assert act(other, "promote", why="agreed") == 303
    _until(rolling, lambda state: state.live == 2 and not state.rollout.running)
    refused = other.post(
        f"/models/{MODEL}/rollout/rollback",
        other.form(path.replace("promote", "rollback")) | {"why": "x", "version": "3"},
    )
    assert refused.status_code == 403
    assert "roll that version out, and let somebody approve it" in refused.text
    assert act(other, "rollback", version="1", why="it was live before") == 303


@pytest.mark.parametrize(
    "model", ["fli%0Aghts", "flights%0A2026-01-01 operator: retire", "Flights", "%1b[2J"]
)
def test_a_name_that_no_model_has_reaches_no_log(
    waiting: Path, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    operator = visitor(waiting).login("operator")
    before = audit_file(waiting).read_text() if audit_file(waiting).exists() else ""
    with caplog.at_level("INFO", "serin.console.actions"):
        for answer in (
            operator.get(f"/models/{model}/rollout/abort"),
            operator.post(f"/models/{model}/rollout/abort", {"why": "x"}),
        ):
            assert answer.status_code == 404
    assert caplog.messages == []
    assert (audit_file(waiting).read_text() if audit_file(waiting).exists() else "") == before


def test_what_somebody_writes_is_one_line_of_the_logs(
    waiting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operator = visitor(waiting).login("operator", "Ada")
    with caplog.at_level("INFO", "serin.console.actions"):
        operator.post("/alerts/x%0Ay%1b/silence", {"why": "x"})
        operator.post(ABORT, {"why": "a\r\nb", "version": "1\n2"})
    assert len(caplog.messages) == 2
    assert all(each.isprintable() for each in caplog.messages)
    lines = [json.loads(each) for each in audit_file(waiting).read_text().splitlines()[-2:]]
    assert all(value.isprintable() for line in lines for value in line.values() if isinstance(value, str))


def test_an_action_on_a_rollout_that_has_ended_is_refused(rolling: Path) -> None:
    operator = visitor(rolling).login("operator")
    fields = operator.form(ABORT) | {"why": "enough"}
    assert operator.post(ABORT, fields).status_code == 303
    _until(rolling, lambda state: not state.rollout.running)
    assert operator.post(ABORT, fields).status_code == 409
    assert operator.get(ABORT).status_code == 409
    assert operator.get(f"/models/{MODEL}/rollout/explode").status_code == 404


def test_an_operator_acknowledges_and_silences_an_alert_and_a_viewer_does_not(home: Path) -> None:
    fire(home)
    (alert,) = read_alerts(home).open
    operator, viewer = visitor(home).login("operator", "Ada"), visitor(home).login("viewer")
    paths = [f"/alerts/{alert.id}/{what}" for what in ("acknowledge", "silence")]
    fields = [operator.form(path) for path in paths]
    assert [viewer.post(path, each).status_code for path, each in zip(paths, fields, strict=True)] == [
        403,
        403,
    ]
    assert read_alerts(home).open[0].acknowledged is None
    for path, each in zip(paths, fields, strict=True):
        assert operator.post(path, {**each, "why": "on it", "hours": "8"}).status_code == 303
    found = read_alerts(home, lines=5)
    assert found.open[0].acknowledged_by == "Ada (console operator)"
    assert found.open[0].silenced_until is not None
    assert {line.by for line in found.journal if line.event in ("acknowledged", "silenced")} == {
        "Ada (console operator)"
    }
    page = viewer.get("/alerts").text
    assert "Acknowledged by Ada (console operator)" in page
    assert "Silenced until" in page


def _nothing_happened(home: Path) -> None:
    state = model_status(home, MODEL)
    assert state.rollout.phase == "shifting"
