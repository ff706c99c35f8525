"""`serin gc` leaves alone what a living process uses, in whichever pid namespace, and what was found lately."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from serin.machine.locks import unused
from serin.store.retention import Garbage, Policy, collect_garbage
from serin.store.runs import run_folder, runs
from serin.store.store import Store
from tests.fakes.locks import forget_own_locks

KEY, EDITION = "a" * 64, "b" * 64
USES = {
    "workspace": "with store.workspace() as folder: (folder / 'part').write_text('half'); ready()",
    "dataset": "assert store.find_dataset('a' * 64); ready()",
    "version": "store.bundle('m', 1, hold=True); ready()",
    "kept file": "with store.using_kept() as kept: (kept / 'converted' / 'half-1').write_text('half'); ready()",
    "table": "hold_input(home, home / 'tables' / 'f.parquet'); ready()",
    "graph": "hold_input(home, home / 'imported' / 'mlflow-m-1'); ready()",
    "run": "run_folder(home, 'train-1'); ready()",
}
PROGRAM = """
import sys
from pathlib import Path
from serin.store.runs import hold_input, run_folder
from serin.store.store import Store
from tests.fakes.locks import forget_own_locks
store, home = Store(sys.argv[1]), Path(sys.argv[2])
def ready():
    print("ready", flush=True)
    sys.stdin.read()
{use}
"""


def namespaces() -> list[str]:
    """How to start a process in another pid namespace here; empty when the kernel lets nobody."""
    for options in (["--pid", "--fork"], ["--user", "--map-root-user", "--pid", "--fork"]):
        command = ["unshare", *options, "--kill-child"]
        if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode:
            return command
    return []


def old(path: Path) -> None:
    """Not asked for in a long time: the folder and all in it."""
    for entry in (path, *path.rglob("*")):
        os.utime(entry, (0, 0))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One of each kind, and all of it old."""
    made = Store(str(tmp_path / "store"))
    with made.workspace() as folder:
        text = {"digest": "d" * 64, "splits": {"train": {"rows": 3}}}
        (folder / "dataset.json").write_text(json.dumps(text))
        made.publish_dataset(KEY, EDITION, folder)
    for version in (made.reserve_version("m"), made.reserve_version("m")):
        with made.workspace() as folder:
            (folder / "manifest.json").write_text('{"lineage": {}}')
            made.publish_bundle("m", version, folder)
    (made.kept_folder() / "converted").mkdir(parents=True)
    (made.kept_folder() / "converted" / ("e" * 64)).write_text("rows")
    (tmp_path / "home/runs/train-1/result").mkdir(parents=True)
    (tmp_path / "home/tables").mkdir()
    (tmp_path / "home/tables/f.parquet").write_text("rows")
    (tmp_path / "home/imported/mlflow-m-1").mkdir(parents=True)
    (tmp_path / "home/imported/mlflow-m-1/model.onnx").write_text("graph")
    old(tmp_path)
    return made


def garbage(store: Store, *, keep_days: float = 7.0, remove: bool = True) -> dict[str, Garbage]:
    home = Path(store.url).parent / "home"
    policy = Policy(keep_versions=1, keep_days=keep_days)
    return {found.kind: found for found in collect_garbage(store, home, policy, remove=remove)}


@contextmanager
def user(store: Store, kind: str, start: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that uses one thing until the block ends."""
    program = PROGRAM.format(use=USES[kind])
    command = [*start, sys.executable, "-c", program, store.url, str(Path(store.url).parent / "home")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n", "it ended before it used anything"
        yield process
    finally:
        process.kill()
        process.stdout.read()  # until the last of its processes is dead: an end of its input would end it in peace
        process.communicate()


@pytest.mark.parametrize("where", ["here", "in another pid namespace"])
def test_gc_takes_nothing_that_a_living_process_uses_and_all_of_it_afterwards(
    tmp_path: Path, store: Store, where: str
) -> None:
    start = namespaces() if where != "here" else []
    if where != "here" and not start:
        pytest.skip("unshare cannot make a pid namespace here")
    forget_own_locks()
    for kind in USES:
        with user(store, kind, start):
            assert kind not in garbage(store, keep_days=0, remove=False)
            old(tmp_path)  # however long ago it was found
            assert kind not in garbage(store, keep_days=0, remove=False)
    # All of them have ended without a word; nobody uses anything any more.
    old(tmp_path)
    found = garbage(store, keep_days=0)
    assert found.keys() == USES.keys()
    assert garbage(store, keep_days=0) == {}
    assert store.versions("m") == [2]
    assert store.datasets() == []
    locks = [path.name for path in (tmp_path / "store/locks").rglob("*") if path.is_file()]
    assert sorted(locks) == ["2", "kept"]  # of what is there


def test_what_was_found_stays_for_as_long_as_what_is_new(tmp_path: Path, store: Store) -> None:
    forget_own_locks()
    assert {"dataset", "run"} <= garbage(store, remove=False).keys()
    assert store.find_dataset(KEY) is not None
    run_folder(tmp_path / "home", "train-1")
    forget_own_locks()
    assert garbage(store, remove=False).keys() & {"dataset", "run"} == set()


def test_a_dataset_of_a_kept_version_stays_by_its_digest(tmp_path: Path, store: Store) -> None:
    forget_own_locks()
    manifest = tmp_path / "store/models/m/versions/2/manifest.json"
    manifest.write_text(json.dumps({"lineage": {"dataset": "d" * 64}}))
    assert "dataset" not in garbage(store, keep_days=0)
    assert store.datasets() == [EDITION]


@pytest.mark.parametrize("place", ["runs/train-1", "imported/mlflow-m-1", "environments/e1"])
def test_a_removal_that_is_killed_leaves_nothing_under_the_name_and_the_next_one_ends_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Half of a run, a graph or an environment must not be taken for the whole."""
    forget_own_locks()
    folder, kind = (
        tmp_path / "home" / place,
        {"runs": "run", "imported": "graph"}.get(place.partition("/")[0]),
    )
    (folder / "site-packages").mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text("{}")
    old(tmp_path)

    def killed(path: Path, **_: object) -> None:
        if path.name.startswith(folder.name):
            raise KeyboardInterrupt
        shutil.rmtree(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("serin.store.retention.shutil", SimpleNamespace(rmtree=killed))
        garbage(store)
    assert not folder.exists()
    assert runs(tmp_path / "home") == []
    assert (kind or "environment") in garbage(store)
    assert list(folder.parent.glob(f"{folder.name}*")) == []


def test_who_waits_for_a_removal_finds_nothing_and_not_half(tmp_path: Path, store: Store) -> None:
    forget_own_locks()
    program = PROGRAM.format(use="print(store.find_dataset('a' * 64))")
    command = [sys.executable, "-c", program, store.url, "x"]
    with unused(tmp_path / "store/locks/datasets" / EDITION) as free:
        assert free
        asked = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _until_it_waits_for_a_lock(asked)
        store.remove(f"datasets/{EDITION}")
    assert asked.communicate(timeout=100)[0] == "None\n"


def _until_it_waits_for_a_lock(process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
        if any(int(entry[5]) == process.pid for entry in waiting):
            return
    pytest.fail("it did not wait")


@pytest.mark.parametrize(("kind", "place"), [("table", "tables/f.parquet"), ("graph", "imported/mlflow-m-1")])
def test_an_input_that_only_this_home_has_stays_while_a_version_was_made_of_it(
    tmp_path: Path, store: Store, kind: str, place: str
) -> None:
    forget_own_locks()
    path = tmp_path / "home" / place
    spec = tmp_path / "store/models/m/versions/2/spec.yaml"
    spec.write_text(f"data: {{tables: {{frame: {path}}}}}")
    assert kind not in garbage(store, keep_days=0)
    spec.unlink()
    assert garbage(store, keep_days=0)[kind].name == path.name
    assert not path.exists()
