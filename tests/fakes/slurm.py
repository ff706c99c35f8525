"""Slurm's commands for tests of the worker alone: each keeps its jobs as files. tests/cluster has a real Slurm."""

from dataclasses import dataclass
from pathlib import Path

import pytest

_COMMANDS = {
    "sbatch": """n=$(($(ls "$D/jobs" | wc -l) + 1))
printf '%s\\n' "$@" > "$D/options-$n"; cat > "$D/script-$n"; env -0 > "$D/environment-$n"
for word in "$@"; do case $word in --job-name=*) name=${word#*=};; esac; done
echo "$n|$name|PENDING|0|Resources||" > "$D/jobs/$n"; echo "$n" """,
    "squeue": """[ -e "$D/silent" ] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
cat "$D"/jobs/* 2>/dev/null; true""",
    "scancel": """sed -i 's/|PENDING|/|CANCELLED|/; s/|RUNNING|/|CANCELLED|/' "$D/jobs/$1" """,
    "scontrol": """echo "JobId=$4 ExitCode=0:15" """,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSlurm:
    folder: Path

    def add(self, name: str, state: str, *, restarts: int = 0) -> int:
        number = len(self.submitted()) + 1
        self.set(number, name, state, restarts=restarts)
        return number

    def set(self, number: int, name: str, state: str, *, restarts: int = 0) -> None:
        (self.folder / "jobs" / str(number)).write_text(f"{number}|{name}|{state}|{restarts}|None|n1|\n")

    def submitted(self) -> list[str]:
        """The names of all jobs there ever were."""
        files = sorted((self.folder / "jobs").iterdir(), key=lambda path: int(path.name))
        return [path.read_text().split("|")[1] for path in files]

    def environment(self, number: int) -> dict[str, str]:
        words = (self.folder / f"environment-{number}").read_bytes().decode().split("\0")
        return dict(word.split("=", 1) for word in words if word)

    def options(self, number: int) -> list[str]:
        return (self.folder / f"options-{number}").read_text().splitlines()


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Puts the commands first on PATH."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, script in _COMMANDS.items():
        file = folder / "bin" / name
        file.write_text(f"#!/bin/bash\nD={folder}\n{script}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    return FakeSlurm(folder=folder)
