"""The environment of a user's training script, and how its exit is interpreted. Does not import torch.

    SERIN_DATASET      the dataset's folder                                   (absent without a data section)
    SERIN_CHECKPOINTS  a folder for checkpoints, which is kept
    SERIN_RESUME       1 when an earlier attempt left something there, else 0
    SERIN_OUTPUT       an empty folder for the model
    SERIN_EPOCHS       the budget: training.epochs
    SERIN_SEED         training.seed
    SERIN_OPTIONS      model.options, as JSON

Exit code 0: the model is in SERIN_OUTPUT. 75: stopped after saving, to be run again. Anything else: failed. SIGTERM
means: save and exit with 75. serin.training.foreign.own_script reads all this; a script may do so itself.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

from serin.errors import ModelUnfit, Preempted
from serin.training.launch.job import Status, TrainingJob

METRICS = "metrics.json"
_LOG_TAIL_BYTES = 4096


def output_folder(folder: Path) -> Path:
    return folder / "output"


def prepare_script(job: TrainingJob, folder: Path) -> dict[str, str]:
    """Creates the folders of an attempt and returns the variables that name them. Removes partial output of an earlier
    one."""
    checkpoints, output = folder / "checkpoints", output_folder(folder)
    checkpoints.mkdir(exist_ok=True)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    given = {
        "SERIN_RUN": str(folder),
        "SERIN_CHECKPOINTS": str(checkpoints),
        "SERIN_RESUME": "1" if any(checkpoints.iterdir()) else "0",
        "SERIN_OUTPUT": str(output),
        "SERIN_EPOCHS": str(job.training.epochs),
        "SERIN_SEED": str(job.training.seed),
        "SERIN_OPTIONS": json.dumps(job.model.options),
    }
    return {**given, "SERIN_DATASET": job.dataset} if job.dataset else given


def script_status(exit_code: int, log: Path) -> Status | None:
    """Returns how a script failed or stopped; None when it succeeded."""
    if exit_code == 0:
        return None
    if exit_code == Preempted.exit_code:
        return Status(state="preempted", exit_code=exit_code)
    return Status(state="failed", exit_code=exit_code, reason=how_it_ended(exit_code, log))


def how_it_ended(exit_code: int, log: Path | None = None) -> str:
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return "exited without output" if log is None else last_words(log)


def last_words(log: Path) -> str:
    """Returns the last line that a script wrote: of a Python traceback that is the error."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:400] if lines else "exited without output"


def own_metrics(folder: Path, what: str) -> dict[str, float]:
    """Returns the metrics that the script reported; empty when there are none."""
    file = output_folder(folder) / METRICS
    if not file.is_file():
        return {}
    try:
        found = {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        reason = f"{METRICS} must contain names and numbers: {error}"
        raise ModelUnfit(what=what, reason=reason) from error
    if wrong := [name for name, value in found.items() if not math.isfinite(value)]:
        raise ModelUnfit(what=what, reason=f"{METRICS}: {wrong[0]} is not finite")
    return found
