"""Hosts on this machine: namespaces (network, host name, /etc/hosts) joined by a bridge in one more namespace.

    with hosts("a", "b", "c", prefix="198.18.20") as network:
        a = network["a"]
        server = a.popen([sys.executable, "-m", "http.server", "8000", "--bind", a.address], log=folder / "server.log")
        wait_for(lambda: answers(a), within_s=10, watching=[server])
        network["b"].cut()

The namespaces have no name outside, so hosts of two tests never meet, and nothing is added to the machine's own
network. Each is kept by one process that ends with the test; closing the network kills everything that runs in a
host. Files and process ids are shared by all hosts: give each its own SERIN_HOME. Call `need("namespaces")` first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.kit.waiting import T, running, until

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_SLOW_LINK = Path(__file__).with_name("slow_link.py")
_KEEP = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo ready && exec sleep infinity'
)
_START_S = 10.0
_END_S = 20.0


class Host:
    """A host: a name, an address, and commands that run in it."""

    def __init__(self, name: str, address: str, port: str, keeper: int, switch: Switch) -> None:
        self.name = name
        self.address = address
        self.keeper = keeper  # the process that keeps its namespaces
        self._port = port
        self._switch = switch
        self._slow: subprocess.Popen[str] | None = None

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **settings: Any,
    ) -> subprocess.Popen[str]:
        """Starts a command in this host; the process has the returned pid, leads a session and dies with the caller.

        `log`: a file that output is appended to. `env`: the whole environment. Other settings are Popen's.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                return self.popen(command, env=env, cwd=cwd, stdout=output, stderr=output, **settings)
        return _start(
            self.keeper, [str(word) for word in command], env=env, cwd=cwd or Path.cwd(), **settings
        )

    def run(
        self, command: Sequence[str | Path], *, within_s: float = 60.0, check: bool = True, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; with `check`, one that fails is an error that shows its output."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.popen(command, **{**pipes, **settings})
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            end(process, grace_s=0)
            raise
        if check and process.returncode:
            raise AssertionError(
                f"{self.name}: {command} exited with {process.returncode}\n{out or ''}{err or ''}"
            )
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens within the block are in this host's network; host names are not resolved."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            theirs = os.open(f"/proc/{self.keeper}/ns/net", os.O_RDONLY)
            try:
                _enter(theirs)
                yield
            finally:
                _enter(own)
                os.close(theirs)
        finally:
            os.close(own)

    def free_port(self) -> int:
        """A TCP port that is free in this host at this moment."""
        with self.inside(), socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])

    def cut(self) -> None:
        """Takes the host's link down: nothing arrives, nothing leaves, and no end is notified."""
        self._switch.ip("link", "set", self._port, "down")

    def restore(self) -> None:
        self._switch.ip("link", "set", self._port, "up")

    def slow(self, *, delay_ms: float = 20.0, loss: float = 0.01) -> None:
        """From now on each frame takes `delay_ms` in each direction, and a share `loss` of them is lost."""
        self.fast()
        far = f"{self._port}s"
        self._switch.ip("link", "add", "name", far, "type", "bridge")
        self._switch.ip("link", "set", far, "up")
        command = [sys.executable, "-S", str(_SLOW_LINK), "br0", far, self._port, str(delay_ms), str(loss)]
        self._slow = _start(self._switch.keeper, command, stdout=subprocess.PIPE)
        _await_ready(self._slow)
        self._switch.ip("link", "set", self._port, "master", far)

    def fast(self) -> None:
        """Takes the delay and the loss away."""
        if self._slow is not None:
            self._switch.ip("link", "set", self._port, "master", "br0")
            end(self._slow, grace_s=0)
            self._switch.ip("link", "delete", f"{self._port}s")
            self._slow = None

    def block(self, other: Host) -> None:
        """Drops everything between this host and one other; both still reach the rest."""
        for way in (("INPUT", "-s"), ("OUTPUT", "-d")):
            self.run(["iptables", "-w", "-A", way[0], way[1], other.address, "-j", "DROP"])

    def unblock(self, other: Host) -> None:
        for way in (("INPUT", "-s"), ("OUTPUT", "-d")):
            self.run(["iptables", "-w", "-D", way[0], way[1], other.address, "-j", "DROP"])

    def processes(self) -> list[int]:
        """Every process in this host, except the one that keeps its namespaces."""
        return _processes_of(self.keeper)

    def kill(self) -> None:
        """Ends every process of this host with SIGKILL, as a loss of power does. Its link and its files stay."""
        _kill_all(self.keeper)


class Switch:
    """The namespace with the bridge that all hosts are connected to."""

    def __init__(self, keeper: int) -> None:
        self.keeper = keeper
        self.ip("link", "add", "name", "br0", "type", "bridge")
        self.ip("link", "set", "br0", "up")

    def ip(self, *words: str) -> None:
        _run(self.keeper, ["ip", *words])

    def connect(self, keeper: int, port: str, address: str) -> None:
        self.ip("link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(keeper))
        self.ip("link", "set", port, "master", "br0", "up")
        _run(keeper, ["ip", "address", "add", f"{address}/24", "dev", "eth0"])
        _run(keeper, ["ip", "link", "set", "eth0", "up"])


@contextmanager
def hosts(*names: str, prefix: str = "198.18.0") -> Iterator[dict[str, Host]]:
    """Hosts of these names, with the addresses PREFIX.1, PREFIX.2, ..., who know each other by name."""
    if os.geteuid() != 0:
        raise AssertionError("network namespaces need root")
    addresses = {name: f"{prefix}.{number}" for number, name in enumerate(names, start=1)}
    with ExitStack() as ends, tempfile.TemporaryDirectory(prefix="serin-hosts-") as folder:
        known = Path(folder) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        known.write_text("\n".join(lines) + "\n")
        switch = Switch(ends.enter_context(_kept("switch", known)))
        found = {}
        for number, (name, address) in enumerate(addresses.items()):
            keeper = ends.enter_context(_kept(name, known))
            switch.connect(keeper, f"p{number}", address)
            found[name] = Host(name, address, f"p{number}", keeper, switch)
        yield found


def wait_for(
    check: Callable[[], T],
    *,
    within_s: float,
    watching: Sequence[subprocess.Popen[Any]] = (),
    every_s: float = 0.1,
    what: str = "",
) -> T:
    """The first true value of `check`. Fails after `within_s`, and at once when a process of `watching` has ended."""
    return until(check, what, within_s=within_s, every_s=every_s, alive=running(*watching))


def end(process: subprocess.Popen[Any], *, grace_s: float = _END_S) -> int:
    """Ends a process with SIGTERM, and with SIGKILL after `grace_s`; returns its exit code."""
    if process.poll() is None:
        if grace_s > 0:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        process.kill()
    return process.wait()


@contextmanager
def _kept(name: str, known: Path) -> Iterator[int]:
    keep = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _KEEP, "sh", name, str(known)]
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *keep], stdout=subprocess.PIPE, text=True)
    try:
        _await_ready(process)
        yield process.pid
    finally:
        if process.poll() is None:
            _kill_all(process.pid)
        end(process, grace_s=0)


def _start(keeper: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
    """setpriv and nsenter replace themselves, so the pid is the command's."""
    into = ["nsenter", "--target", str(keeper), "--net", "--uts", "--mount"]
    if cwd := settings.pop("cwd", None):
        into.append(f"--wd={cwd}")
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *into, "--", *command],
        **{"text": True, "stdin": subprocess.DEVNULL, "start_new_session": True, **settings},
    )


def _run(keeper: int, command: Sequence[str]) -> None:
    process = _start(keeper, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=_START_S)
    if process.returncode:
        raise AssertionError(f"{' '.join(command)} exited with {process.returncode}: {said}")


def _await_ready(process: subprocess.Popen[str]) -> None:
    line = process.stdout.readline()  # ends when the process does
    if line != "ready\n":
        raise AssertionError(f"{process.args} did not start (exit code {process.wait(_START_S)})")


def _enter(network: int) -> None:
    if _libc.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns was refused")


def _processes_of(keeper: int) -> list[int]:
    ours = Path(f"/proc/{keeper}/ns/net").stat().st_ino
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (keeper, os.getpid()):
            with suppress(OSError):  # it has ended
                if (entry / "ns" / "net").stat().st_ino == ours:
                    found.append(int(entry.name))
    return found


def _kill_all(keeper: int) -> None:
    until = time.monotonic() + _END_S
    while alive := [process for process in _processes_of(keeper) if not _is_zombie(process)]:
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > until:
            raise AssertionError(f"these processes do not end: {alive}")
        time.sleep(0.02)


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
