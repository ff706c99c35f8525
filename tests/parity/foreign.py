"""The stack of one machine in front of servers of the KServe v2 protocol that it did not start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from serin.store.artifacts import Endpoint
from serin.store.store import Store
from tests.e2e.whole_stack import Stack
from tests.fakes.kserve import KServe
from tests.kit.elsewhere import register
from tests.parity.place import Machine, chances, machine, rows, spec


class Foreign(Machine):
    """A version is a server; what a spec asks for goes with `--spec`."""

    name = "foreign"
    bundles = False
    block_s = 60.0  # of a table without times

    def __init__(self, stack: Stack, folder: Path, ends: ExitStack) -> None:
        super().__init__(stack, folder)
        self._ends = ends
        self._live: dict[str, KServe] = {}
        self._next: dict[str, KServe] = {}

    def start(self, model: str, *, bias: float = 0.0, side: int = 0, **sections: Any) -> int:
        """The first time the model's two servers are alike. What bundles bring to compare live rows with is a table
        here."""
        sections.pop("files", None)
        path, document = self.file("spec.yaml"), spec(model, **sections)
        del document["features"], document["data"]["tables"]
        document["serving"] = {"request_timeout": "10s"}  # the rest is the server's own
        path.write_text(yaml.safe_dump(document))
        watched = {"drift", "quality"} & sections.get("monitoring", {}).keys()
        compared = ["--reference", str(self.reference())] if watched else []
        made = self._ends.enter_context(self.server(model, bias=bias, delay_s=0.05 if side else 0.0))
        before = self._live.get(model) or self._ends.enter_context(self.server(model, bias=bias))
        urls = ["--stable", f"http://{before.address}", "--candidate", f"http://{made.address}"]
        self.ask_for("rollout", "start", model, *urls, "--spec", str(path), *compared, "--no-follow")
        self._next[model] = made
        return int(self.status(model)["rollout"]["version"])

    def publish(self, store: Store, model: str, bias: float) -> None:
        made = self._ends.enter_context(self.server(model, bias=bias))
        register(store, model, Endpoint(http=made.address, grpc=made.address))

    def reference(self) -> Path:
        """Rows with their answers, and with what the target is made of."""
        path, many = self.file("reference.parquet"), rows(4000, seed=99)
        late = np.random.default_rng(3).random(4000) < chances(many)
        answers = {"_answer_score": chances(many), "arr_delay": np.where(late, 30.0, 0.0)}
        pq.write_table(pa.table({**many, **answers}), path)
        return path

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
