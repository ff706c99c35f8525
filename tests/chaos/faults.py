"""Every process of a stack killed and stopped, and its disk filled: `python -m tests.chaos.faults [CASE ...]`.

One row per case: what clients saw, which recorded rows are lost or doubled, how many seconds passed until the fault was
noticed and until everything worked again. Then the reverse, `--busy MINUTES`: on a machine with more to do than it can,
with a request that computes for 5 s, no process is replaced.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from serin.host.process_scan import group_members
from serin.host.state import running_stack
from serin.host.supervisor import Supervisor
from serin.host.watchdog import beat_file, is_stopped, read_replaced
from serin.monitoring.capture.counters import read_captures
from serin.monitoring.capture.read import captured
from serin.serving.envoy.gateway import PROCESS_NAME as GATEWAY
from serin.stack.status import read_status
from tests.chaos.rollout import executes_first, machine
from tests.chaos.stage import MODEL, Clients, Stage, whole_stage
from tests.e2e.serving_stack import good_inputs
from tests.kit import web
from tests.signals import hit

SPEC = """\
name: delays
model: {onnx: delays.onnx, task: binary, answer: probabilities, golden: rows.npz}
objectives: {latency_ms: 50}
serving: {request_timeout: 15s, backend: onnx_python}
monitoring: {capture: {share: 1.0}}
"""
SUPERVISOR, STUB, DISK = "supervisor", "its Python process", "disk"
BUSY_S = 5.0
LOAD = 8.0  # the average that processes which compute keep up
COMPUTES = executes_first(  # a request with this distance keeps a core for BUSY_S
    "end = time.monotonic() + "
    f"{BUSY_S} * any((pb_utils.get_input_tensor_by_name(r, 'distance').as_numpy() == 5000).any() for r in requests)\n"
    "        while time.monotonic() < end: pass"
)
HEADER = ("fault", "client errors", "rows lost", "doubled", "noticed", "normal", "as wanted")
WIDTHS = (34, 34, 20, 8, 9, 9, 0)
SETTLED_S = 90.0  # for the records of a case to be written


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    answered: int
    errors: tuple[str, ...]
    lost: int
    dropped: int  # that the recorder counted as lost
    doubled: int
    noticed_s: float | None
    normal_s: float | None
    limits: tuple[float, float]  # of noticed and normal
    may_lose: int

    @property
    def as_wanted(self) -> bool:
        seen = (self.noticed_s, self.normal_s)
        in_time = all(s is not None and s <= most for s, most in zip(seen, self.limits, strict=True))
        return in_time and self.lost - self.dropped <= self.may_lose and not self.doubled

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.errors).most_common(2))
        failed = f"{len(self.errors)} of {self.answered + len(self.errors):,}{kinds and f' ({kinds})'}"
        wanted = (
            "yes"
            if self.as_wanted
            else f"NO: {self.limits[0]:g} s, {self.limits[1]:g} s, {self.may_lose} rows"
        )
        cells = (
            self.name,
            failed,
            f"{self.lost}{(self.dropped and f' ({self.dropped} counted)') or ''}",
            str(self.doubled),
            _s(self.noticed_s),
            _s(self.normal_s),
            wanted,
        )
        return row(cells)


def row(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`undo`: ends what does not end by itself, once it was `noticed`."""

    name: str
    strike: Callable[[], None]
    noticed: Callable[[], bool]
    normal: Callable[[], bool]
    undo: Callable[[], None] = lambda: None
    limits: tuple[float, float] = (10.0, 30.0)
    may_lose: int = 0


def play(scene: Stage, fault: Fault) -> Outcome:
    before, dropped = len(_recorded(scene)), _dropped(scene)
    with Clients(scene.port, 100.0) as clients:
        time.sleep(3.0)
        clients.errors.clear()
        clients.failed_at.clear()
        began = time.monotonic()
        fault.strike()
        noticed_s = _until(fault.noticed, began)
        fault.undo()
        normal_s = _until(fault.normal, began)
        time.sleep(2.0)
    if normal_s is not None and clients.failed_at:
        normal_s = max(normal_s, clients.failed_at[-1] - began)
    lost, doubled = _compare(scene, clients, before)
    return Outcome(
        name=fault.name, answered=clients.answered, errors=tuple(clients.errors), lost=lost,
        dropped=_dropped(scene) - dropped, doubled=doubled, noticed_s=noticed_s, normal_s=normal_s, limits=fault.limits,
        may_lose=fault.may_lose,
    )  # fmt: skip


def _until(true: Callable[[], bool], began: float, within_s: float = 120.0) -> float | None:
    while not true():
        if time.monotonic() > began + within_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - began


def _recorded(scene: Stage) -> list[str]:
    return captured(scene.home, MODEL, columns=["_id"]).column("_id").to_pylist()


def _dropped(scene: Stage) -> int:
    view = read_captures(scene.home, MODEL)
    return view.dropped if view else 0


def _compare(scene: Stage, clients: Clients, before: int) -> tuple[int, int]:
    """Returns how many answered requests were never recorded, and how many rows were recorded twice."""
    end = time.monotonic() + SETTLED_S
    while (lost := {*clients.ids} - {*(found := _recorded(scene))}) and time.monotonic() < end:
        time.sleep(0.5)
    new = found[before:]
    return len(lost), len(new) - len({*new})


def answers(scene: Stage, distance: int = 0) -> bool:
    inputs = good_inputs()
    for each in inputs:
        if each["name"] == "distance":
            each["data"] = [distance] * len(each["data"])
    return web.answers(scene.port, f"/v2/models/{MODEL}/infer", {"inputs": inputs})


def signalled(scene: Stage, name: str, number: signal.Signals, stub: bool = False) -> Fault:
    """A process of the supervisor, or the Python process that a release has started."""
    first = scene.pid(name)
    target = min({*group_members(scene.home, first)} - {first}) if stub else first

    def now() -> int | None:
        return Supervisor(scene.home).pid(name)

    def works() -> bool:
        pid = now()
        if not pid or pid == first:
            return False
        return (
            answers(scene)
            if name == GATEWAY or name.startswith(MODEL)
            else beat_file(scene.home, pid).exists()
        )

    serves = name == GATEWAY or name.startswith(MODEL)
    limits = {(GATEWAY, signal.SIGKILL): (1.0, 1.0), (GATEWAY, signal.SIGSTOP): (10.0, 11.0)}
    wanted = limits.get((name, number), (5.0, 10.0) if serves else (10.0, 40.0))
    what = "kill -9" if number == signal.SIGKILL else "SIGSTOP"
    return Fault(
        name=f"{what} {name}{f', {STUB}' if stub else ''}", strike=lambda: hit(target, number),
        noticed=lambda: now() not in (None, first), normal=works, limits=wanted,
        may_lose=150 if name.startswith(MODEL) else 0,  # the last second's, docs/how-to/serve.md
    )  # fmt: skip


def supervisor_signalled(scene: Stage, number: signal.Signals) -> Fault:
    """Nothing replaces the supervisor: `serin status` says what is wrong, and a person or systemd acts."""
    pid = running_stack(scene.home).supervisor_pid

    def said() -> bool:
        status = read_status(scene.home, window_s=None)
        return not status.up or bool(status.supervisor_problem)

    def undo() -> None:
        if is_stopped(pid):
            hit(pid, signal.SIGCONT)
        else:
            scene.up_again()

    what = "kill -9" if number == signal.SIGKILL else "SIGSTOP"
    return Fault(
        name=f"{what} {SUPERVISOR}", strike=lambda: hit(pid, number), noticed=said,
        normal=lambda: is_well(scene), undo=undo, limits=(15.0, 240.0),
    )  # fmt: skip


def disk_filled(scene: Stage) -> Fault:
    """The whole home, until `serin status` says so, and at least for 20 s."""
    filler, began = scene.home / "filler", time.monotonic()

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def undo() -> None:
        time.sleep(max(0.0, began + 20.0 - time.monotonic()))
        filler.unlink()

    def noticed() -> bool:
        said = "\n".join(read_status(scene.home, window_s=None).lines())
        return "No space left" in said or "disk" in said

    return Fault(
        name="disk of the home full",
        strike=fill,
        noticed=noticed,
        normal=lambda: is_well(scene),
        undo=undo,
        limits=(60.0, 60.0),
    )


def is_well(scene: Stage) -> bool:
    return read_status(scene.home, window_s=None).well and answers(scene)


def faults(scene: Stage, names: Sequence[str]) -> Iterator[Fault]:
    """One at a time, each against the processes that run then."""
    parts = sorted(child.name for child in Supervisor(scene.home).children())
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for part in parts:
            if not names or part in names:
                yield signalled(scene, part, number)
            if part.startswith(MODEL) and (not names or STUB in names):
                yield signalled(scene, part, number, stub=True)
        if not names or SUPERVISOR in names:
            yield supervisor_signalled(scene, number)
    if (not names or DISK in names) and os.path.ismount(scene.home):
        yield disk_filled(scene)


def _compute() -> None:
    while True:
        pass


@dataclass
class Load:
    """Processes that compute, as many as the machine's load average needs beside everything else that runs."""

    busy: list[multiprocessing.Process] = field(default_factory=list)
    averages: list[float] = field(default_factory=list)

    def adjust(self) -> None:
        self.averages.append(psutil.getloadavg()[0])
        if self.averages[-1] < LOAD and len(self.busy) < LOAD:
            self.busy.append(multiprocessing.Process(target=_compute, daemon=True))
            self.busy[-1].start()
        elif self.averages[-1] > LOAD + 4:
            self.end(self.busy[:1])

    def end(self, which: Sequence[multiprocessing.Process]) -> None:
        for each in which:
            each.kill()
            each.join()
            self.busy.remove(each)


def stay_busy(scene: Stage, minutes: float) -> bool:
    """Returns whether no process was replaced, by the watchdog or otherwise."""
    before = {child.name: child.pid for child in Supervisor(scene.home).children()}
    slow, stop, load = Counter[bool](), threading.Event(), Load()

    def compute() -> None:
        while not stop.is_set():
            slow[answers(scene, distance=5000)] += 1
            stop.wait(BUSY_S)

    with Clients(scene.port, 10.0) as clients:
        threading.Thread(target=compute, daemon=True).start()
        began = time.monotonic()
        while time.monotonic() < began + 60 * minutes and scene.alive():
            load.adjust()
            time.sleep(5.0)
        stop.set()
        load.end(list(load.busy))
        after = {child.name: child.pid for child in Supervisor(scene.home).children()}
    replaced = read_replaced(scene.home)
    changed = [name for name in before if before[name] != after.get(name)]
    print(
        f"{(time.monotonic() - began) / 60:.1f} minutes on {os.cpu_count()} cores at a load average of "
        f"{statistics.mean(load.averages):.1f} ({min(load.averages):.1f} to {max(load.averages):.1f}): "
        f"{len(replaced)} replaced {[(each.name, each.reason) for each in replaced]}, other processes: {changed}; "
        f"requests of {BUSY_S:g} s of compute: {slow[True]} answered, {slow[False]} not; others: {clients.answered} "
        f"answered, {len(clients.errors)} errors {dict(Counter(clients.errors))}",
        flush=True,
    )
    return not replaced and not changed


@contextlib.contextmanager
def own_disk() -> Iterator[Path]:
    """A home on a separate disk, where this user may mount one: then it can be filled."""
    home = Path(tempfile.mkdtemp(prefix="serin-chaos-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=600m,mode=700", "serin-chaos", str(home)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if not mounted:
        print("no case with a full disk: this user may not mount one", flush=True)
    try:
        yield home
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(home)], check=False)
        shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.faults", description=__doc__)
    help_cases = f"names of processes, {SUPERVISOR!r}, {STUB!r} or {DISK!r}; all without"
    parser.add_argument("cases", nargs="*", help=help_cases)
    parser.add_argument(
        "--busy", type=float, default=0.0, metavar="MINUTES", help="replace nothing for so long"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and leaves nothing behind
    with own_disk() as home, whole_stage(home, spec=SPEC) as scene:
        release = scene.publish(COMPUTES)
        scene.start(release)
        scene.until(release, lambda now: now.phase.final, 120)
        if options.busy:
            return 0 if stay_busy(scene, options.busy) else 1
        print(row(HEADER), flush=True)
        outcomes = []
        for fault in faults(scene, options.cases):
            outcomes.append(play(scene, fault))
            print(outcomes[-1], flush=True)
    print(f"\n{sum(each.as_wanted for each in outcomes)} of {len(outcomes)} as wanted, on {machine()}")
    return 0 if all(each.as_wanted for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
