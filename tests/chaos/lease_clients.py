"""Many processes that want GPUs at once, some of which die while they hold or wait for them.

`python -m tests.chaos.lease_clients [--clients 10] [--rounds 20] [--deaths 10] [--seed 1]`, on two pretended GPUs. What
a lease promises is held against a lock of another kind on another file, which the kernel frees at death as well.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from serin.machine.leases import holders, lease, waiters
from tests.fakes.gpus import write_inventory
from tests.signals import kill_9

DEVICES = ("GPU-a", "GPU-b")
_WITHIN_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    leases: int  # that were held to their end
    killed: int  # processes that died by kill -9 and were replaced
    violations: int  # times that a device was used by two of whom one should have been alone
    failures: int  # processes that ended otherwise
    most_overtaken: int  # by how many leases of others a request was overtaken that came before them
    left: int  # holders and waiters in the end


def play(home: Path, *, clients: int, rounds: int, deaths: int, seed: int) -> Result:
    """Until each client has had `rounds` leases; `deaths` of their processes kill themselves on the way."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ["SERIN_INVENTORY"] = str(write_inventory(home, DEVICES))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    chance = random.Random(seed)
    doomed = [chance.randrange(clients) for _ in range(deaths)]
    running: dict[int, int] = {}
    killed = failures = 0
    deadline = time.monotonic() + _WITHIN_S
    try:
        for client in range(clients):
            running[_fork(home, client, rounds, client in doomed, chance.random())] = client
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                assert time.monotonic() < deadline, f"{len(running)} clients still wait"
                time.sleep(0.01)
                continue
            client = running.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                killed += 1
                doomed.remove(client)
                running[_fork(home, client, rounds, client in doomed, chance.random())] = client
            elif status != 0:
                failures += 1
    finally:
        kill_9(*running)
    events = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    return Result(
        leases=sum(event["what"] == "held" for event in events),
        killed=killed,
        violations=sum(event["what"] == "violation" for event in events),
        failures=failures,
        most_overtaken=_most_overtaken(events),
        left=len(holders(home)) + len(waiters(home)),
    )


def _fork(home: Path, client: int, rounds: int, doomed: bool, seed: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _client(home, client, rounds, doomed, random.Random(seed))
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is to be cleaned up here


def _client(home: Path, client: int, rounds: int, doomed: bool, chance: random.Random) -> None:
    # Opened before any lease: at death the kernel closes files in the order of their numbers, the witness first.
    witness = {device: os.open(home / f"{device}.witness", os.O_RDWR | os.O_CREAT) for device in DEVICES}
    dies_at = chance.randrange(rounds) if doomed else None
    for number in range(rounds):
        shared, count = chance.random() < 0.3, 2 if chance.random() < 0.2 else 1
        if number == dies_at and chance.random() < 0.5:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(
                signal.ITIMER_REAL, 0.001 + 0.02 * chance.random()
            )  # while it waits, or soon after
        asked = time.monotonic()
        with lease(count, home=home, purpose=f"client {client}", shared=shared, wait_s=_WITHIN_S) as held:
            got = time.monotonic()
            if not all(_witness(witness[device], shared) for device in held.ids):
                _note(home, what="violation", client=client)
            if number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.002 * chance.random())
            for device in held.ids:
                fcntl.lockf(witness[device], fcntl.LOCK_UN)
        _note(home, what="held", client=client, asked=asked, got=got)


def _witness(file: int, shared: bool) -> bool:
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _note(home: Path, **event: object) -> None:
    line = json.dumps(event).encode() + b"\n"
    file = os.open(home / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line)
    os.close(file)


def _most_overtaken(events: list[dict[str, float]]) -> int:
    """The clock of all processes is one. A request that was asked for later and got earlier has overtaken."""
    held = [event for event in events if event["what"] == "held"]
    return max(
        sum(other["asked"] > one["asked"] and other["got"] < one["got"] for other in held) for one in held
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.lease_clients", description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    home = Path(tempfile.mkdtemp(prefix="serin-leases-"))
    try:
        result = play(home, **options)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps(asdict(result)))
    return 1 if result.violations or result.failures or result.left else 0


if __name__ == "__main__":
    sys.exit(main())
