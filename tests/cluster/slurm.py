"""A real Slurm on this machine: slurmctld and two nodes, each with its own network, host name and list of hosts.

Everything is in one folder, which SLURM_CONF names: configuration, munge's key and socket, state, logs. The nodes are
network namespaces on a bridge, with a slurmd each. All processes are children of this one and end with the block.
Qualities of service need an accounting database: slurmdbd on MariaDB, which this machine alone reaches.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serin.machine.locks import locked
from serin.machine.ports import free_ports
from tests.cluster.part import FOLDER, need
from tests.kit.waiting import until

NETWORK = "198.18.50"
NODES = ("sn1", "sn2")
BRIDGE = "serin-slurm"
_WAIT_S = 120.0
_NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "orchestrate.md"


@dataclass(kw_only=True)
class SlurmCluster:
    """A running Slurm. `environment` makes its commands work from this machine's own namespace."""

    folder: Path
    environment: Mapping[str, str]
    _slurmds: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Of this machine, as the nodes see it."""
        return f"{NETWORK}.1"

    def command(self, *words: str, check: bool = True) -> str:
        """Runs one of Slurm's commands and returns its output."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def jobs(self) -> list[dict[str, str]]:
        """Every job that slurmctld still knows, oldest first."""
        found = []
        for line in self.command("scontrol", "-o", "show", "job", check=False).splitlines():
            words = [word.partition("=") for word in line.split() if "=" in word]
            if words and words[0][0] == "JobId":
                found.append({name: value for name, _, value in words})
        return sorted(found, key=lambda job: int(job["JobId"]))

    def processes(self, node: str) -> list[int]:
        """The pids of the processes in the namespace of a node."""
        said = subprocess.run(["ip", "netns", "pids", _space(node)], capture_output=True, text=True)
        return [int(pid) for pid in said.stdout.split()]

    def start_node(self, node: str) -> None:
        self._slurmds[node] = _start(
            ["nsenter", f"--net=/run/netns/{_space(node)}", "unshare", "--mount", "--uts", "--propagation", "private",
             "sh", "-c", 'mount --bind "$1" /etc/hosts; hostname "$2"; exec slurmd -D -N "$2"', "sh",
             str(self.folder / "hosts"), node],
            self.folder / f"{node}.out",
            self.environment,
        )  # fmt: skip

    def hide(self, folder: Path) -> None:
        """Nodes that run now see an empty folder there."""
        for process in self._slurmds.values():
            into = ["nsenter", "--target", str(process.pid), "--mount"]
            subprocess.run([*into, "mount", "-t", "tmpfs", "none", str(folder)], check=True)

    def kill_node(self, node: str) -> None:
        """kill -9 of slurmd. Jobs on the node continue: their slurmstepd is another process."""
        process = self._slurmds.pop(node)
        process.kill()
        process.wait(30)

    def lose_node(self, node: str) -> None:
        """kill -9 of every process on the node, as when its power fails."""
        self.kill_node(node)
        _kill_all(lambda: self.processes(node))

    def wait_for_nodes(self, *nodes: str) -> None:
        def ready() -> bool:
            said = self.command("sinfo", "-h", "-N", "-o", "%N %T", check=False).splitlines()
            return {f"{node} idle" for node in nodes} <= {" ".join(line.split()) for line in said}

        wait_until(ready, f"the nodes {nodes} are idle", lambda: self.log())

    def log(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


def wait_until(
    ready: Callable[[], object], what: str, said: Callable[[], str] = str, *, within_s: float = _WAIT_S
) -> None:
    until(ready, what, within_s=within_s, every_s=0.1, said=said)


@contextlib.contextmanager
def running_slurm(folder: Path, *, accounting: bool = False) -> Iterator[SlurmCluster]:
    """Starts the cluster, and ends everything in it, jobs included. `folder`: an empty one; its path must be short.
    `accounting`: with a database, and so with qualities of service."""
    need("slurm")
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    *ports, port, database = free_ports(3 + len(NODES))
    _write_configuration(folder, ports, _accounting(folder, port) if accounting else _NO_ACCOUNTING)
    cluster = SlurmCluster(folder=folder, environment={"SLURM_CONF": str(folder / "slurm.conf")})
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(FOLDER / "slurm.lock"))  # they would have the same addresses
        stack.callback(_remove_network)
        _make_network()
        for node in NODES:
            stack.callback(_kill_all, lambda node=node: cluster.processes(node))  # type: ignore[misc]
        munge = _start(
            ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", f"--key-file={folder}/munge/key",
             f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"],
            folder / "munged.log", {},
        )  # fmt: skip
        stack.callback(end, munge)
        wait_until((folder / "munge" / "socket").exists, "munge's socket")
        if accounting:
            stack.enter_context(_running_database(cluster, port, database))
        control = _start(["slurmctld", "-D", "-c"], folder / "slurmctld.out", cluster.environment)
        stack.callback(end, control)
        wait_until(lambda: "UP" in cluster.command("scontrol", "ping", check=False), "slurmctld", cluster.log)
        for node in NODES:
            cluster.start_node(node)
        stack.callback(lambda: [end(process) for process in cluster._slurmds.values()])
        cluster.wait_for_nodes(*NODES)
        yield cluster


def documented(language: str) -> str:
    """What docs/how-to shows for the priority of runs: commands of an administrator (bash), lines of slurm.conf
    (ini)."""
    blocks = re.findall(rf"```{language}\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if "sacctmgr" in block or "PreemptType" in block]
    return str(found)


def _accounting(folder: Path, port: int) -> str:
    """The lines of slurm.conf about accounting, with those that the docs name. `port`: of slurmdbd."""
    return f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/socket
{documented("ini")}"""


@contextlib.contextmanager
def _running_database(cluster: SlurmCluster, port: int, database: int) -> Iterator[None]:
    """MariaDB and slurmdbd, which knows this cluster then."""
    folder = cluster.folder
    data, log = folder / "database", folder / "mariadb.log"
    made = ["mariadb-install-db", "--no-defaults", "--user=root", "--auth-root-authentication-method=normal"]
    subprocess.run([*made, "--skip-test-db", f"--datadir={data}"], capture_output=True, check=True)
    file = folder / "slurmdbd.conf"
    file.write_text(
        f"""AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={socket.gethostname()}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
StorageLoc=slurm
"""
    )
    file.chmod(0o600)
    with contextlib.ExitStack() as stack:
        server = _start(
            ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={folder}/mariadb.sock",
             f"--pid-file={folder}/mariadb.pid", "--bind-address=127.0.0.1", f"--port={database}",
             "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"],
            log, {},
        )  # fmt: skip
        stack.callback(end, server)
        wait_until((folder / "mariadb.sock").exists, "MariaDB", log.read_text)
        stack.callback(end, _start(["slurmdbd", "-D"], folder / "slurmdbd.out", cluster.environment))

        def knows() -> bool:
            cluster.command("sacctmgr", "-i", "add", "cluster", "serin", check=False)
            return "serin" in cluster.command("sacctmgr", "-nP", "show", "cluster", check=False)

        wait_until(knows, "slurmdbd", cluster.log)
        yield


def _write_configuration(folder: Path, ports: Sequence[int], accounting: str) -> None:
    (folder / "munge").mkdir(mode=0o755)
    for name in ("spool", "state", "devices"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (folder / "munge" / "key").chmod(0o400)
    for number in range(2):  # what Slurm counts as a GPU must be a character device
        os.mknod(folder / "devices" / f"nvidia{number}", 0o600 | 0o020000, os.makedev(1, 3))
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={NETWORK}.{11 + number} Port={ports[1 + number]} CPUs=4 RealMemory=8000 "
        f"Gres=gpu:2 State=UNKNOWN"
        for number, node in enumerate(NODES)
    )
    (folder / "slurm.conf").write_text(
        f"""ClusterName=serin
SlurmctldHost={socket.gethostname()}({NETWORK}.1)
SlurmctldPort={ports[0]}
SlurmUser=root
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmctldTimeout=30
SlurmdTimeout=6
KillWait=5
MinJobAge=3600
OverTimeLimit=0
{accounting}
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=UNLIMITED State=UP
"""
    )
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/devices/nvidia[0-1] Flags=nvidia_gpu_env\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "hosts").write_text(
        f"127.0.0.1 localhost\n{NETWORK}.1 {socket.gethostname()}\n"
        + "".join(f"{NETWORK}.{11 + number} {node}\n" for number, node in enumerate(NODES))
    )


def _space(node: str) -> str:
    return f"slurm-{node}"


def _make_network() -> None:
    _remove_network()  # of a test that was killed
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for number, node in enumerate(NODES):
        space, port = _space(node), f"sl-{node}"
        _ip("netns", "add", space)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", port, "master", BRIDGE, "up")
        _ip("-n", space, "addr", "add", f"{NETWORK}.{11 + number}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def _remove_network() -> None:
    for node in NODES:
        _ip("netns", "del", _space(node), check=False)
        _ip("link", "del", f"sl-{node}", check=False)
    _ip("link", "del", BRIDGE, check=False)


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if check and done.returncode:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr}")


def _start(command: list[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def _kill_all(left: Callable[[], list[int]]) -> None:
    """Ends every process of a node: slurmstepd and jobs outlive a slurmd."""

    def gone() -> bool:
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left()

    wait_until(gone, "no process is left on the node")
