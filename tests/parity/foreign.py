"""The stack of one machine in front of servers of the KServe v2 protocol that it did not start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.whole_stack import Stack
from tests.fakes.kserve import KServe
from tests.parity.place import Machine, machine, spec


class Foreign(Machine):
    """A version is a server; what a spec asks for goes with `--spec`."""

    name = "foreign"
    bundles = False

    def __init__(self, stack: Stack, folder: Path, ends: ExitStack) -> None:
        super().__init__(stack, folder)
        self._ends = ends
        self._live: dict[str, KServe] = {}
        self._next: dict[str, KServe] = {}

    def start(self, model: str, *, bias: float = 0.0, side: int = 0, **sections: Any) -> int:
        """The first time the model's two servers are alike."""
        sections.pop("files", None)
        path = self.file("spec.yaml")
        path.write_text(yaml.safe_dump(spec(model, **sections)))
        made = self._ends.enter_context(self.server(model, bias=bias, delay_s=0.05 if side else 0.0))
        before = self._live.get(model) or self._ends.enter_context(self.server(model, bias=bias))
        urls = ["--stable", f"http://{before.address}", "--candidate", f"http://{made.address}"]
        self.ask_for("rollout", "start", model, *urls, "--spec", str(path), "--no-follow")
        self._next[model] = made
        return int(self.status(model)["rollout"]["version"])

    def follow(self, model: str) -> tuple[bool, str]:
        promoted, said = super().follow(model)
        if promoted and model in self._next:
            self._live[model] = self._next[model]
        return promoted, said

    def train(self, document: Mapping[str, Any]) -> None:
        """Somebody else did, elsewhere: what Serin has of it is the server."""
        self.roll_out(str(document["name"]))

    def repositories(self, release: str) -> list[Path]:
        return []


@contextmanager
def foreign(folder: Path) -> Iterator[Foreign]:
    with machine(folder) as made, ExitStack() as ends:
        yield Foreign(made.stack, folder, ends)
