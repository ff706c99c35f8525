"""Where a pipeline can be struck, and what can be killed with -9 there."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from serin.host.process_scan import stack_processes
from serin.host.state import POOLS
from serin.host.wiring import worker_name
from serin.store.stage_keys import notes
from tests.chaos.pipelines import FINAL, Pipelines
from tests.signals import kill_9

_STEPS = 5  # that a training has made when it is struck
_QUEUED_AGAIN_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One pipeline's run, and those of the stages it has placed."""

    stack: Pipelines
    name: str
    run: str

    @property
    def training(self) -> Path | None:
        """The folder of the training that this pipeline's run has begun."""
        for record in sorted((self.stack.home / "runs").glob("train-*/training.json")):
            script = json.loads(record.read_text())["model"]["script"]
            if Path(script).parent.name == self.name:
                return record.parent
        return None

    @property
    def steps(self) -> int:
        """That the training has made."""
        file = self.training / "checkpoints" / "step.json" if self.training else None
        return json.loads(file.read_text()) if file and file.exists() else 0

    def placed(self) -> list[str]:
        return [run.id for run in self.stack.unfinished() if run.parent is not None]

    def ended(self) -> str | None:
        """The state it has ended in; one that is recorded as crashed may be queued again for a while."""
        found = self.stack.run(self.run)
        queued_again = found.state == "CRASHED" and time.time() < found.since + _QUEUED_AGAIN_S
        return found.state if found.state in FINAL and not queued_again else None


Moment = Callable[[Scene], bool]
Strike = Callable[[Scene], set[int]]  # whom it has killed


def in_stage(stage: str) -> Moment:
    """The stage's work has begun in this run or in one that it has placed."""

    def look(scene: Scene) -> bool:
        told = [entry for run in (scene.run, *scene.placed()) for entry in notes(scene.stack.home, run)]
        begun = any(
            entry["stage"] == stage and entry["ran"] and "placed as" not in entry["why"] for entry in told
        )
        return begun and (stage != "train" or scene.steps > _STEPS)

    return look


def after_stage(stage: str) -> Moment:
    """It is done, and that it is was written down last."""

    def look(scene: Scene) -> bool:
        return (scene.stack.home / "stages" / stage / f"last-{scene.name}.parts").exists()

    return look


def after_export(scene: Scene) -> bool:
    """Published; whether this was written down elsewhere is a matter of luck, and must not matter."""
    return bool(scene.stack.versions(scene.name))


def in_dask(scene: Scene) -> bool:
    return bool(_dask(scene))


def _dask(scene: Scene) -> list[int]:
    """The processes of the run's Dask cluster that compute."""
    return scene.stack.children_at(scene.run, "spawn_main")


MOMENTS: dict[str, Moment] = {
    "in etl": in_stage("etl"), "after etl": after_stage("etl"), "in train": in_stage("train"),
    "after train": after_stage("train"), "in export": in_stage("export"), "after export": after_export,
}  # fmt: skip


def is_over(moment: str, scene: Scene) -> bool:
    """Whether the pipeline has gone on to the next one."""
    names = list(MOMENTS)
    later = names[names.index(moment) + 1 :]
    return bool(later) and MOMENTS[later[0]](scene)


def _kill(pids: Iterable[int | None]) -> set[int]:
    return kill_9(*(pid for pid in list(pids) if pid is not None))


def kills_engine(scene: Scene) -> set[int]:
    found = scene.stack.processes(scene.run)
    return _kill(found.engines if found else ())


def kills_stage(scene: Scene) -> set[int]:
    """The process of the stage that was placed, not that of the pipeline which waits for it."""
    found = [scene.stack.processes(run) for run in scene.placed()]
    return _kill(pid for each in found if each for pid in each.engines)


def kills_dask(scene: Scene) -> set[int]:
    return _kill(_dask(scene)[-1:])


def kills_rank(scene: Scene) -> set[int]:
    return _kill(scene.stack.children_at("", "train.py")[-1:])


def kills(*parts: str) -> Strike:
    def strike(scene: Scene) -> set[int]:
        return _kill([scene.stack.pid(part) for part in parts])

    return strike


kills_workers = kills(*(worker_name(pool) for pool in POOLS))


def kills_worker_and_engine(scene: Scene) -> set[int]:
    """Nobody is left who could say that the run has ended."""
    worker = kills(worker_name("cpu"))(scene)
    run = kills_engine(scene)
    return worker | run if run else run


def kills_supervisor(scene: Scene) -> set[int]:
    return _kill([scene.stack.stack.supervisor_pid])


def kills_all(scene: Scene) -> set[int]:
    return _kill(stack_processes(scene.stack.home))
