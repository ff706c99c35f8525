"""The environment of a spec: packages that the user's code imports and that are not installed here."""

import asyncio
import importlib.metadata
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uv

from serin.errors import EngineFailed, EnvironmentFailed, EnvironmentRefused, SpecError
from serin.etl.engines.dask_engine import _share_environment
from serin.etl.identity import dataset_key
from serin.machine import packages
from serin.machine.packages import RECORD, Entered, enter, obtain
from serin.spec.data import DataSpec
from serin.spec.environment import EnvironmentSpec
from serin.spec.features import FeatureSpec
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.pipeline import PipelineSpec
from serin.spec.target import TargetSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset, Release
from serin.store.retention import Policy, collect_garbage
from serin.store.stage_keys import environment_part
from serin.store.store import Store
from serin.training.launch.run_dir import training_parts
from tasks import watch
from tests.fakes.locks import forget_own_locks
from tests.fakes.small_pipeline import small_spec, write_spec
from tests.kit.commands import run, serin_process
from tests.kit.index import Gate, served_index, write_wheel
from tests.signals import send_group

NUMPY = importlib.metadata.version("numpy")
OBTAIN = """
import sys
from serin.machine.packages import obtain
from serin.spec.environment import EnvironmentSpec
print(obtain(EnvironmentSpec(requirements=sys.argv[1:])))
"""
HALVE = """
import numpy as np
from tiny_numbers import HALF


class Halve:
    makes, reads = "numeric", "numbers"

    def transform(self, values):
        return values * np.float32(HALF)

    def to_onnx(self, graph, values):
        return graph.op("Mul", values, graph.constant(np.float32(HALF)))

    def describe(self):
        return "halved"

    def to_json(self):
        return {}

    @classmethod
    def from_json(cls, document):
        return cls()
"""
LOCKED = ["tiny-numbers==1.0", "tiny-operators==2.1"]
HALVED = {
    "columns": ["weight", "distance"],
    "steps": ["fill_median", "tiny_operators:Halve"],
}
SEND = """
import sys
from serin.pipeline.pack import pack_spec
from serin.spec.code_digest import local_roots
from serin.spec.load import read_spec
package = pack_spec(read_spec(sys.argv[1]), elsewhere=sys.argv[2] == "elsewhere")
package.send()
assert not [root for root in local_roots() if "environments" in root.parts]
print(package.reference, *package.contents)
"""
OPEN = """
import sys
from serin.machine.packages import entered
from serin.pipeline.open_spec import opened_spec
with opened_spec(sys.argv[1]) as spec:
    print(spec.environment.lock, *entered().packages)
import tiny_numbers  # also after the block
"""
STORED = """
import json, sys
from pathlib import Path
from serin.machine.packages import entered
from serin.pipeline.open_spec import copy_package
from serin.store.packages import stored_spec
spec = copy_package(sys.argv[1], Path("copy")) / "spec.yaml"
bundle = Path("bundle")
bundle.mkdir()
spec.rename(bundle / "spec.yaml")
lineage = {"package": sys.argv[1].removeprefix("package:")}
(bundle / "manifest.json").write_text(json.dumps({"lineage": lineage}))
print(stored_spec(bundle).name, *entered().packages)
"""
NET = """
import torch
from tiny_numbers import HALF


class Net(torch.nn.Module):
    def __init__(self, numeric, sizes, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(numeric, outputs)

    def forward(self, num, cat):
        return self.layer(num) * HALF
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index, and the only one that uv knows."""
    folder = tmp_path / "index"
    write_wheel(folder, "tiny-numbers", "1.0", {"tiny_numbers.py": "HALF = 0.5\n"}, ["numpy>=2"])
    write_wheel(folder, "tiny-operators", "2.1", {"tiny_operators.py": HALVE}, ["tiny-numbers"])
    write_wheel(folder, "tiny-old", "0.1", {"tiny_old.py": ""}, ["numpy<2"])
    monkeypatch.setenv("UV_DEFAULT_INDEX", folder.as_uri())
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    return folder


def asks(*requirements: str) -> EnvironmentSpec:
    return EnvironmentSpec(requirements=requirements)


def added(folder: Path) -> list[str]:
    return list(json.loads((folder / RECORD).read_text())["packages"])


def test_an_environment_has_what_is_lacking_here_and_is_used_again(home: Path, index: Path) -> None:
    made = obtain(asks("tiny-operators", f"numpy=={NUMPY}"))
    assert added(made) == ["tiny-numbers==1.0", "tiny-operators==2.1"]
    assert sorted(path.name for path in (made / "site-packages").glob("*.py")) == [
        "tiny_numbers.py",
        "tiny_operators.py",
    ]
    index.rename(index.with_name("gone"))
    assert (
        obtain(asks(f"numpy=={NUMPY}", "Tiny_Operators")) == made
    )  # the order and the spelling do not count
    with pytest.raises(EnvironmentRefused, match="tiny-numbers was not found"):
        obtain(asks("tiny-numbers"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("numpy<2", f"numpy<2 is asked for and the worker has {NUMPY}"),
        ("tiny-old", f"tiny-old depend on numpy<2 .*the worker has numpy {NUMPY}, which stays"),
        ("tiny-numbers==7", "tiny-numbers==7"),
    ],
)
def test_what_cannot_be_beside_the_installed_packages_is_refused_in_one_sentence(
    home: Path, index: Path, asked: str, words: str
) -> None:
    with pytest.raises(EnvironmentRefused, match=words) as refused:
        obtain(asks(asked))
    assert "\n" not in str(refused.value)
    assert not any((home / "environments").glob(f"*/{RECORD}"))


def test_an_index_that_does_not_answer_is_named_in_one_sentence(
    home: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    with pytest.raises(EnvironmentFailed, match=rf"{url}/tiny-numbers/ cannot be read") as failed:
        obtain(asks("tiny-numbers"))
    assert "\n" not in str(failed.value)
    assert failed.value.retryable


def test_a_module_that_is_installed_here_stays_the_one_that_is_imported(home: Path, index: Path) -> None:
    write_wheel(index, "other-yaml", "1.0", {"yaml/__init__.py": "", "other_yaml.py": ""})
    made = obtain(asks("other-yaml"))
    assert {path.name for path in (made / "site-packages").iterdir()} >= {"other_yaml.py"}
    assert not (made / "site-packages" / "yaml").exists()


@contextmanager
def obtaining(*requirements: str) -> Iterator[subprocess.Popen[str]]:
    """A process that makes an environment, with all that it starts; it is ended with the block."""
    command = [sys.executable, "-c", OBTAIN, *requirements]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        send_group(signal.SIGKILL, process.pid)
        process.communicate(timeout=60)


def test_what_a_killed_process_left_is_not_used(
    home: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with served_index(index, gate) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with obtaining("tiny-numbers") as process:
            assert gate.first.wait(120)
            assert send_group(signal.SIGKILL, process.pid)
            process.wait(60)
        (left,) = (home / "environments").glob("*.making-*")
        assert not any((home / "environments").glob(f"*/{RECORD}"))
        gate.opened.set()
        made = obtain(asks("tiny-numbers"))
    assert added(made) == ["tiny-numbers==1.0"]
    assert not left.exists()


def test_two_processes_that_need_it_at_once_make_it_once(
    home: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with served_index(index, gate) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with obtaining("tiny-numbers") as one, obtaining("tiny-numbers") as other:
            assert gate.first.wait(120)
            gate.opened.set()
            said = {process.communicate(timeout=120)[0] for process in (one, other)}
        assert one.returncode == other.returncode == 0
    assert len(said) == 1
    assert len(gate.asked) == 1


def write_lock(project: Path, *needs: str) -> Path:
    project.mkdir(exist_ok=True)
    head = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\n'
    (project / "pyproject.toml").write_text(f"{head}dependencies = {json.dumps(needs)}\n")
    run(uv.find_uv_bin(), "lock", "--python", sys.executable, cwd=project)
    return project / "uv.lock"


def test_a_lock_gives_its_versions_and_refuses_others_than_the_installed_ones(
    home: Path, index: Path, tmp_path: Path
) -> None:
    write_wheel(index, "numpy", "2.0.0", {"numpy.py": ""})
    write_wheel(index, "numpy", NUMPY, {"numpy.py": ""})
    for version, words in ((NUMPY, None), ("2.0.0", f"numpy==2.0.0 is asked for and the worker has {NUMPY}")):
        lock = EnvironmentSpec(
            lock=str(write_lock(tmp_path / version, "tiny-operators", f"numpy=={version}"))
        )
        if words is None:
            assert added(obtain(lock)) == LOCKED
        else:
            with pytest.raises(EnvironmentRefused, match=words):
                obtain(lock)


def test_an_environment_that_nobody_used_for_long_is_removed(home: Path, index: Path, tmp_path: Path) -> None:
    made, store = obtain(asks("tiny-numbers")), Store(str(tmp_path / "store"))
    left = made.with_name(f"{made.name}.making-half")
    left.mkdir()
    for path in (made / RECORD, left):
        os.utime(path, (0, 0))
    assert collect_garbage(store, home, Policy(), remove=True) == []  # this process uses it
    forget_own_locks()
    found = collect_garbage(store, home, Policy(), remove=True)
    assert {(one.kind, one.name) for one in found} == {("environment", made.name), ("environment", left.name)}
    assert not made.exists()
    assert not left.exists()
    assert obtain(asks("tiny-numbers")) == made


def test_half_an_environment_is_made_again(home: Path, index: Path) -> None:
    made = obtain(asks("tiny-numbers"))
    (made / RECORD).unlink()
    (made / "site-packages" / "tiny_numbers.py").unlink()
    assert obtain(asks("tiny-numbers")) == made
    assert (made / "site-packages" / "tiny_numbers.py").is_file()


@pytest.fixture
def in_environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    def enter(spec: EnvironmentSpec) -> None:
        monkeypatch.setattr(packages, "_entered", [Entered(spec=spec, digest=spec.digest())])

    return enter


def test_the_environment_is_in_the_keys_of_stages_that_run_own_code(
    tmp_path: Path, in_environment: Any
) -> None:
    (tmp_path / "net.py").write_text("import json\n")
    own, built_in = ModelSpec(module=f"{tmp_path / 'net.py'}:Net"), ModelSpec()
    dataset = Dataset(path="", digest="d", rows={})
    keys = {}
    for asked in (None, asks("a==1"), asks("a==2")):
        if asked is not None:
            in_environment(asked)
        keys[asked] = [training_parts(model, TrainingSpec(), dataset) for model in (own, built_in)]
    assert len({own.digest for own, _ in keys.values()}) == 3
    assert len({built_in.digest for _, built_in in keys.values()}) == 1
    assert "environment" not in keys[None][0].parts
    assert environment_part(runs_own_code=False) == {}


def test_uv_reads_a_password_from_a_variable(
    home: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", index.as_posix())
    (wheel,) = index.rglob("tiny_numbers*.whl")
    made = obtain(asks(f"tiny-numbers @ file://${{PLACE}}/{wheel.relative_to(index)}"))
    assert added(made) == ["tiny-numbers==1.0"]
    assert index.as_posix() not in (made / RECORD).read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs exactly one of requirements, lock, image, not none"),
        ({"requirements": ["a"], "image": "b"}, "not requirements and image"),
        ({"requirements": ["-e ."]}, "'-e .' is not a requirement; write for example lightgbm==4.6.0"),
        ({"lock": "uv.lock"}, "environment.lock: no file at .*uv.lock; `uv lock` writes one"),
        ({"requirement": ["a"]}, "environment.requirement: unknown key; did you mean 'requirements'"),
    ],
)
def test_a_wrong_section_is_refused_with_what_to_do(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    spec = write_spec(tmp_path, small_spec(tmp_path, environment=given))
    with pytest.raises(SpecError, match=words):
        load_spec(spec)


def test_a_process_is_in_one_environment_only(home: Path, tmp_path: Path, in_environment: Any) -> None:
    in_environment(asks("a==1"))
    with pytest.raises(EnvironmentRefused, match=r"is in the environment \w+ \(a==1\) already"):
        load_spec(small_spec(tmp_path, environment={"requirements": ["b"]}))
    (tmp_path / "manifest.json").touch()  # a published version: it does not run here
    path = write_spec(tmp_path, small_spec(tmp_path, environment={"requirements": ["b"]}))
    assert load_spec(path).environment == asks("b")


def test_own_operators_and_modules_import_what_the_spec_asks_for(
    home: Path, index: Path, tmp_path: Path
) -> None:
    """Every stage as a process: the dataset with an operator of a package, the training in separate processes, and
    the export, which needs both."""
    (tmp_path / "net.py").write_text(NET)
    sections: dict[str, Any] = {
        "features": [HALVED],
        "model": {"module": "net.py:Net"},
        "environment": {"requirements": ["tiny-operators==2.1"]},
    }
    spec = write_spec(tmp_path, small_spec(tmp_path, rows=600, **sections))
    env = {**os.environ, "SERIN_HOME": str(home)}
    said = serin_process("check", str(spec), env=env).stdout
    assert "your code has tiny-numbers==1.0, tiny-operators==2.1" in said
    trained = json.loads(serin_process("train", str(spec), "--json", env=env).stdout)
    receipt = json.loads((Path(trained["path"]).parent / "receipt.json").read_text())
    assert "(tiny-operators==2.1)" in receipt["environment"]
    made = json.loads(serin_process("export", str(spec), "--json", env=env).stdout)
    manifest = json.loads((Path(made["path"]) / "manifest.json").read_text())
    assert manifest["lineage"]["environment"] == "tiny-numbers==1.0, tiny-operators==2.1"


@pytest.mark.parametrize("place", ["elsewhere", "here"])
def test_a_run_takes_its_lock_along_and_nothing_that_the_lock_gives(
    home: Path, index: Path, tmp_path: Path, place: str
) -> None:
    """The sender packs own code that imports from the environment. A worker with another home opens the package after
    the sender's folder is gone, and so does who reads the spec of a version that was made of it."""
    write_wheel(index, "numpy", NUMPY, {"numpy.py": ""})
    project = tmp_path / "project"
    document = small_spec(
        project,
        rows=50,
        features=[HALVED],  # type: ignore[arg-type]
        model={"module": "net.py:Net"},
        environment={"lock": "uv.lock"},
    )
    (project / "net.py").write_text(NET)
    write_lock(project, "tiny-operators", f"numpy=={NUMPY}")
    spec, env = write_spec(project, document), {**os.environ, "SERIN_STORE": str(tmp_path / "store")}
    sent = run(sys.executable, "-c", SEND, spec, place, env={**env, "SERIN_HOME": str(home)}).stdout
    reference, *contents = sent.split()
    tables = {"parcels.parquet"} if place == "elsewhere" else set()
    assert set(contents) == {"net.py", "spec.yaml", "uv.lock", *tables}
    shutil.rmtree(project)
    worker = {**env, "SERIN_HOME": str(tmp_path / "worker")}
    opened = run(sys.executable, "-c", OPEN, reference, env=worker, cwd=tmp_path).stdout
    assert opened.split() == ["uv.lock", *LOCKED]
    version = run(sys.executable, "-c", STORED, reference, env=worker, cwd=tmp_path).stdout
    assert version.split() == [document["name"], *LOCKED]


def test_a_process_imports_from_its_own_environment_and_not_from_that_of_its_parent(
    home: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = str(home / "environments" / "other" / "site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, parents])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", parents]))
    monkeypatch.setattr(packages, "_entered", [])
    enter(asks("tiny-numbers"))
    now = packages.entered()
    assert now is not None
    folder = str(now.folder)
    assert (sys.path[-1], os.environ["PYTHONPATH"]) == (folder, os.pathsep.join(["/mine", folder]))
    assert parents not in sys.path


def test_an_image_is_refused_by_every_process_outside_of_it(home: Path, tmp_path: Path) -> None:
    image = {"image": "registry/mine:1"}
    spec = write_spec(tmp_path, small_spec(tmp_path, rows=600, environment=image))
    env = {**os.environ, "SERIN_HOME": str(home)}
    assert "only workers on Kubernetes take it" in serin_process("check", str(spec), env=env).stdout
    said = serin_process("etl", str(spec), env=env, code=2).stderr
    assert "the image of a Job on Kubernetes (registry/mine:1), and this process is not in a Job" in said
    other = serin_process("etl", str(spec), env={**env, "SERIN_IMAGE": "serin-cpu:0.1.0"}, code=2).stderr
    assert "this one runs in serin-cpu:0.1.0" in other
    serin_process("etl", str(spec), env={**env, "SERIN_IMAGE": "registry/mine:1"})


def test_features_of_own_operators_know_the_environment(in_environment: Any) -> None:
    data = DataSpec.model_construct(tables={}, target=TargetSpec(expression="x", task="regression"))
    own = FeatureSpec(columns=("x",), steps=("tests.fakes.own_operators:Squash",))
    usual = FeatureSpec(columns=("x",), steps=("normalize",))
    in_environment(asks("a==1"))
    assert "environment" in dataset_key(data, [own], []).parts
    assert "environment" not in dataset_key(data, [usual], []).parts


def test_one_process_watches_models_with_different_environments(
    home: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = small_spec(tmp_path, rows=50, monitoring={"retrain": ["data"]})
    asked = {"one": ["tiny-operators"], "two": ["tiny-operators==2.1"]}
    specs = {name: {**document, "environment": {"requirements": each}} for name, each in asked.items()}
    found = {name: (Release(model=name, version=1), PipelineSpec(**spec)) for name, spec in specs.items()}
    monkeypatch.setattr(watch, "find_version", lambda name, _: found[name])
    monkeypatch.setattr(watch, "sent_version", lambda live: {**specs[live.model], "features": [HALVED]})
    monkeypatch.setattr(watch, "emit_event", lambda *_, **__: None)
    monkeypatch.setattr(watch, "get_run_logger", logging.getLogger)
    for name in specs:
        asyncio.run(watch.look_at_tables.fn(name))
    keys = {json.loads((home / "watch" / f"{name}.json").read_text())["told"] for name in specs}
    assert len(keys) == 2
    assert packages.entered() is None


class Workers:
    """Dask workers that somebody else has started, in this process."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        return {"tcp://worker": function(*arguments)}


def test_dask_workers_elsewhere_import_from_the_environment_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    spec = asks("a==1")
    for folder in (tmp_path, tmp_path / "not-mounted"):
        monkeypatch.setattr(packages, "_entered", [Entered(spec=spec, digest=spec.digest(), folder=folder)])
        if folder.is_dir():
            _share_environment(Workers(), "tcp://scheduler")
            assert sys.path[-1] == os.environ["PYTHONPATH"] == str(tmp_path)
        else:
            with pytest.raises(EngineFailed, match=r"do not see the environment .*not-mounted: tcp://worker"):
                _share_environment(Workers(), "tcp://scheduler")
