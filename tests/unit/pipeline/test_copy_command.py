"""`serin models copy --rollout` and `serin trust policy`: where a rollout starts, and what a store asks for."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.errors import RolloutRefused
from serin.formats.cluster.leader import KEY
from serin.machine.process import start_ticks
from serin.pipeline.copy_version import find_target_rollouts, start_copied
from serin.rollout.run.access import rollouts_at
from serin.rollout.run.commands import Answer, Command, Inbox
from serin.store.objects import FolderObjects
from serin.store.store import Store
from tests.kit.commands import serin
from tests.kit.threads import beside
from tests.unit.pipeline.test_copy_version import key
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL


@pytest.fixture
def dev(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "dev"))


@pytest.fixture
def answered(tmp_path: Path) -> Iterator[tuple[str, list[Command]]]:
    """A store in which a controller leads that accepts every command, and what it was told."""
    objects, told, stop = FolderObjects(tmp_path / "prod"), list[Command](), threading.Event()
    objects.put(KEY, b"{}")
    inbox = Inbox(objects)

    def lead() -> None:
        while not stop.wait(0.01):
            for command in inbox.pending():
                told.append(command)
                inbox.answer(Answer(id=command.name, accepted=True, reason="", rollout=command.id))

    with beside(lead, stop=stop):
        yield objects.url, told


SPEC = """
name: delays
data: {tables: {rows: rows.parquet}, target: {column: late, task: binary}}
features: [{columns: [temp], steps: [normalize]}]
rollout: {steps: [10, 100]}
"""


def test_the_rollout_starts_where_the_target_is_served_by_the_versions_plan(
    dev: Store, answered: tuple[str, list[Command]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", dev.url)
    bundles.publish(dev, bias=0.0, spec=SPEC)
    url, told = answered
    said = serin("models", "copy", MODEL, "--to", url, "--rollout", "--why", "the second quarter")
    assert f"delays version 1 is copied to {url}" in said
    assert f"SERIN_STORE={url} serin rollout watch delays" in said
    (command,) = told
    assert (command.kind, command.model, command.version) == ("start", MODEL, 1)
    assert command.why == "the second quarter"
    assert command.plan is not None
    assert command.plan.steps == (10.0, 100.0)
    assert f"copied   from {dev.url} by " in serin_in(url, monkeypatch, "models", "show", MODEL)


def serin_in(url: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    with monkeypatch.context() as patched:
        patched.setenv("SERIN_STORE", url)
        return serin(*words)


def test_without_a_controller_to_be_reached_nothing_is_copied(
    dev: Store, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", dev.url)
    bundles.publish(dev, bias=0.0)
    prod = Store(str(tmp_path / "prod"))
    with pytest.raises(RolloutRefused, match="run `serin rollout start delays:1` on the machine that serves"):
        find_target_rollouts(prod, f"{MODEL}:1")
    assert "no controller that serves from" in serin(
        "models", "copy", MODEL, "--to", prod.url, "--rollout", code=1
    )
    assert prod.versions(MODEL) == []


def test_the_stack_of_a_home_is_found_by_the_store_in_it(tmp_path: Path, home: Path) -> None:
    up = {"supervisor_pid": os.getpid(), "supervisor_ticks": start_ticks(os.getpid())}
    other = tmp_path / "served"
    other.mkdir()
    (other / "stack.json").write_text(json.dumps(up))
    found = rollouts_at(f"file://{other}/store")
    assert found is not None
    assert found.log == other / "gateway" / "requests.jsonl"
    assert rollouts_at(str(home / "store")) is None
    home.mkdir()
    (home / "stack.json").write_text(json.dumps(up))
    assert rollouts_at(str(home / "store")) is not None


def test_a_version_without_a_spec_starts_by_the_default_plan(
    dev: Store, answered: tuple[str, list[Command]]
) -> None:
    bundle = bundles.publish(dev, bias=0.0, spec="")
    (Path(bundle.path) / "spec.yaml").unlink()
    rollouts = rollouts_at(answered[0])
    assert rollouts is not None
    assert start_copied(rollouts, bundle, why="") is not None


def test_the_policy_of_a_store_is_set_and_shown_by_the_command(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "prod"))
    pem = key(tmp_path, "ci")
    assert "nobody has to sign a version" in serin("trust", "policy")
    said = serin(
        "trust", "policy", "--signer", f"ci={tmp_path / 'ci.pub'}", "--check", "champion", "--check", "gate"
    )
    assert "signed by  ci" in said
    assert "checks     gate, champion" in said
    found = json.loads(serin("trust", "policy", "--json"))
    assert found == {
        "format": "serin.policy", "version": 1, "signers": {"ci": pem}, "checks": ["gate", "champion"],
        "approval": False,
    }  # fmt: skip
    assert "is not NAME=FILE" in serin("trust", "policy", "--signer", "ci", code=2)
    assert "speed: the checks are gate, champion, groups" in serin(
        "trust", "policy", "--check", "speed", code=2
    )
    assert "is a private key" in serin("trust", "policy", "--signer", f"ci={tmp_path / 'ci'}", code=1)
    assert json.loads(serin("trust", "policy", "--json")) == found
    assert "approval   each rollout waits for one" in serin("trust", "policy", "--approval")
    assert json.loads(serin("trust", "policy", "--json"))["approval"] is True
    off = serin("trust", "policy", "--off")
    assert "checks     none" in off
    assert "approval   where the spec asks for one" in off
