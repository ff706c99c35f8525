"""Runs torchrun: dies with the launcher and records which rank failed first and how.

`python -m serin.training.programs.agent FOLDER PROCESSES LAUNCHER_PID [torchrun's options]`. torchrun's own exit code
is always 1.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from serin.errors import Preempted
from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.parent_death import die_with_parent
from serin.training.launch.job import Status, read_job, read_status, write_status


def main() -> None:
    folder, processes, launcher, options = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    die_with_parent(launcher)
    script = read_job(folder).model.script
    worker = ["-m", "serin.training.programs.worker", str(folder), str(os.getpid())]
    if script is not None:
        worker = ["-m", "serin.training.foreign.script_rank", str(os.getpid()), script]
    try:
        options = options or _meet_in_a_file(folder, own=script is None)
        run.main([*options, *_named_lines(folder), "--nproc-per-node", processes, *worker])
    except SignalException:
        sys.exit(Preempted.exit_code)
    except ChildFailedError as error:
        if read_status(folder) is None:  # the worker could not record it itself
            rank, failure = error.get_first_failure()
            reason = str(failure.message).strip().splitlines()[:1]
            stopped = script is not None and failure.exitcode == Preempted.exit_code
            write_status(
                folder,
                Status(
                    state="preempted" if stopped else "failed",
                    rank=rank,
                    exit_code=failure.exitcode,
                    reason="".join(reason),
                ),
            )
        sys.exit(1)


def _meet_in_a_file(folder: Path, *, own: bool) -> list[str]:
    """Returns torchrun's options for ranks on this machine alone. By default they would meet at a port that is open on
    all interfaces, and PyTorch unpickles what anyone who connects leaves there. `own`: the ranks are Serin's, and use
    no such port either; a script's ranks meet as the script says.
    """
    meeting = folder / "meeting"
    shutil.rmtree(meeting, ignore_errors=True)  # of an attempt before
    make_private(meeting)
    if own:
        environment.prefer("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        environment.meet_in(meeting / "ranks")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.prefer(name, "lo")
    return [
        "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file",
        "--rdzv-endpoint", str(meeting / "agent"), "--rdzv-id", "alone", "--local-addr", "127.0.0.1",
    ]  # fmt: skip


def _named_lines(folder: Path) -> list[str]:
    """Prefixes each line of a rank with its number; torchrun first writes them to files."""
    environment.prefer("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "rank ${rank}: ")
    ranks = folder / "logs" / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    return ["--tee", "3", "--log-dir", str(ranks)]


if __name__ == "__main__":
    main()
