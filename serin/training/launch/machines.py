"""Training on several machines: how many there are, and where they meet. Does not import torch.

The same command is started on each of them. With a store that all of them use (SERIN_STORE) they meet there, and those
that remain continue when one is lost (together/). With a rendezvous, `host:port` of one of them, they meet there; then
the run's folder is on a file system that all of them see, and a machine that is lost ends the training on all.
"""

from __future__ import annotations

from dataclasses import dataclass

from serin.errors import SpecError
from serin.machine import environment

_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """`count`: as many begin. `least`: as many are enough to continue, and to begin when no more come."""

    count: int = 1
    rendezvous: str | None = None  # host:port
    store: str | None = None  # one that all machines use
    least: int | None = None  # None: one to continue, all to begin

    def __post_init__(self) -> None:
        problems = []
        host, _, port = (self.rendezvous or "").rpartition(":")
        if self.count < 1:
            problems.append(("machines", f"{self.count} is too small; use at least 1"))
        if self.count > 1 and self.rendezvous is None and self.store is None:
            what = f"{self.count} machines need a store that all of them use (SERIN_STORE) or a rendezvous"
            problems.append(("rendezvous", f"{what}: host:port of one of them"))
        if self.least is not None and not 1 <= self.least <= self.count:
            problems.append(("machines", f"{self.least}:{self.count} is not MIN:MAX, such as 2:3"))
        if self.least is not None and self.rendezvous is not None:
            problems.append(("machines", "MIN:MAX needs a store (SERIN_STORE) instead of a rendezvous"))
        if self.rendezvous is not None and (not host or not port.isdigit()):
            problems.append(("rendezvous", f"{self.rendezvous!r} is not host:port, such as 10.0.0.1:29400"))
        if problems:
            raise SpecError(where="several machines", problems=problems)

    @property
    def in_store(self) -> bool:
        """Whether several machines meet in the store."""
        return self.count > 1 and self.rendezvous is None

    def torchrun_options(self, run: str) -> list[str]:
        """Returns torchrun's options. `run`: the same on all machines, and different for another training. None: the
        ranks are all on this machine, and meet in a file (programs/agent.py)."""
        if self.count == 1:
            return []
        assert self.rendezvous is not None
        local = self.rendezvous.rpartition(":")[0] in _LOCAL
        return [
            "--nnodes", str(self.count), "--rdzv-backend", "c10d", "--rdzv-endpoint", self.rendezvous,
            "--rdzv-id", run, *(["--local-addr", "127.0.0.1"] if local else []),
        ]  # fmt: skip


def machines_told(*, count: str | None = None, rendezvous: str | None = None) -> Machines:
    """Returns the machines as given, else from SERIN_MACHINES and SERIN_RENDEZVOUS, else one. `count`: N or MIN:MAX."""
    word, place = environment.machines()
    named = "SERIN_MACHINES" if count is None else "--machines"
    least, _, most = (count or word).rpartition(":")
    if not most.isdigit() or not (least or "1").isdigit():
        problem = f"{count or word!r} is not a number of machines, such as 3 or 2:3"
        raise SpecError(where=named, problems=[("", problem)])
    return Machines(
        count=int(most),
        least=int(least) if least else None,
        rendezvous=rendezvous or place,
        store=environment.shared_store_url(),
    )
