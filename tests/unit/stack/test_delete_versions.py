"""Versions that are deleted, logs of a model, and files that are damaged: one model's harm no other."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from serin.errors import NotFound, VersionInUse
from serin.host.wiring import build_gateway, controller_process
from serin.machine.locks import holding
from serin.rollout.decide.plan import Plan
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command, Kind
from serin.rollout.run.status import model_status
from serin.stack.delete_versions import delete_versions
from serin.stack.model_logs import find_logs, follow_logs, last_lines
from serin.store.retention import Policy, collect_garbage
from serin.store.store import Store
from tests.fakes.rollout import FakeJudge
from tests.fakes.running_controller import running_controller
from tests.kit.waiting import until
from tests.soak.damaged_files import DAMAGES, Walk

MODEL = "flights"


def publish(store: Store, *versions: int) -> None:
    """As another process would: nothing is held."""
    for version in versions:
        assert store.reserve_version(MODEL) == version
        folder = Path(store.url) / "models" / MODEL / "versions" / str(version)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "model.onnx").write_bytes(b"weights")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(str(tmp_path / "store"))
    publish(made, 1, 2, 3)
    return made


def do(home: Path, kind: Kind, version: int | None, *phases: str) -> None:
    plan = Plan(steps=(100.0,), min_requests=0, drain_s=0.0) if kind == "start" else None
    command = Command(kind=kind, model=MODEL, version=version, by="test", plan=plan)
    assert home_rollouts(home).mailbox.ask(command).accepted
    until(
        lambda: (status := model_status(home, MODEL)) and status.rollout.phase in phases, f"one of {phases}"
    )


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises(VersionInUse, match=words):
        yield


def test_a_version_is_deleted_for_good_and_its_number_is_not_used_again(store: Store, tmp_path: Path) -> None:
    assert delete_versions(store, tmp_path, MODEL, "3") == [3]
    assert store.versions(MODEL) == [1, 2]
    assert store.reserve_version(MODEL) == 4
    assert not (tmp_path / "store" / "models" / MODEL / "versions" / "3").exists()
    assert delete_versions(store, tmp_path, MODEL) == [1, 2]
    assert store.models() == []
    assert collect_garbage(store, tmp_path, Policy(), remove=True) == []
    with pytest.raises(NotFound, match="no model 'flights'"):
        delete_versions(store, tmp_path, MODEL)


def test_what_is_served_rolled_out_or_kept_for_a_rollback_is_not_deleted(
    store: Store, tmp_path: Path
) -> None:
    with running_controller(tmp_path, MODEL):
        do(tmp_path, "start", 1, "promoted")
        do(tmp_path, "start", 2, "promoted")
    for alias, version in (("live", 2), ("previous", 1)):
        store.set_alias(MODEL, alias, version)
    for version, words in (("2", "it is live; run `serin retire flights`"), ("1", "would return to it")):
        with refused(words):
            delete_versions(store, tmp_path, MODEL, version)
    with refused("it is live"):
        delete_versions(store, tmp_path, MODEL, "live")
    with running_controller(tmp_path, MODEL, FakeJudge(step_s=600, bake_s=600)):
        do(tmp_path, "start", 3, "baking")
        with refused("being rolled out; run `serin rollout abort flights`"):
            delete_versions(store, tmp_path, MODEL, "3")
    assert store.versions(MODEL) == [1, 2, 3]


def test_a_model_with_one_version_that_must_stay_keeps_all(store: Store, tmp_path: Path) -> None:
    with holding(store.lock(f"models/{MODEL}/versions/2")), refused("version 2 .* a process uses it"):
        delete_versions(store, tmp_path, MODEL)
    assert store.versions(MODEL) == [1, 2, 3]


def test_all_versions_of_a_retired_model_can_be_deleted(store: Store, tmp_path: Path) -> None:
    with running_controller(tmp_path, MODEL):
        do(tmp_path, "start", 1, "promoted")
        do(tmp_path, "retire", None, "retired")
    store.set_alias(MODEL, "previous", 1)
    assert delete_versions(store, tmp_path, MODEL) == [1, 2, 3]
    assert store.aliases(MODEL) == {}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two models, one of which has the other's name as its beginning."""
    logs = tmp_path / "releases" / "logs"
    logs.mkdir(parents=True)
    for name in ("flights-v1", "flights-v2", "flights-late-v1"):
        (logs / f"{name}.log").write_text(f"{name} begins\n{name} is ready\n")
    gateway, controller = build_gateway(tmp_path), controller_process(tmp_path).log
    gateway.log.parent.mkdir(parents=True)
    controller.parent.mkdir(parents=True, exist_ok=True)
    controller.write_text("flights-v2: promoted\nflights-late-v1: promoted\nthe controller has started\n")
    requests = [("flights", 200, None), ("flights", 503, None), ("flights", 200, "14"), ("taxis", 500, None)]
    rows = [{"model": model, "code": code, "grpc": grpc} for model, code, grpc in requests]
    gateway.log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths = ("/v2/models/flights/infer", "/v2/models/flights-late/infer", "/elsewhere")
    gateway.refusals.write_text("".join(f"{json.dumps({'code': 401, 'path': path})}\n" for path in paths))
    gateway.process().log.write_text("a warning of Envoy\n")
    return tmp_path


def shown(home: Path, model: str, count: int = 20) -> dict[str, list[str]]:
    return {source.name: last_lines(source, count) for source in find_logs(home, model)}


def test_a_model_s_logs_hold_its_own_lines_and_no_other_model_s(home: Path) -> None:
    found = shown(home, "flights")
    assert found["flights-v2"] == ["flights-v2 begins", "flights-v2 is ready"]
    assert found["controller"] == ["flights-v2: promoted"]
    assert [json.loads(line)["code"] for line in found["failed requests"]] == [503, 200]
    assert [json.loads(line)["path"] for line in found["refusals"]] == ["/v2/models/flights/infer"]
    assert found["gateway"] == ["a warning of Envoy"]
    assert sorted(found) == [
        "controller", "failed requests", "flights-v1", "flights-v2", "gateway", "refusals",
    ]  # fmt: skip
    assert shown(home, "flights", 1)["flights-v1"] == ["flights-v1 is ready"]
    assert find_logs(home, "trains") == []


def test_new_lines_are_followed_also_of_a_log_that_was_rotated_or_is_new(home: Path) -> None:
    lines = follow_logs(home, "flights")
    logs = home / "releases" / "logs"

    def after(write: str, name: str, *, new: bool = False) -> list[tuple[str, str]]:
        with (logs / f"{name}.log").open("w" if new else "a") as file:
            file.write(write)
        return list(islice(lines, write.count("\n")))

    assert after("one\n", "flights-v1") == [("flights-v1", "one")]
    assert after("two\nthree\n", "flights-v2") == [("flights-v2", "two"), ("flights-v2", "three")]
    assert after("short\n", "flights-v2", new=True) == [("flights-v2", "short")], "it was rotated"
    assert after("hello\n", "flights-v3") == [("flights-v3", "hello")]


NAMED = (
    ("releases/delays-v1/release.json", "half"),
    ("stack.json", "half"),
    ("captures/delays/counters.json", "half"),
    ("rollouts/delays/decisions/000000000001.json", "half"),
    ("cluster/models/delays.json", "folder"),  # cluster/models/delays.json.copy and delays-copy
    ("console/session-key", "half"),
    ("store/models/delays/aliases.json", "unreadable"),
)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SERIN_HOME", "SERIN_INVENTORY"):
            patch.setenv(name, "")
        patch.delenv("SERIN_STORE", raising=False)
        yield Walk.build(tmp_path_factory.mktemp("walk"))


@pytest.mark.parametrize(("file", "damage"), NAMED)
def test_everything_that_reads_a_home_names_the_damaged_file_or_does_without_it(
    walk: Walk, file: str, damage: str
) -> None:
    walk.wrong.clear()
    walk.check(Path(file), damage)
    assert walk.wrong == []


def test_the_controller_decides_about_the_other_model_whatever_file_is_damaged(walk: Walk) -> None:
    walk.wrong.clear()
    files = [file for file in walk.files() if "versions" not in file.parts]
    for place, file in enumerate(files):
        walk.check(file, list(DAMAGES)[place % len(DAMAGES)], whole=False)
    assert walk.wrong == []
