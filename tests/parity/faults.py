"""Faults at random moments while clients ask and a rollout runs: `python -m tests.parity.faults PLACE [CASE ...]`.

Each case has a live release and an equal candidate at 50%, 100 requests/s at all gateways, and one fault: a process is
killed or stopped, the store or a host is cut off, or a disk is full. Counted are client errors, recorded rows that are
lost or doubled, wrong decisions, and the seconds until everything works again. A client that cannot connect to a
gateway asks the next one, as a load balancer does. Right is: a candidate that was struck is rolled back; any other
rollout continues. The table is printed, and written with `--json FILE`.

`--rollbacks N` measures instead how long a rollback takes to have its effect: N times a candidate at 50% is aborted
under the same load, and the time is that from the decision to the last request that any gateway sent to the candidate.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from serin.formats.cluster.leader import KEY, Leader
from serin.formats.serving.journal import Decision
from serin.formats.serving.request_log import START, read_requests
from serin.host.supervisor import Supervisor
from serin.host.wiring import request_log
from serin.rollout.run.access import Rollouts, home_rollouts
from tests.cluster.part import run_prepared
from tests.kit.threads import beside
from tests.kit.waiting import until
from tests.parity.hosts import Hosts, hosts
from tests.parity.place import AT_ONCE, Machine, Place, machine, rows, scores
from tests.signals import hit

MODEL = "faults"
RECORDED = {"capture": {"share": 1}}
# Never ends by itself: no step passes without so many requests.
HELD = {**AT_ONCE, "steps": [50, 100], "min_requests": 10**9, "deadline": "1h"}
RATE, CLIENTS = 100.0, 10
QUIET_S = 3.0  # without an error: it works again
LONGEST_S = 150.0
AWAY_S = 60.0
HEADER = f"{'fault':32} {'client errors':14} {'lost':>5} {'doubled':>8} {'wrong decisions':22} {'normal':8}"
_ISOLATED = "SERIN_FAULTS_ISOLATED"


@dataclass
class Clients:
    """100 requests per second, one row each."""

    place: Place
    ids: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    last_error: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        one, gateways, due = rows(1, seed=number), self.place.gateways, time.monotonic()
        while not self.stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + CLIENTS / RATE, time.monotonic() - 1.0)
            first = random.randrange(len(gateways))
            error = "no gateway takes connections"
            for gateway in gateways[first:] + gateways[:first]:
                try:
                    answer = self.place.infer(MODEL, one, gateway)
                    scores(answer)
                except ConnectionRefusedError:
                    continue
                except (OSError, http.client.HTTPException, AssertionError) as failure:
                    error = str(failure)[:60] or repr(failure)
                    break
                with self.lock:
                    self.ids.append(str(answer.headers["x-request-id"]))
                error = ""
                break
            if error:
                with self.lock:
                    self.errors.append(error)
                    self.last_error = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`lasts_s`: how long until `undo`; 0: it is undone once everything works without that. `well`: what must be true
    again, beside answers."""

    name: str
    strike: Callable[[], object]
    undo: Callable[[], object] = lambda: None
    lasts_s: float = 0.0
    well: Callable[[], bool] = lambda: True
    ends_rollout: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    requests: int
    errors: dict[str, int]
    lost: int
    doubled: int
    wrong: str
    normal_s: float | None

    def __str__(self) -> str:
        failed = f"{sum(self.errors.values())} of {self.requests:,}"
        normal = "never" if self.normal_s is None else f"{self.normal_s:.1f} s"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.items())
        return f"{self.name:32} {failed:14} {self.lost:5} {self.doubled:8} {self.wrong or 'none':22} {normal:8} {kinds}"


class Parts:
    """The processes of a place, by part: each as a host's home and the name that its supervisor has for it."""

    def __init__(self, place: Place, draw: random.Random) -> None:
        self.place, self._draw = place, draw

    def homes(self) -> list[Path]:
        if isinstance(self.place, Hosts):
            return [each.home for each in self.place.made.members.values()]
        assert isinstance(self.place, Machine)
        return [self.place.stack.home]

    def home(self) -> Path:
        """Of one host, drawn by lot."""
        return self._draw.choice(self.homes())

    def decisions(self, rollout: str) -> list[Decision]:
        if not isinstance(self.place, Hosts):
            return home_rollouts(self.home()).decisions(MODEL, rollout)
        with self.place.made.store_host.inside():
            return Rollouts(self.place.made.objects).decisions(MODEL, rollout)

    def signalled(self, part: str, number: signal.Signals, name: str) -> Fault | None:
        home = self.home()
        supervisor = Supervisor(home)
        first = supervisor.pid(name)
        if first is None:
            return None
        what = "kill -9" if number == signal.SIGKILL else "SIGSTOP"
        where = f" on {home.name}" if isinstance(self.place, Hosts) else ""
        if part == "candidate":
            return Fault(
                name=f"{what} {part}{where}", strike=lambda: hit(first, number), ends_rollout=True,
                well=lambda: self.place.status(MODEL)["rollout"]["phase"] == "rolled_back",
            )  # fmt: skip
        return Fault(
            name=f"{what} {part}{where}", strike=lambda: hit(first, number),
            well=lambda: supervisor.pid(name) not in (None, first) and self.place.serin_done(["status"])[0] == 0,
        )  # fmt: skip

    def leader(self, number: signal.Signals) -> Fault | None:
        """Of several hosts: nobody restarts a controller there but the test; another one leads."""
        if not isinstance(self.place, Hosts):
            return self.signalled("controller", number, "controller")
        made, controllers = self.place.made, self.place.controllers

        def found() -> Leader:
            with made.store_host.inside():
                stored = made.objects.read(KEY)
            assert stored is not None
            return Leader.load(stored.content)

        before = found()
        pid = int(before.holder.partition("/")[2].partition("-")[0])
        (mine,) = [each for each in controllers if each.process.pid == pid]

        def undo() -> None:
            if number == signal.SIGSTOP:
                hit(pid, signal.SIGCONT)
            else:
                mine.start()

        what = "kill -9" if number == signal.SIGKILL else "SIGSTOP"
        strike = lambda: hit(pid, number)  # noqa: E731
        return Fault(
            name=f"{what} controller that leads", strike=strike, undo=undo,
            well=lambda: found().term > before.term,
        )  # fmt: skip

    def cut(self) -> Iterator[Fault]:
        if isinstance(self.place, Hosts):
            network, store = self.place.made.network, self.place.made.store_host
            yield Fault(
                name=f"store away for {AWAY_S:g} s", strike=store.cut, undo=store.restore, lasts_s=AWAY_S
            )
            b = network["b"]
            yield Fault(name="host b cut off for 20 s", strike=b.cut, undo=b.restore, lasts_s=20.0)

    def disk(self) -> Fault | None:
        home = self.home()
        if not os.path.ismount(home):
            return None
        filler = home / "filler"

        def fill() -> None:
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()

        return Fault(name=f"full disk of {home.name} for 20 s", strike=fill, undo=filler.unlink, lasts_s=20.0)

    def faults(self, versions: tuple[int, int]) -> Iterator[Callable[[], Fault | None]]:
        """Made when its turn comes, against the processes that run then."""
        live, candidate = (f"{MODEL}-v{version}" for version in versions)
        named = {"live release": live, "candidate": candidate}
        named |= {part: part for part in ("gateway", "watcher", "agent")}
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for part, name in named.items():
                yield lambda part=part, name=name, number=number: self.signalled(part, number, name)  # type: ignore[misc]
            yield lambda number=number: self.leader(number)  # type: ignore[misc]
        for each in self.cut():
            yield lambda each=each: each  # type: ignore[misc]
        yield self.disk


def play(place: Place, fault: Fault, candidate: int, draw: random.Random) -> Outcome:
    clients = Clients(place)
    with beside(*[lambda n=n: clients.run(n) for n in range(CLIENTS)], stop=clients.stop):
        time.sleep(3.0 + draw.uniform(0.0, 5.0))
        clients.errors.clear()
        began = time.monotonic()
        fault.strike()
        try:
            time.sleep(fault.lasts_s)
            if fault.lasts_s:
                fault.undo()
            normal_s = _normal(clients, fault, began)
        finally:
            if not fault.lasts_s:
                fault.undo()
        time.sleep(2.0)
    lost, doubled = _records(place, clients)
    return Outcome(
        name=fault.name, requests=len(clients.ids) + len(clients.errors), errors=dict(Counter(clients.errors)),
        lost=lost, doubled=doubled, wrong=_wrong(place, fault, candidate), normal_s=normal_s,
    )  # fmt: skip


def _normal(clients: Clients, fault: Fault, began: float) -> float | None:
    """Seconds from the fault until it works: well, and the last error is over."""
    well_s: float | None = None
    while time.monotonic() < began + fault.lasts_s + LONGEST_S:
        if well_s is None and fault.well():
            well_s = time.monotonic() - began
        last = max(clients.last_error - began, 0.0)
        if well_s is not None and time.monotonic() - began > max(last, well_s) + QUIET_S:
            return max(well_s, last)
        time.sleep(0.05)
    return None


def _records(place: Place, clients: Clients) -> tuple[int, int]:
    """Answered requests that were never recorded, and rows that were recorded twice."""
    out, asked = place.file("rows.parquet"), set(clients.ids)
    found: list[str] = []

    def read() -> bool:
        if place.serin_done(["captures", "export", MODEL, "--out", str(out)])[0] == 0:
            found[:] = pq.read_table(out, columns=["_id"])["_id"].to_pylist()
        return asked <= set(found)

    with suppress(AssertionError):
        until(read, "all records", within_s=90.0, every_s=2.0)
    return len(asked - set(found)), len(found) - len(set(found))


def _wrong(place: Place, fault: Fault, candidate: int) -> str:
    """The decision that was wrong; empty: none was."""

    def look() -> str:
        now = place.status(MODEL)["rollout"]
        assert now["version"] == candidate
        return str(now["phase"])

    phase = look()
    if fault.ends_rollout:
        with suppress(AssertionError):
            until(lambda: look() == "rolled_back", within_s=60.0, every_s=1.0)
            return ""
        return f"{look()}, not rolled back"
    return "" if phase == "shifting" else phase


def run(place: Place, cases: list[str], draw: random.Random) -> list[Outcome]:
    live, outcomes = place.roll_out(MODEL, monitoring=RECORDED), list[Outcome]()
    print(HEADER, flush=True)
    number = 0
    while True:
        candidate = place.start(MODEL, monitoring=RECORDED, rollout=HELD)
        until(
            lambda: place.status(MODEL)["rollout"]["weight_percent"] == 50, "50%", within_s=180.0, every_s=1.0
        )
        todo = list(Parts(place, draw).faults((live, candidate)))
        fault = None
        while number < len(todo) and fault is None:
            fault = todo[number]()
            if fault is None or (cases and not any(case in fault.name for case in cases)):
                fault = None
            number += 1
        if fault is None:
            place.clean(MODEL)
            return outcomes
        outcomes.append(play(place, fault, candidate, draw))
        print(outcomes[-1], flush=True)
        if place.status(MODEL)["rollout"]["phase"] == "shifting":
            place.serin("rollout", "abort", MODEL)
        place.follow(MODEL)


def rollbacks(place: Place, count: int) -> list[float]:
    """Seconds from each decision to abort until no gateway sends requests to the candidate."""
    parts, found = Parts(place, random.Random(0)), list[float]()
    place.roll_out(MODEL)
    candidate = place.start(MODEL, rollout=HELD)
    clients = Clients(place)
    with beside(*[lambda n=n: clients.run(n) for n in range(CLIENTS)], stop=clients.stop):
        for number in range(count):
            if number:
                place.serin("rollout", "start", f"{MODEL}:{candidate}", "--no-follow")
            until(
                lambda: place.status(MODEL)["rollout"]["weight_percent"] == 50,
                "50%", within_s=180.0, every_s=0.5,
            )  # fmt: skip
            time.sleep(1.0)
            place.serin("rollout", "abort", MODEL)
            place.follow(MODEL)
            decided = place.json("rollout", "status", MODEL)[0]["rollout"]["id"]
            began = next(each.t for each in parts.decisions(decided) if each.phase == "aborting")
            latest = max((t for home in parts.homes() for t in candidate_times(home)), default=began)
            found.append(max(latest - began, 0.0))
            print(f"{number + 1:3} {1000 * found[-1]:7.1f} ms", flush=True)
    failed = f"{len(clients.errors)} failed requests of {len(clients.ids):,}"
    print(f"median {1000 * statistics.median(found):.1f} ms, worst {1000 * max(found):.1f} ms, {failed}")
    return found


def candidate_times(home: Path) -> Iterator[float]:
    """When requests arrived that this gateway sent to the candidate."""
    place, more = START, True
    while more:
        batch = read_requests(request_log(home), place)
        place, more = batch.offset, batch.more
        yield from (each.t for each in batch.requests if each.arm == "candidate")


def main() -> int:
    asked = argparse.ArgumentParser(prog="make faults PLACE=", description=__doc__)
    asked.add_argument("place", choices=("machine", "hosts"))
    asked.add_argument("cases", nargs="*", help="a part of their names; all without")
    asked.add_argument("--seed", type=int, default=1, help="of the moments and hosts that are drawn")
    asked.add_argument("--json", type=Path, help="the file to write")
    asked.add_argument("--rollbacks", type=int, help="measure so many rollbacks instead")
    given = asked.parse_args()
    if _ISOLATED not in os.environ:
        return run_prepared("tests.parity.faults", _ISOLATED, "namespaces", "seaweedfs", "valkey")
    with tempfile.TemporaryDirectory(prefix="sf-") as name, ExitStack() as ends:
        folder = Path(name)
        for home in ("home",) if given.place == "machine" else "abc":  # disks that can be filled
            (folder / home).mkdir()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=800m,mode=700", "home", folder / home], check=True
            )
            ends.callback(subprocess.call, ["umount", "--lazy", str(folder / home)])
        place: Place = ends.enter_context((machine if given.place == "machine" else hosts)(folder))
        if given.rollbacks:
            rollbacks(place, given.rollbacks)
            return 0
        outcomes = run(place, given.cases, random.Random(given.seed))
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return (
        1 if any(each.lost or each.doubled or each.wrong or each.normal_s is None for each in outcomes) else 0
    )


if __name__ == "__main__":
    sys.exit(main())
