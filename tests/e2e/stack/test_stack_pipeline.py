"""The pipeline on a real stack: Prefect places it, a killed training goes on, Triton serves what came out.

One story in one test, since every part of it needs what the part before has built.
"""

import json
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import pyarrow.parquet as pq
import pytest

from serin import Pipeline
from serin.formats.bundle import read_manifest
from serin.formats.trained import RECORD
from serin.host.process_scan import run_processes
from serin.host.supervisor import Supervisor
from serin.machine.leases import holders
from serin.store.store import Store
from tests.chaos.pipelines import TRAIN
from tests.e2e.prefect_page import PrefectPage
from tests.e2e.whole_stack import Stack, until
from tests.fakes.gpus import write_inventory
from tests.fakes.small_pipeline import NAME, small_spec, write_spec
from tests.signals import hit

# Times that were measured, which run and version it was, who was live then, and where the tables lie.
TELL_OF_THE_RUN = {"gate.json", "card.md", "champion.json", "spec.yaml", "model.onnx"}
ROLLOUT = {"steps": [50, 100], "step_time": "0s", "min_requests": 0, "bake": "0s", "deadline": "30s"}
LONG_TRAINING = {
    "epochs": 4,
    "batch_rows": 16,
    "learning_rate": 0.01,
    "seed": 3,
    "precision": "fp32",  # where a CPU has bf16 it is measured which is faster: a busy one answers now so, now so
    "checkpoint_every_steps": 50,
}


@pytest.mark.timeout(1500)
def test_killed_pipelines_resume_inline_and_placed_to_the_same_model_which_is_served(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"training": LONG_TRAINING, "rollout": ROLLOUT}
    spec = write_spec(tmp_path, small_spec(tmp_path / "data", rows=6000, **sections))

    began = time.monotonic()
    others = _trainings(stack)
    run = stack.start("run", str(spec))
    folder, killed = _kill_a_training_worker(stack, run, others)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    print(f"first run, killed at step {killed}: {time.monotonic() - began:.1f} s")
    _was_resumed(folder, killed)

    _answers_as_it_was_trained(stack, tmp_path)

    began = time.monotonic()
    monkeypatch.setenv("SERIN_HOME", str(stack.home))
    found = [Pipeline.from_yaml(spec).run(), Pipeline.from_yaml(spec).roll_out()]
    assert [(model.version, model.ran) for model in found] == [(1, False), (1, False)]
    assert "live already" in found[1].why
    print(f"second run, from Python, nothing changed: {time.monotonic() - began:.1f} s")
    assert _versions(stack) == [1]

    began = time.monotonic()
    killed_run = _kill_a_placed_pipeline_and_its_worker(stack, _elsewhere(spec, tmp_path / "elsewhere"))
    print(f"found and marked as crashed: {time.monotonic() - began:.1f} s after it was asked for")
    stack.serin("run", "--resume", killed_run)
    print(f"placed run, killed and resumed: {time.monotonic() - began:.1f} s")
    inline, placed = (_made(stack, version) for version in _versions(stack))
    assert placed == inline, "one process, its training killed, and placed stages, their pipeline killed"
    assert placed["weights"], "nothing was compared"
    listed = [
        (found["kind"], found["model"], found["version"])
        for found in stack.ask("runs", "list")
        if found["model"] == NAME and found["kind"] in ("pipeline", "etl", "train", "export")
    ]
    assert sorted(listed, key=str) == [
        ("etl", NAME, None),
        ("export", NAME, 2),
        *[("pipeline", NAME, version) for version in (1, 1, 2)],
        ("train", NAME, None),
    ]

    _left_no_secret_and_no_pickle(stack)


@pytest.mark.timeout(1500)
def test_a_person_sees_the_run_its_pages_with_pictures_and_a_form_for_the_spec(
    stack: Stack, tmp_path: Path, page: PrefectPage
) -> None:
    if not _versions(stack):  # alone, without the story above
        stack.serin("run", "--no-serve", str(write_spec(tmp_path, small_spec(tmp_path / "data"))))
    artifacts = {
        found["key"]: found["latest_id"] for found in stack.call("POST", "/artifacts/latest/filter", {})
    }
    body = {"flow_runs": {"tags": {"all_": [NAME]}}, "flows": {"name": {"any_": ["pipeline"]}}}
    run = stack.call("POST", "/flow_runs/filter", {**body, "sort": "START_TIME_ASC"})[0]
    seen = page.page
    page.open("/artifacts", *(f"{NAME}-{stage}" for stage in ("data", "training", "gate")))
    for stage, words in (("data", "Features"), ("training", "valid_auc"), ("gate", "Variants")):
        page.open(f"/artifacts/artifact/{artifacts[f'{NAME}-{stage}']}", NAME, words)
        seen.wait_until(_SHOWS_A_PICTURE, f"a picture on the page of {stage}")
        seen.picture(tmp_path / f"{stage}.png")

    shown = (run["name"], NAME, "Completed", f"published {NAME}-v1", "training on the CPU")
    page.open(f"/runs/flow-run/{run['id']}", *shown)
    assert seen.picture(tmp_path / "run.png").startswith(b"\x89PNG")

    page.open(f"/deployments/deployment/{run['deployment_id']}/run", "spec", "fresh", "Validate parameters")
    seen.press("Serin pipeline")
    seen.wait_for("TrainingSpec", "RolloutSpec", "MonitoringSpec")
    seen.picture(tmp_path / "form.png")


@pytest.mark.timeout(1500)
def test_who_cancels_a_pipeline_ends_its_stage_ranks_and_dask_workers_and_frees_the_gpus(
    stack: Stack, tmp_path: Path
) -> None:
    """One in a process of its own while Dask computes, one that has placed a training of two ranks."""
    write_inventory(stack.home, ("GPU-a", "GPU-b"))
    training = {"epochs": 1, "processes": 2}
    specs = {}
    for name, engine, rows in (("cancelled-ranks", "process", 3000), ("cancelled-dask", "dask", 2000)):
        folder = tmp_path / name  # rows of its own: one would find what the other has made of the same
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        model = {"script": "train.py", "options": {"steps": 100_000}}
        spec = small_spec(
            folder / "data", rows=rows, model=model, training=training, etl={"engine": engine}
        )  # fmt: skip
        specs[name] = write_spec(folder, spec | {"name": name})
    ranks = stack.begin(specs["cancelled-ranks"], "--placed", "--no-serve")
    dask = stack.begin(specs["cancelled-dask"], "--no-serve")

    until(lambda: _running(stack, dask, "spawn_main"), "Dask's workers")
    _cancel(stack, dask)
    stage = until(lambda: _training(stack, ranks), "the training holds its GPUs")
    until(lambda: len(holders(stack.home)) == 2, "one for each rank")
    until(lambda: len(_running(stack, stage, "train.py")) == 2, "both ranks of torchrun")
    engine = until(lambda: _only_engine(stack, stage), "the training's one engine")
    assert b"deployments.workers.warm_process" in Path(f"/proc/{engine}/cmdline").read_bytes(), (
        "no process had waited for it"
    )
    assert "train placed as train/placed" in stack.serin("runs", "logs", ranks)
    assert "is cancelled; `serin run --resume" in stack.serin("runs", "cancel", ranks)
    assert "is cancelled; only one that has not ended can be cancelled" in stack.serin(
        "runs", "cancel", ranks, code=2
    )

    ended = {ranks, stage, dask}
    until(lambda: {stack.state(run) for run in ended} == {"CANCELLED"}, "all are cancelled")
    until(lambda: not ended & run_processes(stack.home).keys(), "no process of theirs is left")
    assert holders(stack.home) == ()
    store = Store(str(stack.home / "store"))
    assert (store.versions("cancelled-ranks"), store.versions("cancelled-dask")) == ([], [])
    write_inventory(stack.home, ())  # as the other tests of this stack find it


def _cancel(stack: Stack, run: str) -> None:
    """What Prefect's page and `prefect flow-run cancel` say."""
    state = {"type": "CANCELLING", "name": "Cancelling"}
    stack.call("POST", f"/flow_runs/{run}/set_state", {"state": state})


def _only_engine(stack: Stack, run: str) -> int | None:
    """A child that it starts looks like the engine itself until it has become another program."""
    (engine,) = run_processes(stack.home)[run].engines
    return engine


def _running(stack: Stack, run: str, words: str) -> list[int]:
    """Processes that a run has started, with `words` on their command line."""
    found = run_processes(stack.home).get(run)
    lines = {}
    for pid in found.others if found else ():
        with suppress(OSError):
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return [pid for pid, line in lines.items() if words.encode() in line]


def _training(stack: Stack, run: str) -> str | None:
    """The training's run, once it holds a GPU."""
    body = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "flows": {"name": {"any_": ["train"]}}}
    found = stack.call("POST", "/flow_runs/filter", body)
    return str(found[0]["id"]) if found and holders(stack.home) else None


def _elsewhere(spec: Path, folder: Path) -> Path:
    """The same spec with the same rows in another file: no dataset is known for it, and the same one comes out."""
    folder.mkdir()
    data = folder / "data"
    shutil.copytree(spec.parent / "data", data)
    text = spec.read_text()
    assert str(spec.parent / "data") in text
    (folder / "spec.yaml").write_text(text.replace(str(spec.parent / "data"), str(data)))
    return folder / "spec.yaml"


def _made(stack: Stack, version: int) -> dict[str, Any]:
    """All that one pipeline has left, by digests; of the served model the graph, for its name holds the version."""
    bundle = Path(Store(str(stack.home / "store")).bundle(NAME, version).path)
    manifest = read_manifest(bundle)
    weights = stack.home / "runs" / manifest.lineage["training"] / "result" / RECORD
    return {
        "dataset": manifest.lineage["dataset"],
        "weights": json.loads(weights.read_text())["weights_sha256"],
        "metrics": manifest.metrics,
        "graph": onnx.load(str(bundle / "model.onnx")).graph.SerializeToString(deterministic=True),
        "bundle": {name: file.sha256 for name, file in manifest.files.items() if name not in TELL_OF_THE_RUN},
        "files": sorted(manifest.files),
    }


_SHOWS_A_PICTURE = "[...document.images].some(i => i.src.startsWith('data:image/') && i.naturalWidth > 200)"


def _kill_a_placed_pipeline_and_its_worker(stack: Stack, spec: Path) -> str:
    """Both with -9, while a stage runs that it has placed: nobody is left to say that it ended. The run's name, once
    the stack has found out."""
    run = stack.begin(spec, "--placed", "--no-serve", "--fresh", "train")
    until(lambda: _has_placed_a_stage(stack, run), "the stage's process beside the pipeline's")
    victims = run_processes(stack.home)[run].engines
    worker = Supervisor(stack.home).pid("worker-cpu")
    assert worker is not None
    for victim in (worker, *victims):
        hit(victim)
    until(lambda: stack.state(run) == "CRASHED", "it is marked as crashed")
    name: str = stack.call("GET", f"/flow_runs/{run}")["name"]
    told = stack.serin("runs", "show", name)
    assert "its process is gone" in told
    assert "etl          ran: placed as etl/placed" in told
    return name


def _has_placed_a_stage(stack: Stack, run: str) -> bool:
    """And both have a process; others may not be gone yet."""
    body = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
    stages = {str(found["id"]) for found in stack.call("POST", "/flow_runs/filter", body)}
    found = run_processes(stack.home)
    return run in found and bool(found[run].engines and stages & found.keys())


def _kill_a_training_worker(stack: Stack, run: subprocess.Popen[str], others: set[Path]) -> tuple[Path, int]:
    """kill -9 as soon as there is a checkpoint to go on from; the training's folder and the step of that checkpoint.

    `others` are the trainings that other tests have left on this stack.
    """
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        for folder in _trainings(stack) - others:
            saved = sorted(folder.glob("checkpoints/step-*/COMPLETE"))
            worker = _worker_of(folder) if saved else None
            if worker:
                hit(worker)
                return folder, int(saved[-1].parent.name.removeprefix("step-"))
        time.sleep(0.02)
    raise AssertionError("no training worker with a checkpoint within 600 s")


def _trainings(stack: Stack) -> set[Path]:
    return set((stack.home / "runs").glob("train-*"))


def _worker_of(folder: Path) -> int | None:
    """The process that trains in `folder`."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "serin.training.programs.worker" in words and str(folder) in words:
            return int(entry.name)
    return None


def _was_resumed(folder: Path, killed: int) -> None:
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    starts = [line["step"] for line in lines if line["event"] == "started"]
    assert starts[0] == 0
    assert len(starts) == 2, "killed once, so started twice"
    assert starts[1] >= killed > 0


def _answers_as_it_was_trained(stack: Stack, tmp_path: Path) -> None:
    """Through the gateway, and right more often than a coin."""
    table = pq.read_table(tmp_path / "data" / "parcels.parquet").slice(0, 200)
    rows, scores = tmp_path / "rows.parquet", tmp_path / "scores.parquet"
    pq.write_table(table.drop_columns(["hours"]), rows)
    stack.serin("predict", NAME, str(rows), "--out", str(scores))
    late = [hours > 30 for hours in table["hours"].to_pylist()]
    guessed = [score > 0.5 for score in pq.read_table(scores)["score"].to_pylist()]
    assert sum(a == b for a, b in zip(late, guessed, strict=True)) > 150


def _left_no_secret_and_no_pickle(stack: Stack) -> None:
    """In nothing that anybody wrote while all this happened; results of runs are JSON."""
    password = stack.login.partition(":")[2].encode()
    places = ("logs/*.log", "releases/logs/*.log", "runs/*/logs/*.log", "gateway/*.log")
    logs = [path for place in places for path in stack.home.glob(place)]
    assert len(logs) >= 5
    assert [path for path in logs if password in path.read_bytes()] == []
    described = list((stack.home / "stack" / "conf.d").iterdir())  # how the supervisor starts them
    assert [path for path in described if path.stat().st_mode & 0o077] == []
    results = [json.loads(path.read_bytes()) for path in (stack.home / "prefect" / "storage").iterdir()]
    assert results


def _versions(stack: Stack) -> list[int]:
    return [entry["version"] for entry in stack.ask("models", "list") if entry["model"] == NAME]
