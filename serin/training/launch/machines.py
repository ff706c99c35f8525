"""Training on several machines: how many there are, and where they meet. Does not import torch.

The same command is started on each of them, with the run's folder on a file system that all of them see. They find each
other at `host:port`, a free port of one of them. That rendezvous decides which of them is first.
"""

from __future__ import annotations

from dataclasses import dataclass

from serin.errors import SpecError
from serin.machine import environment

_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    count: int = 1
    rendezvous: str | None = None  # host:port

    def __post_init__(self) -> None:
        problems = []
        host, _, port = (self.rendezvous or "").rpartition(":")
        if self.count < 1:
            problems.append(("machines", f"{self.count} is too small; use at least 1"))
        if self.count > 1 and self.rendezvous is None:
            problems.append(
                ("rendezvous", f"{self.count} machines need a rendezvous; set host:port of one of them")
            )
        if self.rendezvous is not None and (not host or not port.isdigit()):
            problems.append(("rendezvous", f"{self.rendezvous!r} is not host:port, such as 10.0.0.1:29400"))
        if problems:
            raise SpecError(where="several machines", problems=problems)

    def torchrun_options(self, run: str) -> list[str]:
        """Returns torchrun's options. `run`: the same on all machines, and different for another training."""
        if self.count == 1:
            return ["--standalone", "--local-addr", "127.0.0.1"]
        assert self.rendezvous is not None
        local = self.rendezvous.rpartition(":")[0] in _LOCAL
        return [
            "--nnodes", str(self.count), "--rdzv-backend", "c10d", "--rdzv-endpoint", self.rendezvous,
            "--rdzv-id", run, *(["--local-addr", "127.0.0.1"] if local else []),
        ]  # fmt: skip


def machines_told(*, count: int | None = None, rendezvous: str | None = None) -> Machines:
    """Returns the machines as given, else from SERIN_MACHINES and SERIN_RENDEZVOUS, else one."""
    word, place = environment.machines()
    if not word.isdigit():
        raise SpecError(where="SERIN_MACHINES", problems=[("", f"{word!r} is not a number of machines")])
    return Machines(count=int(word) if count is None else count, rendezvous=rendezvous or place)
