"""One host of a training on several: takes part in one round after the other until the training has ended.

Its ranks are started by torchrun, as on one machine. When a host is lost, those that remain end their ranks, agree on
the next round and resume from the last checkpoint in the store: the first host copies its checkpoints there, and the
first host of the next round fetches the one that the round names. Does not import torch.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from serin.errors import HostsMissing, SpecError, StoreError, StoreUnreachable
from serin.machine import environment
from serin.machine.ports import free_ports
from serin.store.checkpoints import (
    checkpoint_names,
    fetch_checkpoint,
    publish_checkpoint,
    remove_checkpoint,
)
from serin.store.objects import Objects
from serin.store.open import open_objects
from serin.store.store import Store
from serin.training.launch.job import (
    Status,
    checkpoint_folder,
    choices_file,
    gpus_for,
    read_status,
    result_folder,
    saved_steps,
    status_file,
)
from serin.training.launch.processes import (
    HostWork,
    has_ended,
    pass_on,
    sigterm_sets,
    start_process,
    torchrun_program,
)
from serin.training.launch.progress import Follower
from serin.training.launch.together.meeting import (
    SILENT_S,
    Hosts,
    Meeting,
    Member,
    Round,
    View,
    distribute,
    next_step,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_PATIENCE_S = 900.0  # for hosts that have not come, and for a store that cannot be reached
_SETTLE_S = SILENT_S + 5.0  # after ranks have failed: so long until it is known whether a host was lost
_SOMEWHERE = ("192.0.2.1", 9)  # nothing is sent there: connecting a UDP socket only chooses a route
_LOOK_S = 0.5
_RESULT = "result"


def train_together(work: HostWork, hosts: Hosts, log: Path) -> Status:
    """Returns how the training ended, the same on all hosts. Afterwards the result is in the folder, if there is one.

    Raises HostsMissing when too few hosts come, StoreUnreachable when the store is gone for long.
    """
    objects = open_objects(environment.store_url())
    me = Member(
        host=environment.host(),
        instance=secrets.token_hex(4),
        address=own_address(),
        port=free_ports(1)[0],
        processes=work.job.processes,
        gpus=len(work.devices) if work.job.gpu else None,
    )
    run = SharedRun(Store.open(), objects, work.name, work.folder)
    with Meeting(objects, work.name, me) as meeting, sigterm_sets(work.stop), log.open("ab") as output:
        return _Host(work, hosts, meeting, run, output).train()


class _Host:
    def __init__(self, work: HostWork, hosts: Hosts, meeting: Meeting, run: SharedRun, output: Any) -> None:
        self._work, self._hosts, self._meeting, self._run, self._output = work, hosts, meeting, run, output
        self._after = self._removed = 0
        self._said = ""

    def train(self) -> Status:
        while True:
            round_ = self._next_round()
            if isinstance(round_, Status):
                end = round_
            else:
                ended = self._take_part(round_)
                self._after = round_.seq
                self._meeting.new_port()
                if ended is None or ended.state == "again":
                    continue
                end = ended
            if end.state != "done" or self._run.fetch_result(self._work.folder):
                return end
            self._say("the result of an earlier training was removed from the store: training again")
            newest = self._meeting.view().newest
            self._after = self._removed = newest.seq if newest is not None else 0

    def _next_round(self) -> Round | Status:
        """Waits for the next round that this host takes part in, or for the end of the training."""
        began = heard = time.monotonic()
        while not self._work.stop.is_set():
            view = self._meeting.view()
            if view.reached_s < SILENT_S:
                heard = time.monotonic()
            if time.monotonic() - heard > _PATIENCE_S:
                raise StoreUnreachable(
                    url=environment.store_url(), reason=f"no answer for {_PATIENCE_S:.0f} s"
                )
            if view.looks > 1 and view.reached_s < SILENT_S and self._meeting.me.host in view.there:
                me, waited = self._meeting.me, time.monotonic() - began
                step = next_step(
                    view, me, self._hosts, after=self._after, waited_s=waited, removed=self._removed
                )
                if step.kind == "work":
                    assert view.newest is not None
                    return view.newest
                if step.kind == "ended":
                    assert view.end is not None
                    return view.end
                if step.kind == "propose":
                    with suppress(StoreError):  # the next view tells
                        self._propose(view, step.members)
                self._say(step.why)
                if waited > _PATIENCE_S and len(view.there) < self._hosts.begin:
                    raise HostsMissing(there=sorted(view.there), wanted=self._hosts.begin, seconds=waited)
            time.sleep(_POLL_S)
        return Status(state="preempted", step=0)

    def _propose(self, view: View, members: tuple[Member, ...]) -> None:
        newest, choices = view.newest, self._run.choices()
        chosen = json.loads(choices) if choices else {}
        wanted = chosen.get("ranks") or sum(member.processes for member in members)
        places = distribute(members, wanted, batch_rows=chosen.get("batch_rows"))
        first = next(member for member in members if member.host == places[0].host)
        self._meeting.propose(
            Round(
                seq=newest.seq + 1 if newest else 1,
                by=self._meeting.me.host,
                places=places,
                address=first.address,
                port=first.port,
                step=self._run.newest_step(),
                choices=choices,
            )
        )

    def _take_part(self, round_: Round) -> Status | None:
        """Runs this host's ranks of a round. Returns how the round ended; None when it must be repeated."""
        number = round_.place_of(self._meeting.me.host, self._meeting.me.instance)
        assert number is not None
        names = ", ".join(f"{place.host} ({place.ranks})" for place in round_.places)
        self._say(f"round {round_.seq}: training on {names}, from step {round_.step:,}")
        folder, first = self._work.folder, number == 0
        try:
            self._run.prepare(round_, first=first)
        except (StoreError, FileNotFoundError) as error:
            self._leave(str(error))
            return None
        status_file(folder).unlink(missing_ok=True)
        process = self._start(round_, number)
        self._work.began(process.pid)
        try:
            with self._run.mirrored() if first else nullcontext():
                code = self._follow(process, round_)
        finally:
            process.kill()  # torchrun would wait for its ranks, which wait for a host that is lost; they die with it
            process.wait()
        if code is None:
            return None
        return self._settle(round_, code, first=first)

    def _start(self, round_: Round, number: int) -> subprocess.Popen[bytes]:
        work, address = self._work, self._meeting.me.address
        ranks = round_.places[number].ranks
        devices = work.devices[: gpus_for(ranks, work.job.training)] if work.job.gpu else ()
        settings = {
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
            "PYTHONUNBUFFERED": "1",
        }
        interface = interface_of(address)
        if interface is not None:  # the host's name may lead to the loopback interface
            settings |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        command = torchrun_program(
            work.folder, ranks,
            ["--nnodes", str(len(round_.places)), "--node-rank", str(number), "--rdzv-backend", "static",
             "--rdzv-endpoint", f"{round_.address}:{round_.port}", "--rdzv-id", f"{work.name}-{round_.seq}",
             "--local-addr", address],
        )  # fmt: skip
        return start_process(command, environment.child_environment(**settings), self._output)

    def _follow(self, process: subprocess.Popen[bytes], round_: Round) -> int | None:
        """The exit code of the ranks; None when they were ended because the round cannot go to its end."""
        follower, asked = Follower(self._work.folder), False
        while not has_ended(process, _POLL_S):
            pass_on(follower, self._work.hear)
            if self._work.stop.is_set() and not asked:
                asked = True
                process.terminate()  # its ranks agree with those of other hosts, save and end
            if self._is_broken(round_):
                return None
        pass_on(follower, self._work.hear)
        return process.returncode

    def _is_broken(self, round_: Round) -> bool:
        view = self._meeting.view()
        if view.reached_s > SILENT_S:
            self._leave(
                f"the store does not answer for {view.reached_s:.0f} s: the others continue without this host"
            )
            return True
        if view.newest is not None and view.newest.seq > round_.seq:
            return True
        lost = view.lost(round_) if view.looks else []
        if lost:
            self._say(f"lost: {', '.join(lost)}")
        return bool(lost)

    def _settle(self, round_: Round, code: int, *, first: bool) -> Status | None:
        """How a round ended whose ranks have exited here. A failure counts as one only when no host was lost."""
        status = read_status(self._work.folder)
        if status is not None and status.state != "failed":
            return self._report(round_, status)
        until = time.monotonic() + (_SETTLE_S if code or first else _PATIENCE_S)
        while time.monotonic() < until:
            view = self._meeting.view()
            if view.newest is not None and view.newest.seq == round_.seq and view.end is not None:
                return view.end
            if self._is_broken(round_):
                return None
            time.sleep(_POLL_S)
        return self._report(
            round_, status or Status(state="failed", exit_code=code, reason="exited without a status")
        )

    def _report(self, round_: Round, status: Status) -> Status | None:
        try:
            if status.state == "done":
                self._run.publish_result()
            self._meeting.finish(round_, status)
        except StoreError as error:
            self._leave(str(error))
            return None
        return status

    def _leave(self, why: str) -> None:
        self._say(why)
        self._meeting.come_again()

    def _say(self, line: str) -> None:
        if line and line != self._said:
            self._said = line
            logger.info(line)


def own_address() -> str:
    """SERIN_ADDRESS, else the IPv4 address of this host's name, else that of the route to other networks."""
    named = environment.text("SERIN_ADDRESS")
    if named is not None:
        return named
    addresses = []
    with suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE)
        addresses.append(str(probe.getsockname()[0]))
    for address in addresses:
        if not address.startswith("127."):
            return address
    problem = "the address of this host cannot be found out: its name has none, and it has no route"
    raise SpecError(where="SERIN_ADDRESS", problems=[("", f"{problem}; set it to an address of this host")])


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address, such as eth0; None when there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if any(one.address == address for one in each)), None)


class SharedRun:
    """A run's state in the store while several hosts train. `folder`: the run's folder on this host. `name`: the run's
    name, the same on all hosts."""

    def __init__(self, store: Store, objects: Objects, name: str, folder: Path) -> None:
        self._store, self._objects, self._name, self._folder = store, objects, name, folder

    def newest_step(self) -> int:
        return max(self._stored_steps(), default=0)

    def choices(self) -> str | None:
        found = self._objects.read(self._choices_key)
        return None if found is None else found.content.decode()

    def prepare(self, round_: Round, *, first: bool) -> None:
        """Makes the folder what the round says: its choices and, on the host of rank 0, its checkpoint and no later
        one. The other ranks get the checkpoint from rank 0."""
        # Of a round that could not report its end.
        shutil.rmtree(result_folder(self._folder), ignore_errors=True)
        if round_.choices is None:
            choices_file(self._folder).unlink(missing_ok=True)
        else:
            choices_file(self._folder).write_text(round_.choices)
        for step in saved_steps(self._folder):
            if step > round_.step or not first:
                shutil.rmtree(checkpoint_folder(self._folder, step))
        if first and round_.step:
            self._fetch(round_.step)
            state = json.loads((checkpoint_folder(self._folder, round_.step) / "state.json").read_text())
            if state["best_step"] is not None:
                self._fetch(state["best_step"])

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Copies choices and checkpoints to the store as they are written, during the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._mirror, args=(ended,), name="mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def publish_result(self) -> None:
        publish_checkpoint(self._store, f"{self._name}/{_RESULT}", result_folder(self._folder))
        for step in self._stored_steps():  # no round begins any more
            remove_checkpoint(self._store, self._named(step))

    def fetch_result(self, folder: Path) -> bool:
        """The result in `folder`; False when the store has none."""
        target = result_folder(folder)
        return target.exists() or fetch_checkpoint(self._store, f"{self._name}/{_RESULT}", target)

    def _mirror(self, ended: threading.Event) -> None:
        copied, chosen = set[int](), ""
        with suppress(StoreError):
            copied = set(self._stored_steps())
        while True:
            last = ended.is_set()
            try:
                chosen = self._copy_choices(chosen)
                steps = set(saved_steps(self._folder))
                for step in sorted(steps - copied):
                    publish_checkpoint(self._store, self._named(step), checkpoint_folder(self._folder, step))
                    copied.add(step)
                for step in sorted(copied - steps):
                    if steps and step < max(steps):
                        remove_checkpoint(self._store, self._named(step))
                    copied.discard(step)
            except StoreError as error:
                logger.info("%s", error)
            except FileNotFoundError:
                continue  # an old checkpoint was removed in the meantime
            if last:
                return
            ended.wait(_LOOK_S)

    def _copy_choices(self, before: str) -> str:
        file = choices_file(self._folder)
        now = file.read_text() if file.exists() else ""
        if now and now != before:
            self._objects.put(self._choices_key, now.encode())
        return now

    def _stored_steps(self) -> list[int]:
        names = checkpoint_names(self._store, f"{self._name}/step-")
        return [int(name.rpartition("step-")[2]) for name in names]

    def _fetch(self, step: int) -> None:
        checkpoint_folder(self._folder, step).parent.mkdir(exist_ok=True)
        if not fetch_checkpoint(self._store, self._named(step), checkpoint_folder(self._folder, step)):
            raise FileNotFoundError(f"the store has no checkpoint of step {step} of {self._name}")

    def _named(self, step: int) -> str:
        return f"{self._name}/step-{step:08d}"

    @property
    def _choices_key(self) -> str:
        return f"trainings/{self._name}/choices.json"
