"""What the credentials of CI and of roles may do in a store, with the policies of the docs on a real S3 server
(SeaweedFS)."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from typer.testing import CliRunner

from serin.cli import app
from serin.cluster.shared_keys import SharedKeys
from serin.errors import StoreError
from serin.formats.cluster.host_report import PREFIX as HOSTS
from serin.formats.cluster.host_report import WorkerReport
from serin.formats.cluster.leader import KEY
from serin.formats.serving.journal import DecisionCache
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook
from serin.pipeline.tables import list_tables, push_tables
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.commands import Answer, Command, Inbox
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.leadership import Leadership
from serin.rollout.run.record import rollout2decision
from serin.serving.envoy.keys import KeyFile
from serin.spec.roles import ACTS, ROLES, Role
from serin.store.artifacts import Release
from serin.store.mirror import Mirror
from serin.store.objects import Objects
from serin.store.open import open_objects
from serin.store.packages import REFERENCE, manifest_of, publish_package
from serin.store.store import Store
from serin.watcher.cluster_state import FOLDERS, PREFIX
from serin.watcher.cluster_watch import RequestsDuty
from tests.architecture.sources import ROOT
from tests.cluster.documented_rights import ROLES_URL, URL, ci_rights, role_rights, words_of
from tests.cluster.seaweedfs import BUCKET, running_seaweedfs
from tests.cluster.small_pipeline import write_spec, write_table
from tests.fakes.experiments import leave_training
from tests.fakes.live_quality import spec
from tests.fakes.sharing_hosts import SharingHost
from tests.fakes.sharing_hosts import rows as recorded
from tests.kit.acts import ENDS, MODELS, NEAR, OF_AN_ACCOUNT, OTHER, OWN, STORED, WRITTEN
from tests.kit.commands import serin
from tests.kit.recorded_parts import write_part
from tests.kit.threads import beside
from tests.kit.waiting import until
from tests.unit.export.small_dataset import flights, make_trained, planes, spec_for
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

FORBIDDEN = [
    "rollouts/inbox/1.json",
    "rollouts/approvals/1.json",
    "rollouts/delays/decisions/000000000001.json",
    "cluster/leader.json",
    "cluster/desired/000000000001.json",
    "models/delays/aliases.json",
    "models/delays/signatures/1.json",
    "models/delays/versions/2/attempt/model.onnx",
    "published/models/delays/versions/2.json",
    "policy.json",
]


RIGHTS = {
    "ci": ci_rights(),
    "reader": [f"Read:{BUCKET}", f"List:{BUCKET}"],
    "nobody": [],
    **{who: role_rights(who) for who in ("view", "release", "stages")},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("seaweedfs") / "server"
    with running_seaweedfs(folder, others=RIGHTS) as variables:
        yield variables


@pytest.fixture
def as_ci(server: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with a version and a leader; from then on this process is CI."""
    for name, value in (server | {"SERIN_STORE": URL}).items():
        monkeypatch.setenv(name, value)
    owner = Store(URL, cache=home / "owner")
    if not owner.versions(MODEL):
        bundles.publish(owner, bias=0.0)
    owner.shared_files().put(KEY, b"{}")
    assert open_objects(URL).keys("rollouts/") == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ci")
    return URL


def test_ci_writes_packages_and_reads_versions(as_ci: str, home: Path) -> None:
    objects = open_objects(as_ci)
    objects.create("packages/abc/package.json", b"{}")
    found = objects.read("packages/abc/package.json")
    assert found is not None
    assert objects.read("packages/none/package.json") is None
    assert Store(as_ci, cache=home / "ci").bundle(MODEL, 1).version == 1
    assert "delays" in serin("models", "list")
    assert "no rollouts yet" in serin("rollout", "status")


def test_ci_starts_no_rollout(as_ci: str, server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = serin(
        "rollout", "start", MODEL, "--spec", str(ROOT / "examples" / "flights" / "spec.yaml"), code=1
    )
    assert "AccessDenied" in said
    assert "rollouts/inbox/" in said
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server["AWS_ACCESS_KEY_ID"])
    assert open_objects(as_ci).keys("rollouts/") == []


@pytest.mark.parametrize("key", FORBIDDEN)
def test_ci_writes_nothing_that_is_served_or_decides(as_ci: str, key: str) -> None:
    objects = open_objects(as_ci)
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.put(key, b"{}")
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.remove(key)


T = TypeVar("T")
COMMANDS = {"lookups refresh": "start", "retire": "retire"} | {
    act: act.split()[1] for act in STORED if act.startswith("rollout") and ACTS[act] == "release"
}
READ_ALL, READ_MODEL, RUN_STAGES = (
    words_of(f"the right to {what}") for what in ("read everything", "read the model", "run stages")
)
NEVER_TO_RELEASE = [
    *(f"rollouts/{box}/{OTHER}.1.json" for box in ("inbox", "approvals")),
    *(f"rollouts/{box}/{NEAR}.1.json" for box in ("inbox", "approvals")),
    "rollouts/inbox/fraud.1.json", "rollouts/inbox/Fraud-eu.1.json", "rollouts/inbox/1.json",
    f"rollouts/{OWN}/decisions/000000000009.json", f"rollouts/answers/{OWN}.1.json",
    f"models/{NEAR}/aliases.json", f"published/models/{OTHER}/versions/3.json", f"captures/forget/{OWN}/1.json",
    "cluster/keys.json", "cluster/leader.json", "cluster/watch/state.json", "cluster/watch/labels/payments.1.parquet",
    "cluster/watch/requests/20260101T000000-abc.json", f"cluster/watch/requests/{NEAR}.1.json", "policy.json",
]  # fmt: skip


class Leaders:
    """A controller that takes every command, and a watcher: both with all rights."""

    def __init__(self, objects: Objects, watched: Mirror, state: Path) -> None:
        self.taken: list[tuple[str, str]] = []
        self.package, self.tables = "", ""
        self._inbox, self._watch = Inbox(objects), RequestsDuty(state, objects, lambda: watched.push(1))

    def tick(self) -> None:
        for command in self._inbox.pending():
            self.taken.append((command.kind, command.model))
            self._inbox.answer(Answer(id=command.name, accepted=True, reason="", rollout="r1"))
        self._watch.tick(0.0)


def export_with_lookup(store: Store, model: str, folder: Path) -> None:
    """Version 1, with a table that has changed since."""
    table = folder / "planes.parquet"
    data = spec_for("binary").data.model_dump(by_alias=True, mode="json", exclude_none=True)
    data["tables"] = {"flights": str(folder / "flights.parquet"), "planes": str(table)}
    trained = make_trained(folder, "binary", name=model, data=data)
    trained.export(store)
    pq.write_table(planes().slice(1), table)


@pytest.fixture(scope="module")
def leaders(server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leaders]:
    """Three models with a version that is live and two others, a recorded request and an alert each; keys that all
    hosts share, a host that has reported, a package and tables."""
    folder = tmp_path_factory.mktemp("leaders")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (server | {"SERIN_STORE": ROLES_URL, "SERIN_HOME": str(folder / "home")}).items():
            patch.setenv(name, value)
        store = Store(ROLES_URL, cache=folder / "cache")
        objects = store.shared_files()
        recorder = SharingHost(folder, ROLES_URL, "recorder")
        for model in (OWN, NEAR, OTHER):
            export_with_lookup(store, model, folder / model)
            for bias in (0.0, 0.1):
                bundles.publish(store, bias=bias, model=model, spec=spec("{capture: {share: 1}}"))
            release = pa.array([f"{model}-v1"])
            write_part(recorder.home, model, 1, recorded(17).append_column("_release", release))
        recorder.share()
        leadership = Leadership(objects, "one")
        leadership.step()
        assert leadership.term == 1
        watched = Mirror(objects, PREFIX, folder / "state", FOLDERS)
        watched.adopt(1)
        journals = StoreJournals(objects, leadership, 1, cache=DecisionCache(objects))
        for model in (OWN, NEAR, OTHER):
            live = Rollout(
                id="r1", candidate=Release(model=model, version=1), stable=None, previous=None, plan=Plan(),
                phase=Phase.PROMOTED, began=1.0, since=1.0, evidence_from=1.0,
            )  # fmt: skip
            journals.open(model).append(rollout2decision(live, 1.0))
            about = {"kind": "capture", "severity": "ticket", "title": "t", "text": "x", "since": 1.0}
            AlertBook(folder / "state").fire(Alert(key=f"{model}/disk", model=model, **about), 2.0)
        SharedKeys(objects, KeyFile(path=folder / "keys.json")).change(lambda keys: keys.create("first"))
        watched.push(1)
        report = WorkerReport(host="gone", pool="cpu", beat=1, t=1.0, cores=1, memory_bytes=1)
        objects.put(f"{HOSTS}gone/worker-1.json", report.dump())
        found, stop = Leaders(objects, watched, folder / "state"), threading.Event()
        contents = {"spec.yaml": b"name: fraud"}
        assert publish_package(store, contents)
        found.package = f"{REFERENCE}{manifest_of(contents).digest}"
        push_tables(folder / OWN / "dataset" / "lookups")
        found.tables = list_tables()[0].digest

        def run() -> None:
            while not stop.wait(0.02):
                found.tick()

        with beside(run, stop=stop):
            yield found


class Somebody:
    """Another process with a credential of RIGHTS: of a role for fraud-*, or of another one; who administers has all
    rights. In this one, which reads its credentials again and again, are the leaders."""

    def __init__(self, role: str, variables: Mapping[str, str], home: Path) -> None:
        self.role = role
        key = {} if role == "administer" else {"AWS_ACCESS_KEY_ID": role}
        self._variables = {**variables, **key, "SERIN_STORE": ROLES_URL, "SERIN_HOME": str(home)}

    def __call__(self, act: Callable[..., T], *given: object) -> T:
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=become, initargs=(self._variables,)
        ) as one:
            return one.submit(act, *given).result(timeout=300)


def become(variables: Mapping[str, str]) -> None:
    """This process has these variables."""
    os.environ.update(variables)


def run_commands(
    commands: Sequence[Sequence[str]], store: str, keys: Sequence[str] = ()
) -> list[tuple[int, str]]:
    """The exit code of each command, and what it says; then the same of writing each of these objects. `store`: of the
    version that is copied."""
    done = [
        CliRunner().invoke(app, words, env={"SERIN_STORE": store} if "copy" in words else None)
        for words in commands
    ]
    ended = [(each.exit_code, each.output + str(each.exception or "")) for each in done]
    return ended + [(int(said != "written"), said) for said in refusals(keys).values()]


def refusals(keys: Sequence[str]) -> dict[str, str]:
    """Tries to write objects; what the store says to each."""
    objects, said = open_objects(ROLES_URL), {}
    for key in keys:
        try:
            objects.put(key, b"{}")
            said[key] = "written"
        except StoreError as error:
            said[key] = str(error)
    return said


def put(key: str, content: bytes) -> None:
    open_objects(ROLES_URL).put(key, content)


@pytest.fixture
def somebody(
    request: pytest.FixtureRequest, leaders: Leaders, server: dict[str, str], home: Path
) -> Somebody:
    leaders.taken.clear()
    return Somebody(getattr(request, "param", "release"), server, home)


@pytest.fixture
def work(home: Path) -> Path:
    """A home with the files that commands are given."""
    home.mkdir()
    serin("trust", "create", str(home / "own.key"))
    (home / "labels.csv").write_text("_id,arr_delay\n17,20\n")
    pq.write_table(flights(20), home / "rows.parquet")
    KeyFile(path=home / "keys.json").create("first")
    public = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048).public_key(), as_dict=True)
    (home / "jwks.json").write_text(
        json.dumps({"keys": [{**public, "kid": "1", "alg": "RS256", "use": "sig"}]})
    )
    elsewhere = Store(str(home / "elsewhere"))
    for model in MODELS:
        (home / model).mkdir()
        write_table(home / model / "data.parquet", 400)
        search = {"trials": 1, "space": {"model.hidden": {"choice": [[4], [8]]}}}
        write_spec(home / model, name=model, training={"epochs": 1}, search=search)
        for bias in (0.0, 0.1, 0.2, 0.3):
            copied = bundles.publish(elsewhere, bias=bias, model=model)
    shutil.copytree(copied.path, home / "version")
    return home


def allows(who: str, act: str, model: str | None) -> bool:
    """Whether the store lets a credential do it: what the table of roles says, but for what the page excepts."""
    least = "view" if act in READ_MODEL else ACTS[act] or "view"
    if who in ("administer", "reader"):
        return who == "administer" or least == "view"
    if act in READ_ALL or (act in RUN_STAGES and who != "stages"):
        return False
    role: Role = "view" if who == "view" else "release"
    own = model == OWN or (act in RUN_STAGES and act != "export")
    return own and ROLES.index(role) >= ROLES.index(least)


def tried(who: str) -> list[str]:
    """The acts that a credential tries: with those of no role only what they are for."""
    if who == "reader":
        return [act for act in STORED if ACTS[act] == "view"]
    return [act for act in STORED if who != "stages" or act in RUN_STAGES]


@pytest.mark.parametrize("somebody", ["view", "release", "reader", "stages", "administer"], indirect=True)
def test_each_cell_of_the_table_is_what_the_store_lets_a_command_do(
    somebody: Somebody, leaders: Leaders, work: Path
) -> None:
    who = somebody.role
    (work / "tables").mkdir()
    pq.write_table(flights(20), work / "tables" / f"{who}.parquet")
    cells = [
        (act, model)
        for act in tried(who)
        for model in (MODELS if any("{0}" in word for word in STORED[act]) else [None])
    ]
    rest = leaders.package, leaders.tables, ROLES_URL, 3 if who == "release" else 2
    given = [[*act.split(), *(w.format(model, work, *rest) for w in STORED[act])] for act, model in cells]
    written = [(act, model) for act in WRITTEN for model in MODELS if who in ("view", "release", "stages")]
    keys = [WRITTEN[act].format(model) for act, model in written]
    done = somebody(run_commands, given, str(work / "elsewhere"), keys)
    wrong = []
    for (act, model), (code, said) in zip([*cells, *written], done, strict=True):
        if allows(who, act, model):
            as_it_may = "AccessDenied" not in said and (ENDS[act] in said if act in ENDS else code == 0)
        else:
            as_it_may = "AccessDenied" in said and code == 1
        if not as_it_may:
            wrong.append(f"{act} {model}: {code}: {said}")
    assert not wrong, "\n".join(wrong)
    if who == "release":  # who may write in SeaweedFS may remove: what is refused is to delete records
        assert f"{OWN} version 3 is deleted" in dict(zip(cells, done, strict=False))["models remove", OWN][1]
    models = {"release": (OWN,), "administer": MODELS}.get(who, ())
    assert leaders.taken == [(COMMANDS[act], model) for act in STORED if act in COMMANDS for model in models]


@pytest.mark.parametrize("somebody", ["nobody"], indirect=True)
def test_an_act_of_an_account_needs_no_right_in_the_store(somebody: Somebody, work: Path) -> None:
    run = leave_training(work, model=OWN)
    (work / "runs" / run / "progress.jsonl").unlink()  # the stand-in's lines are for experiments alone
    given = [
        [*act.split(), *(w.format(OWN, work, run) for w in words)] for act, words in OF_AN_ACCOUNT.items()
    ]
    done = zip(OF_AN_ACCOUNT, somebody(run_commands, given, ""), strict=True)
    wrong = [
        f"{act}: {code}: {said}"
        for act, (code, said) in done
        if not (ENDS[act] in said if act in ENDS else code == 0)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_release_credential_writes_for_no_other_model_and_nothing_that_decides(somebody: Somebody) -> None:
    said = somebody(refusals, NEVER_TO_RELEASE)
    assert [key for key, text in said.items() if "AccessDenied" not in text] == []


def test_a_release_credential_cannot_ask_for_another_model_in_an_object_of_its_own(
    somebody: Somebody, leaders: Leaders
) -> None:
    objects = open_objects(ROLES_URL)
    command = Command(kind="promote", model=OTHER, by="nobody", id="20260101T000000-abc")
    name = f"{OWN}.{command.id}.json"
    somebody(put, f"rollouts/approvals/{name}", command.dump())
    until(lambda: objects.read(f"rollouts/answers/{name}") is not None)
    stored = objects.read(f"rollouts/answers/{name}")
    assert stored is not None
    assert not Answer.load(stored.content).accepted
    assert leaders.taken == []
