"""The table of acts and roles at the console of a real server, with logins at a real OpenID Connect provider and keys:
each cell is tried, and so is what people do who want more than their cell."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import oidc_provider_mock
import pytest

from serin.console.actions import ACTIONS, ON_ALERTS
from serin.console.app import VIEWS
from serin.console.state import act_of
from serin.errors import KeyRefused
from serin.host.console import ConsoleSettings, OidcSettings, account_secret
from serin.host.wiring import key_file
from serin.machine.audit import audit_file
from serin.machine.leases import lease
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Answer, Command, Inbox, Kind
from serin.spec.roles import ACTS, ROLES, Grant, Role
from serin.store.artifacts import Release
from serin.store.home_objects import HomeObjects
from serin.store.store import Store
from tests.fakes.experiments import leave_training
from tests.fakes.gpus import pretend_gpus
from tests.fakes.live_quality import spec
from tests.fakes.prefect import FAILED_RUN, Server, prefect_at_work
from tests.fakes.rollout import go_live
from tests.kit.acts import MODELS, NEAR, OTHER, OWN, PATTERN, SHOWN
from tests.kit.threads import beside
from tests.unit.console.conftest import served
from tests.unit.serving import bundles

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the provider

PEOPLE: dict[str, Any] = {
    **{role: [f"fraud-{role}"] for role in ROLES},
    "text": "fraud-release",
    "nobody": ["others"],
    "case": ["Fraud-Release"],
    "number": 7,
    "two": ["fraud-view", "payments-release"],
    "all": ["all-view"],
}
CAPTURE = "{capture: {share: 1}}"
GROUPS = {
    **{f"fraud-{role}": (Grant(models=PATTERN, role=role),) for role in ROLES},
    "payments-release": (Grant(models=OTHER, role="release"),),
    "all-view": (Grant(models="*", role="view"),),
}
NEEDS = {"start": {"version": "2"}} | {kind: {"version": "1"} for kind in ("rollback", "approve", "promote")}


class Scene:
    """A console whose controller takes every command and notes it."""

    def __init__(self, home: Path, issuer: str) -> None:
        self.home, self.issuer = home, issuer
        self._secret = home / "client-secret"
        self._secret.write_text("known to both\n")
        self.commands: list[Command] = []
        self._inbox = Inbox(HomeObjects(home))
        self.url = ""
        self.said = ""  # by the page at the end of the last login
        self.viewer: httpx.Client
        self.prefect: Server
        self._browsers = ExitStack()
        self.settings = self.with_groups(GROUPS)

    def with_groups(self, groups: Mapping[str, tuple[Grant, ...]]) -> ConsoleSettings:
        oidc = OidcSettings(
            issuer=self.issuer, client_id="serin", client_secret_file=self._secret, groups=groups
        )
        return ConsoleSettings(url=self.url or None, oidc=oidc)

    def answer(self) -> None:
        for command in self._inbox.pending():
            self.commands.append(command)
            self._inbox.answer(Answer(id=command.name, accepted=True, reason="taken", rollout="r2"))

    def browser(self, **headers: str) -> httpx.Client:
        """Closed at the end of the scene."""
        return self._browsers.enter_context(httpx.Client(base_url=self.url, headers=headers))

    def close(self) -> None:
        self._browsers.close()

    def person(self, name: str) -> httpx.Client:
        browser = self.browser(origin=self.url)
        away = browser.get("/login/oidc").headers["location"]
        back = httpx.post(away, data={"sub": name}).headers["location"]
        place = urlsplit(back)
        self.said = browser.get(f"{place.path}?{place.query}").text
        return browser

    def key(self, name: str, role: Role | None, *models: str) -> httpx.Client:
        _, key = key_file(self.home).create(name, models=models or None, role=role)
        return self.browser(authorization=f"Bearer {key}")

    def lines(self) -> list[dict[str, str]]:
        file = audit_file(self.home)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with oidc_provider_mock.run_server_in_thread() as server:
        address = f"http://localhost:{server.server_port}"
        for name, groups in PEOPLE.items():
            claims = {"email": f"{name}@example.com", "groups": groups}
            httpx.put(f"{address}/users/{name}", json=claims).raise_for_status()
        lines = {"email": "ada\n2026-11-19 bob", "groups": ["fraud-view"]}
        httpx.put(f"{address}/users/lines", json=lines).raise_for_status()
        httpx.put(f"{address}/users/missing", json={"email": "missing@example.com"}).raise_for_status()
        yield address


@pytest.fixture(scope="module")
def scene(issuer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Three models with two versions, a rollout that runs, an alert, a training and a GPU each; an alert of the stack,
    and a Prefect server with runs of two of them."""
    home = tmp_path_factory.mktemp("roles") / "home"
    with pytest.MonkeyPatch.context() as patch, prefect_at_work() as prefect, ExitStack() as leases:
        patch.setenv("SERIN_HOME", str(home))
        patch.setenv("PREFECT_API_URL", prefect.url)
        pretend_gpus(
            tmp_path_factory.mktemp("gpus"), patch, [f"GPU-{number}" for number, _ in enumerate(MODELS)]
        )
        for model in MODELS:
            leases.enter_context(lease(1, home=home, purpose=f"training of {model}"))
        prefect.answers = {
            "GET /health": (200, True),
            "POST /flows/filter": (200, [{"id": "f", "name": "pipeline"}]),
            "POST /flow_runs/filter": (200, [flow_run("other-owl", OTHER), flow_run("own-owl", OWN)]),
            "POST /logs/filter": (
                200,
                [{"timestamp": "2026-11-15T10:00:00", "message": "a line of its log"}],
            ),
        }
        store = Store(str(home / "store"))
        for model in MODELS:
            for bias in (0.0, 0.1):
                bundles.publish(store, bias=bias, model=model, spec=spec(CAPTURE))
            go_live(home, Release(model=model, version=1), 1_790_000_000.0, phase=Phase.SHADOWING)
            leave_training(home, model=model)
        for model in (*MODELS, ""):
            fire(home, model)
        made = Scene(home, issuer)
        made.prefect = prefect
        yield from running(made)


def flow_run(name: str, *tags: str) -> dict[str, Any]:
    return {**FAILED_RUN, "name": name, "tags": ["serin", *tags]}


def running(scene: Scene) -> Iterator[Scene]:
    stop = threading.Event()

    def obey() -> None:
        while not stop.wait(0.01):
            scene.answer()

    with beside(obey, stop=stop), served(scene.home, lambda: scene.settings) as url:
        scene.url = url
        scene.settings = scene.with_groups(GROUPS)
        scene.viewer = scene.person("view")
        try:
            yield scene
        finally:
            scene.close()


def fire(home: Path, model: str) -> None:
    about = {"kind": "capture", "severity": "ticket", "title": f"trouble of {model or 'all'}", "text": "x"}
    AlertBook(home).fire(Alert(key=f"{model or 'stack'}/disk", model=model, since=1.0, **about), 2.0)


def alert_of(scene: Scene, model: str) -> str:
    found = read_alerts(scene.home).open
    return next(each.id for each in found if each.alert.model == model)


def path_of(scene: Scene, act: str, model: str) -> str:
    what = next((name for name, named in ON_ALERTS.items() if named == act), None)
    if what is not None:
        return f"/alerts/{alert_of(scene, model)}/{what}"
    return f"/models/{model}/rollout/{act.rpartition(' ')[2]}"


def form_of(page: str) -> dict[str, str]:
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.rpartition("<form")[2]))


def attempt(scene: Scene, client: httpx.Client, act: str, model: str) -> int:
    """Does what a browser does, else what a program does: the status of the act itself. A form that is not shown is
    forged with the token of another page."""
    path = path_of(scene, act, model)
    fields = {"why": "a reason", **NEEDS.get(act.rpartition(" ")[2], {})}
    if "authorization" not in client.headers:
        shown = client.get(path)
        token = form_of(client.get("/alerts").text)  # that of the button to log out
        fields |= form_of(shown.text) if shown.status_code == 200 else {**token, "rollout": "r1"}
    return client.post(path, data=fields).status_code


CONSOLE_ACTS = [*map(act_of, ACTIONS), *ON_ALERTS.values()]


def test_every_act_of_the_console_and_every_command_to_the_controller_has_a_role() -> None:
    assert set(ACTIONS) == set(Kind.__args__)  # type: ignore[attr-defined]
    assert {act: ACTS[act] for act in CONSOLE_ACTS if ACTS[act] not in ("release", "administer")} == {}


@pytest.mark.parametrize("way", ["person", "key"])
@pytest.mark.parametrize("role", ROLES)
def test_each_cell_of_the_table_is_what_the_console_does(scene: Scene, role: Role, way: str) -> None:
    client = scene.person(role) if way == "person" else scene.key(f"cells-{role}", role, PATTERN)
    who = f"{role}@example.com (fraud-{role})" if way == "person" else f"key cells-{role}"
    for model in MODELS:
        for act in CONSOLE_ACTS:
            scene.commands.clear()
            before = len(scene.lines())
            status = attempt(scene, client, act, model)
            may = model == OWN and ROLES.index(role) >= ROLES.index(ACTS[act] or "view")
            kind = act.rpartition(" ")[2]
            if may:
                assert (act, status) == (act, 200 if way == "key" else 303)
            else:
                hidden = act in ON_ALERTS.values() and model != OWN
                assert (act, model, status) == (act, model, 404 if hidden else 403)
            taken = [(each.kind, each.model, each.by) for each in scene.commands]
            assert taken == ([(kind, model, who)] if may and kind in ACTIONS else [])
            (line,) = scene.lines()[before:]
            assert (line["who"], line["act"]) == (who, act)
            assert line["outcome"].startswith("done" if status in (200, 303) else "refused: ")
            assert line.get("subject", "") == (role if way == "person" else "")


@pytest.mark.parametrize("way", ["person", "key"])
@pytest.mark.parametrize("role", ROLES)
def test_each_role_opens_every_page_of_its_models_and_none_of_others(
    scene: Scene, role: Role, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = scene.person(role) if way == "person" else scene.key(f"pages-{role}", role, PATTERN)
    for model, status in ((OWN, 200), (NEAR, 403), (OTHER, 403)):
        with monkeypatch.context() as patch:
            named = (200, [flow_run(f"owl-of-{model}", model)])
            patch.setitem(scene.prefect.answers, "POST /flow_runs/filter", named)
            assert client.get(f"/runs/owl-of-{model}").status_code == (200 if model == OWN else 404)
        paths = PAGES if model == OWN else REFUSED
        assert {path: client.get(path.format(model)).status_code for path in paths} == dict.fromkeys(
            paths, status
        )
    lists = {path: client.get(path) for path in LISTS}
    assert {path: page.status_code for path, page in lists.items()} == dict.fromkeys(LISTS, 200)
    assert [(path, name) for path, page in lists.items() for name in (NEAR, OTHER) if name in page.text] == []


PAGES = [view.path.replace("{model}", "{}") for view in VIEWS if "{model}" in view.path]
REFUSED = [
    *PAGES,
    *(f"/live{view.path.replace('{model}', '{}')}" for view in VIEWS if "{model}" in view.path and view.live),
    "/models/{}/history.json?what=latency",
]
OF_RUNS = [view.path.replace("{run}", "{}") for view in VIEWS if "{run}" in view.path]
LISTS = [view.path for view in VIEWS if "{" not in view.path]


def test_each_view_is_of_a_model_or_of_a_run_or_a_list() -> None:
    """So that these tests open every one that there is, and the page on roles names what they show."""
    assert len(PAGES) + len(OF_RUNS) + len(LISTS) == len(VIEWS)
    assert SHOWN.keys() == {view.path for view in VIEWS}
    assert {ACTS[act] for acts in SHOWN.values() for act in acts} == {"view"}


def test_a_person_sees_their_models_and_no_name_of_another(scene: Scene) -> None:
    person = scene.person("view")
    runs = {model: leave_training(scene.home, model=model, auc=0.7) for model in MODELS}
    (
        scene.home / "runs" / runs[NEAR] / "progress.jsonl"
    ).unlink()  # the stand-in's lines are for experiments alone
    shown = {path: person.get(path) for path in LISTS}
    assert {each.status_code for each in shown.values()} == {200}
    for path in ("/", "/rollouts", "/alerts", "/runs", "/experiments", "/gpus"):
        assert OWN in shown[path].text, path
    assert "own-owl" in shown["/runs"].text
    hidden = (NEAR, OTHER, runs[NEAR], runs[OTHER], "other-owl")
    assert [(path, name) for path, page in shown.items() for name in hidden if name in page.text] == []
    assert "trouble of all" in shown["/alerts"].text, "what is of no model is for all who may read anything"
    compared = person.get("/experiments/compare", params={"run": [runs[OWN], runs[NEAR]]}).text
    assert f"/models/{NEAR}" not in compared
    for path in (
        *(each.format(runs[NEAR]) for each in OF_RUNS),
        f"/experiments/compare?run={runs[NEAR]}",
        "/runs/other-owl",
    ):
        answer = person.get(path)
        assert answer.status_code == 404
        assert runs[OTHER] not in answer.text


@pytest.mark.parametrize(
    "model",
    [NEAR, OTHER, "Fraud-eu", "FRAUD-EU", "frau%64ulent", "p%61yments", "nothing", "fraud", "%66raud"],
)
def test_a_page_of_another_model_is_refused_whether_there_is_one_or_not(scene: Scene, model: str) -> None:
    for path in REFUSED:
        answer = scene.viewer.get(path.format(model))
        assert (path, answer.status_code) == (path, 403)
        assert "you have no role for" in answer.text


@pytest.mark.parametrize("path", ["/models/fraud-eu%2F..%2Fpayments", "/models/fraud-eu/../payments/rollout"])
def test_a_path_that_leads_to_another_model_shows_none(scene: Scene, path: str) -> None:
    answer = scene.viewer.get(path)
    assert answer.status_code in (403, 404)
    assert "version 1" not in answer.text


def test_the_log_of_a_run_without_a_model_is_for_those_who_may_view_all(scene: Scene) -> None:
    runs = scene.prefect.answers["POST /flow_runs/filter"]
    scene.prefect.answers["POST /flow_runs/filter"] = (200, [flow_run("lone-owl")])
    try:
        seen = {name: scene.person(name).get("/runs/lone-owl") for name in ("view", "all")}
    finally:
        scene.prefect.answers["POST /flow_runs/filter"] = runs
    assert {each.status_code for each in seen.values()} == {200}
    for text in ("a line of its log", "column &#39;age&#39; is missing"):
        assert [name for name, page in seen.items() if text in page.text] == ["all"]


def test_the_own_pages_are_shown_and_an_encoded_name_is_the_same_one(scene: Scene) -> None:
    for path in PAGES:
        assert scene.viewer.get(path.format("%66raud-eu")).status_code == 200, path


def test_a_name_that_is_not_there_reveals_none_that_is(scene: Scene) -> None:
    answer = scene.viewer.get("/models/fraud-no")
    assert answer.status_code == 404
    assert [name for name in MODELS if name in answer.text] == []


@pytest.mark.parametrize(
    ("name", "gets_in"),
    [
        ("text", True),
        ("two", True),
        ("nobody", False),
        ("missing", False),
        ("case", False),
        ("number", False),
    ],
)
def test_the_claim_may_be_a_list_or_one_text_and_anything_else_names_no_group(
    scene: Scene, name: str, gets_in: bool
) -> None:
    assert scene.person(name).get("/alerts").status_code == (200 if gets_in else 303)


def test_a_name_of_the_provider_is_one_line(scene: Scene) -> None:
    assert attempt(scene, scene.person("lines"), "retire", OWN) == 403
    assert scene.lines()[-1]["who"] == "ada 2026-11-19 bob (fraud-view)"
    assert "ada 2026-11-19 bob (fraud-view) does not have" in scene.lines()[-1]["outcome"]


def test_several_groups_add_up(scene: Scene) -> None:
    both = scene.person("two")
    assert [both.get(f"/models/{model}").status_code for model in (OWN, OTHER, NEAR)] == [200, 200, 403]
    assert attempt(scene, both, "retire", OWN) == 403
    assert attempt(scene, both, "retire", OTHER) == 303
    assert scene.lines()[-1]["who"] == "two@example.com (fraud-view, payments-release)"


def test_a_group_that_loses_its_role_loses_it_while_its_people_are_logged_in(scene: Scene) -> None:
    person = scene.person("release")
    path = path_of(scene, "retire", OWN)
    fields = form_of(person.get(path).text) | {"why": "x"}
    try:
        scene.settings = scene.with_groups({"fraud-release": (Grant(models=PATTERN, role="view"),)})
        assert person.get(f"/models/{OWN}").status_code == 200
        assert person.post(path, data=fields).status_code == 403
        scene.settings = scene.with_groups({"others": (Grant(models="*", role="view"),)})
        assert person.get(f"/models/{OWN}").status_code == 303
        assert person.post(path, data=fields).status_code == 401
    finally:
        scene.settings = scene.with_groups(GROUPS)


def test_a_session_and_a_token_are_not_those_of_somebody_else(scene: Scene) -> None:
    path = path_of(scene, "retire", OWN)
    administrator, other = scene.person("administer"), scene.person("view")
    fields = form_of(administrator.get(path).text) | {"why": "x"}
    assert other.post(path, data=fields).status_code == 403
    assert scene.person("release").post(path, data=fields).status_code == 403
    foreign = administrator.post(path, data=fields, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert [line["outcome"][:8] for line in scene.lines()[-3:]] == ["refused:"] * 3


def test_a_silence_is_of_the_alert_whatever_the_form_says(scene: Scene) -> None:
    path = path_of(scene, "alerts silence", OWN)
    key = scene.key("quiet", "administer", PATTERN)
    assert key.post(path, data={"key": "*", "pattern": "*", "hours": "1"}).status_code == 200
    silenced = {each.alert.model for each in read_alerts(scene.home).open if each.silenced_until}
    assert silenced == {OWN}
    stack = path_of(scene, "alerts silence", "")
    assert key.post(stack, data={"hours": "1"}).status_code == 403
    assert scene.key("all", "administer").post(stack, data={"hours": "1"}).status_code == 200


def test_a_key_without_a_role_and_one_that_is_gone_are_refused(scene: Scene) -> None:
    asks, gone = scene.key("asks", None, OWN), scene.key("gone", "administer")
    key_file(scene.home).revoke("gone")
    for client in (asks, gone):
        answer = client.get(f"/models/{OWN}")
        assert (answer.status_code, "has no role" in answer.json()["error"]) == (401, True)
    wrong = httpx.get(f"{scene.url}/alerts", headers={"authorization": "Bearer serin_x"})
    assert wrong.status_code == 401


def test_a_key_for_no_model_is_not_one_for_all(scene: Scene) -> None:
    with pytest.raises(KeyRefused, match="it would be for no model"):
        key_file(scene.home).create("none", models=[], role="administer")
    client = scene.key("emptied", "administer", OWN)
    file = key_file(scene.home).path
    ring = json.loads(file.read_text())
    ring["keys"][-1]["models"] = []
    file.write_text(json.dumps(ring))
    assert {client.get(path).status_code for path in (f"/models/{OWN}", "/alerts")} == {403}
    assert attempt(scene, client, "retire", OWN) == 403


def test_a_key_does_not_borrow_the_session_of_a_browser(scene: Scene) -> None:
    person = scene.person("administer")
    answer = person.get(f"/models/{OWN}", headers={"authorization": "Bearer serin_x"})
    assert answer.status_code == 401


def test_the_local_secrets_view_all_and_administer_all(scene: Scene) -> None:
    for account, status in (("viewer", 403), ("operator", 303)):
        browser = scene.browser(origin=scene.url)
        browser.post("/login", data={"secret": account_secret(scene.home, account)})  # type: ignore[arg-type]
        assert all(browser.get(f"/models/{model}").status_code == 200 for model in MODELS)
        assert attempt(scene, browser, "retire", OTHER) == status


def test_no_secret_is_in_the_audit_log(scene: Scene) -> None:
    key = scene.key("hidden", "release", OWN)
    attempt(scene, key, "retire", OWN)
    text = audit_file(scene.home).read_text()
    assert "key hidden" in text
    assert key.headers["authorization"].removeprefix("Bearer ") not in text
    assert account_secret(scene.home, "operator") not in text
    assert audit_file(scene.home).stat().st_mode & 0o077 == 0


def test_a_command_of_a_key_is_the_one_that_the_journal_gets(scene: Scene) -> None:
    scene.commands.clear()
    answer = scene.key("starts", "release", OWN).post(
        f"/models/{OWN}/rollout/start", data={"version": "2", "why": "a better one"}
    )
    assert answer.json() == {"reason": "taken", "rollout": "r2"}
    (command,) = scene.commands
    assert (command.kind, command.version, command.why) == ("start", 2, "a better one")
    assert command.plan is not None
    assert home_rollouts(scene.home).models() == sorted(MODELS)
