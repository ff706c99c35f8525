"""python -m tests.soak.damaged_files: damages every file of a home and its store, in every way, and uses what is left.

A home with two models: one with all that Serin keeps about a model, and one that is served elsewhere. Each file is
removed, emptied, cut in half, replaced by other JSON, made unreadable and copied beside itself, and then the
controller, the watcher's duties, the commands that read and the console's pages run. None may fail with anything but an
error that names the file, nothing of the other model may fail or change, and the damaged file stays as it is or is kept
under another name. Prints how many of each there were.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import typer.main
from click.testing import CliRunner

from serin import cli
from serin.errors import SerinError
from serin.host.console import account_secret, signing_key
from serin.host.state import Stack, write_stack
from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.rollbacks import Rollback, save_rollbacks
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.controller import Controller
from serin.rollout.run.status import problems, status
from serin.serving.envoy.keys import KeyFile
from serin.serving.triton.process import TritonPorts
from serin.serving.triton.release_record import Record, Served, write_record
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from serin.watcher.capture_duty import CaptureDuty
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.duty import Duty
from serin.watcher.history_duty import HistoryDuty, Promises
from serin.watcher.objectives_duty import ObjectivesDuty
from serin.watcher.quality_duty import QualityDuty
from serin.watcher.report_duties import RefusalsDuty, RolloutsDuty
from serin.watcher.retrain_duty import RetrainDuty
from tests.fakes.gpus import write_inventory
from tests.fakes.rollout import FakeFleet, FakeJudge, FakeRouter, home_inbox, home_journals
from tests.kit.elsewhere import register
from tests.unit.console.conftest import visitor
from tests.unit.console.scenes import furnish
from tests.unit.serving.bundles import MODEL

OTHER: Final = "taxis"

COMMANDS: Final = (
    "models list", f"models show {MODEL}", f"models verify {MODEL}", "rollout status", f"rollout status {MODEL}",
    f"rollout status {OTHER}", "alerts list", "captures list", f"captures show {MODEL}", f"drift {MODEL}",
    f"quality {MODEL}", f"labels show {MODEL}", "slo", "runs list", "keys list", "gpus", "gc --dry-run", "doctor",
)  # fmt: skip
PAGES: Final = (
    "/", "/rollouts", "/alerts", "/runs", "/gpus", "/login", f"/models/{OTHER}", f"/models/{MODEL}",
    f"/models/{MODEL}/rollout", f"/models/{MODEL}/traffic", f"/models/{MODEL}/drift", f"/models/{MODEL}/quality",
    f"/models/{MODEL}/captures",
)  # fmt: skip


def _half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _unreadable(path: Path) -> None:
    """Also for root."""
    path.unlink()
    path.symlink_to(path.name)


def _copy(path: Path) -> None:
    shutil.copy2(path, path.with_name(f"{path.name}.copy"))
    shutil.copy2(path, path.with_name(f"copy-of-{path.name}"))


def _copy_folder(path: Path) -> None:
    for name in (f"{path.parent.name}.copy", f"{path.parent.name}-copy"):
        shutil.copytree(path.parent, path.parent.with_name(name), dirs_exist_ok=True)


DAMAGES: Final[dict[str, Callable[[Path], Any]]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": _half,
    "foreign": lambda path: path.write_text('{"other": [1, 2]}\n'),
    "unreadable": _unreadable,
    "copy": _copy,
    "folder": _copy_folder,
}


@dataclass
class Walk:
    """`home` is put back to what `pristine` has before each case."""

    home: Path
    pristine: Path
    ran: int = 0
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def build(cls, folder: Path) -> Walk:
        walk = cls(folder / "home", folder / "pristine")
        os.environ["SERIN_HOME"] = str(walk.home)
        os.environ["SERIN_INVENTORY"] = str(walk.home / "inventory.json")
        _furnish(walk.home)
        shutil.copytree(walk.home, walk.pristine, symlinks=True)
        return walk

    def files(self) -> list[Path]:
        found = (path.relative_to(self.pristine) for path in self.pristine.rglob("*"))
        skipped = (".lock", "lock")
        return sorted(
            path
            for path in found
            if (self.pristine / path).is_file()
            and not path.name.endswith(skipped)
            and "locks" not in path.parts
        )

    def check(self, file: Path, damage: str, *, whole: bool = True) -> None:
        """Damages one file and runs everything, or the quickest only."""
        self._restore()
        path = self.home / file
        DAMAGES[damage](path)
        damaged = None if damage == "missing" or path.is_symlink() else path.read_bytes()
        case = f"{file} {damage}"
        self._controller(case, file)
        if whole:
            for name in COMMANDS:
                self._run(f"{case}: serin {name}", lambda name=name: _command(name), file)  # type: ignore[misc]
            for duty in _duties(self.home):
                self._run(f"{case}: duty {duty.name}", lambda duty=duty: duty.tick(time.time()), file)  # type: ignore[misc]
            self._pages(case)
        if damaged is not None and not _kept(path, damaged) and not _is_derived(file):
            self.wrong.append(f"{case}: its content is gone")

    def _restore(self) -> None:
        shutil.rmtree(self.home)
        shutil.copytree(self.pristine, self.home, symlinks=True)

    def _run(self, what: str, act: Callable[[], Any], file: Path) -> Any:
        self.ran += 1
        try:
            return act()
        except (SerinError, OSError) as error:  # the command and the console show both
            if file.name not in str(error) and file.parent.name not in str(error):
                self.wrong.append(f"{what}: does not name the file: {error}")
        except Exception as error:  # noqa: BLE001
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
        return None

    def _controller(self, case: str, file: Path) -> None:
        """The other model's command is obeyed, and a model's state is known or its file is named."""
        asked = Command(kind="pause", model=OTHER, by="walk")
        home_rollouts(self.home).mailbox.submit(asked)
        with contextlib.ExitStack() as ending:

            def tick() -> Controller:
                controller = _decider(self.home)
                ending.callback(controller.close)
                for _ in range(2):
                    controller.tick()
                return controller

            controller = self._run(f"{case}: controller", tick, file)
        own = file.parts[0] in ("rollouts", "external") and OTHER in str(file)
        answer = None if own else home_rollouts(self.home).mailbox.read_answer(asked.name)
        if not own and (answer is None or not answer.accepted):
            self.wrong.append(f"{case}: the command for {OTHER} was not obeyed: {answer}")
        shown = (
            self._run(f"{case}: status", lambda: {model.name for model in status(self.home)}, file) or set()
        )
        told = {**(self._run(f"{case}: problems", lambda: problems(self.home), file) or {})}
        told |= controller.problems if controller else {}
        for model in {MODEL, OTHER} - shown - told.keys():
            if not (file.parent.name == "decisions" and model in file.parts):
                self.wrong.append(f"{case}: nothing is said about {model}")
        if shown - {MODEL, OTHER} - told.keys():
            self.wrong.append(f"{case}: {shown - {MODEL, OTHER}} are taken for models")

    def _pages(self, case: str) -> None:
        with contextlib.suppress(SerinError, AssertionError):  # no secret, no login
            guest = visitor(self.home)
            guest.login("operator")
        for page in PAGES:
            self.ran += 1
            found = guest.get(page)
            if found.status_code == 500:
                self.wrong.append(
                    f"{case}: {page}: {' '.join(found.text.partition('alert')[2].split())[:200]}"
                )


def _furnish(home: Path) -> None:
    furnish(home).kill()
    store = Store.open()
    for port in (1, 2):
        register(store, OTHER, Endpoint(http=f"127.0.0.1:{port}", grpc=f"127.0.0.1:{port}", elsewhere=True))
    store.set_alias(MODEL, "candidate", 2)
    controller = _decider(home)
    for version in (1, 2):
        home_rollouts(home).mailbox.submit(Command(kind="start", model=OTHER, version=version, by="walk"))
        for _ in range(40):
            controller.tick()
            if {now.phase for now in controller.rollouts() if now.model == OTHER} & {
                Phase.PROMOTED,
                Phase.SHIFTING,
            }:
                break
    controller.close()
    for version in (1, 2):
        release, ports = (
            Release(model=MODEL, version=version),
            (20000 + version, 21000 + version, 22000 + version),
        )
        http, grpc, metrics = ports
        place = TritonPorts(
            http_port=http, grpc_port=grpc, metrics_port=metrics, shared_memory_prefix="serin-walk-"
        )
        record = Record(release=release.name, place=place, served=Served(backend="onnx"))
        write_record(home / "releases" / release.name, record)
    save_rollbacks(
        home,
        MODEL,
        (Rollback(t=1.0, from_version=2, to_version=1, by="w", why="w", command="c", outcome="refused"),),
    )
    KeyFile(path=home / "keys.json").create("team")
    for role in ("viewer", "operator"):
        account_secret(home, role)  # type: ignore[arg-type]
        signing_key(home, role)  # type: ignore[arg-type]
    write_stack(Stack(home=home, gateway_port=8080, since=time.time()))
    write_inventory(home, ("GPU-0",))
    for duty in _duties(home):
        with contextlib.suppress(SerinError):
            duty.tick(time.time())


def _decider(home: Path) -> Controller:
    return Controller(
        router=FakeRouter(),
        fleet=FakeFleet(ready_after=0),
        judge=FakeJudge(step_s=1e9, bake_s=1e9),
        journals=home_journals(home),
        versions=Store.open(),
        commands=home_inbox(home),
    )


def _duties(home: Path) -> Iterator[Duty]:
    alerts, promises = AlertBook(home), Promises()
    yield CaptureDuty(home, alerts)
    yield HistoryDuty(home, promises)
    yield ObjectivesDuty(home, alerts, promises)
    yield DriftDuty(home, alerts)
    yield QualityDuty(home, alerts)
    yield RefusalsDuty(home, alerts)
    yield RolloutsDuty(home, alerts)
    yield RetrainDuty(home)


@functools.cache
def _serin() -> click.Command:
    """Built once: that takes longer than most commands."""
    return typer.main.get_command(cli.app)


def _command(line: str) -> None:
    found = CliRunner().invoke(_serin(), line.split())
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception


def _is_derived(file: Path) -> bool:
    """Files that are written again from others, and logs that only grow."""
    return file.parts[:2] in {("watch", "objectives"), ("watch", "quality")} or "history" in file.parts


def _kept(path: Path, damaged: bytes) -> bool:
    beside = path.parent.parent.glob(f"{path.parent.name}*/*") if path.parent.is_dir() else ()
    with contextlib.suppress(OSError):
        if path.read_bytes() == damaged:
            return True
    if path.suffix in (".sqlite", ".parquet"):
        return True  # it may grow, and a damaged end is kept beside it
    return any(each.is_file() and damaged in each.read_bytes() for each in beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the files' paths")
    only: list[str] = parser.parse_args().only
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        walk, began = Walk.build(Path(folder)), time.monotonic()
        files = [file for file in walk.files() if any(part in str(file) for part in only)]
        for file in files:
            for damage in DAMAGES:
                known = len(walk.wrong)
                walk.check(file, damage)
                for line in walk.wrong[known:]:
                    print(f"WRONG {line[:400]}", flush=True)
    print(
        f"{len(files)} files x {len(DAMAGES)} damages = {len(files) * len(DAMAGES)} cases, {walk.ran} uses, "
        f"{len(walk.wrong)} wrong, {time.monotonic() - began:.0f} s"
    )
    sys.exit(bool(walk.wrong))


if __name__ == "__main__":
    main()
