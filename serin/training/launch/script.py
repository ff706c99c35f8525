"""What a user's training script is given and how its end is read. No torch here.

    SERIN_DATASET      the dataset's folder                                   (absent without a data section)
    SERIN_CHECKPOINTS  a folder to save into; what lies there survives
    SERIN_RESUME       1 when an earlier attempt left something there, else 0
    SERIN_OUTPUT       an empty folder for the model
    SERIN_EPOCHS       the budget: training.epochs
    SERIN_SEED         training.seed
    SERIN_OPTIONS      model.options, as JSON

Exit code 0: the model is in SERIN_OUTPUT. 75: stopped after saving, run me again. Anything else: failed. SIGTERM means:
save and end with 75. serin.training.foreign.own_script reads all this; a script may do so itself.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

from serin.errors import ModelUnfit, Preempted
from serin.training.launch.job import TrainingJob
from serin.training.launch.status import Status

METRICS = "metrics.json"
_LOG_TAIL_BYTES = 4096


def output_folder(folder: Path) -> Path:
    return folder / "output"


def prepare_script(job: TrainingJob, folder: Path) -> dict[str, str]:
    """The folders of an attempt, and the variables that name them. What an earlier attempt half left is removed."""
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
    """How a script ended that was not asked to; None when it ended well."""
    if exit_code == 0:
        return None
    if exit_code == Preempted.exit_code:
        return Status(state="preempted", exit_code=exit_code)
    how = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else last_words(log)
    return Status(state="failed", exit_code=exit_code, reason=how)


def last_words(log: Path) -> str:
    """The last line that a script wrote: of a Python traceback that is the error."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:400] if lines else "ended without a word"


def own_metrics(folder: Path, what: str) -> dict[str, float]:
    """What the script measured itself; nothing when it left nothing."""
    file = output_folder(folder) / METRICS
    if not file.is_file():
        return {}
    try:
        found = {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        reason = f"{METRICS} does not hold names and numbers: {error}"
        raise ModelUnfit(what=what, reason=reason) from error
    if wrong := [name for name, value in found.items() if not math.isfinite(value)]:
        raise ModelUnfit(what=what, reason=f"{METRICS}: {wrong[0]} is not finite")
    return found
