"""A place where Serin runs, as its users see it: commands, gateways, and a store that models are published to."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import yaml

from serin.host.state import running_stack
from serin.store.store import Store
from tests.e2e.whole_stack import Stack
from tests.fakes.kserve import KServe
from tests.fakes.webhooks import Webhook, webhook
from tests.kit.commands import serin_process
from tests.kit.threads import beside
from tests.kit.waiting import until
from tests.kit.web import Answer, ask, in_a_thread, slowly
from tests.unit.serving import bundles

AT_ONCE: dict[str, Any] = {"steps": [100], "step_time": "0s", "min_requests": 0, "warmup": "0s", "bake": "0s"}
# Wide margins: what is shown is that it happens, and not how small a difference is seen on a busy machine.
CANARY: dict[str, Any] = {
    "steps": [50, 100], "step_time": "2s", "min_requests": 20, "warmup": "0s", "bake": "1s", "deadline": "300s",
    "false_rollback": 0.1, "false_promotion": 0.2,
    "latency": {"quantiles": [0.5], "margin": 1.0, "bad_margin": 4.0, "tolerance_ms": 10},
}  # fmt: skip
Columns = Mapping[str, Sequence[Any]]


class Refused(Exception):
    """A command that was refused, with its reason."""


def rows(count: int, seed: int = 0, carrier: str | None = None) -> dict[str, list[Any]]:
    """Request columns without nulls."""
    draw = np.random.default_rng(seed)
    names = draw.choice(["AA", "UA", "DL"], count).tolist()
    return {
        "carrier": [carrier] * count if carrier else names,
        "temp": draw.normal(size=count).astype(np.float32).tolist(),
        "distance": draw.integers(-3, 3, count).tolist(),
        "night": draw.integers(0, 2, count).tolist(),
    }


def chances(columns: Columns, bias: float = 0.0) -> Any:
    """The scores that a version with this bias gives: the formula of `bundles.graph`."""
    codes = np.array([{"AA": 1.0, "UA": 2.0, "DL": 3.0}.get(each, 0.0) for each in columns["carrier"]])
    logit = (
        codes + np.array(columns["temp"]) + np.array(columns["distance"]) + np.array(columns["night"]) + bias
    )
    return 1 / (1 + np.exp(-logit))


def request_body(columns: Columns) -> dict[str, Any]:
    inputs = [
        {"name": name, "datatype": kind, "shape": [len(columns[name]), 1], "data": list(columns[name])}
        for name, kind in ((each.name, each.dtype) for each in bundles.SCHEMA.inputs)
    ]
    return {"inputs": inputs}


def scores(answer: Answer) -> Any:
    assert answer.status == 200, f"{answer.status} {answer.text[:300]}"
    return np.array(json.loads(answer.text)["outputs"][0]["data"])


def spec(model: str, **sections: Any) -> dict[str, Any]:
    """A whole spec for the hand-made model; `sections` replace those of it."""
    return {
        "name": model,
        "data": {
            "tables": {"flights": "flights.parquet"},
            "target": {"expression": "arr_delay > 15", "task": "binary"},
        },
        "features": [
            {"columns": ["temp", "distance"], "steps": ["fill_median"]},
            {"columns": ["carrier", "night"], "steps": ["categorify"]},
        ],
        "objectives": {"latency_ms": 2000},
        "serving": {"request_timeout": "10s"},
        "rollout": AT_ONCE,
        **sections,
    }


@dataclass
class Load:
    """What clients of all gateways got. `seen`: the scores of the one row that all of them send."""

    answered: int = 0
    errors: list[str] = field(default_factory=list)
    seen: set[float] = field(default_factory=set)


class Place(ABC):
    """Where scenarios run. `folder`: for their files."""

    name = "machine"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()

    # What a place must say.
    @abstractmethod
    def serin_done(
        self, words: Sequence[str], home: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        """Exit code, output and errors of a command at the machine where an operator types it."""

    @property
    @abstractmethod
    def gateways(self) -> list[str]:
        """host:port of each."""

    @property
    @abstractmethod
    def store(self) -> Store:
        """The store of the models."""

    address = "127.0.0.1"  # where servers of a test listen, so that the place reaches them

    def open_port(self, port: int) -> None:
        """Lets the place reach a receiver of alerts, or a package index, at this port of `address`."""
        del port

    @contextmanager
    def prefect(self) -> Iterator[dict[str, str]]:
        """Prefect's server and workers while the block runs: the variables with which a command finds them."""
        yield {}

    def inside(self, gateway: str = "") -> AbstractContextManager[None]:
        """Sockets that are opened within the block are in the network of a gateway, or of the store."""
        del gateway
        return nullcontext()

    @abstractmethod
    def repositories(self, release: str) -> list[Path]:
        """The folders of Triton's model repository of a release, one for each server that runs it."""

    def call(
        self, gateway: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        with self.inside(gateway):
            return ask(gateway, path, body, headers)

    # What follows from it.
    def serin(self, *words: str, home: Path | None = None) -> str:
        code, out, err = self.serin_done(words, home)
        assert code == 0, f"serin {' '.join(words)} exited with {code}: {last_line(out + err)}"
        return out

    def json(self, *words: str, home: Path | None = None) -> Any:
        return json.loads(self.serin(*words, "--json", home=home))

    def ask_for(self, *words: str, **variables: str) -> str:
        """The command that asks for what a scenario is about; Refused with its reason if it is refused."""
        code, out, err = self.serin_done(words, **variables)
        if code:
            raise Refused(last_line(out + err))
        return out

    def publish(self, store: Store, model: str, bias: float) -> None:
        """The first version of a model in another store."""
        bundles.publish(store, bias=bias, spec=yaml.safe_dump(spec(model)), model=model)

    def start(self, model: str, *, bias: float = 0.0, side: int = 0, **sections: Any) -> int:
        """Publishes the next version and asks for its rollout; returns its number. `side`: of the work that slows it
        down, and `files`: see `bundles.publish`."""
        files = sections.pop("files", None)
        text = yaml.safe_dump(spec(model, **sections))
        with self.inside():
            version = bundles.publish(
                self.store, bias=bias, spec=text, model=model, side=side, extra=files
            ).version
        self.ask_for("rollout", "start", f"{model}:{version}", "--no-follow")
        return version

    def follow(self, model: str) -> tuple[bool, str]:
        """Waits for the end of the newest rollout: whether it was promoted, and what was decided."""
        code, out, err = self.serin_done(["rollout", "watch", model])
        return code == 0, out + err

    def roll_out(self, model: str, **how: Any) -> int:
        version = self.start(model, **how)
        promoted, said = self.follow(model)
        assert promoted, f"{model} version {version}: {last_line(said)}"
        return version

    def status(self, model: str) -> dict[str, Any]:
        (found,) = self.json("rollout", "status", model)
        return dict(found)

    def infer(self, model: str, columns: Columns, gateway: str = "", **headers: str) -> Answer:
        return self.infer_body(model, request_body(columns), gateway, **headers)

    def infer_body(
        self, model: str, body: Mapping[str, Any], gateway: str = "", *, takes_s: float = 0.0, **headers: str
    ) -> Answer:
        """Without a gateway: all of them in turn. `takes_s`: until the body has arrived."""
        where = gateway or self.gateways[next(self._numbers) % len(self.gateways)]
        path = f"/v2/models/{model}/infer"
        if not takes_s:
            return self.call(where, path, body, headers)
        sent, length = slowly(json.dumps(body).encode(), takes_s)
        return self.call(where, path, sent, {**headers, **length})

    def send(self, model: str, batches: Sequence[Columns], every_s: float = 0.0) -> list[str]:
        """Sends requests one after the other to all gateways in turn; returns their ids."""
        ids = []
        for batch in batches:
            answer = self.infer(model, batch)
            scores(answer)
            ids.append(str(answer.headers["x-request-id"]))
            time.sleep(every_s)
        return ids

    @contextmanager
    def load(
        self,
        model: str,
        clients: int = 3,
        pause_s: float = 0.05,
        body: Mapping[str, Any] | None = None,
        takes_s: float = 0.0,
    ) -> Iterator[Load]:
        """Clients that ask all gateways all the time for the score of one row. `body`: a request with it, for a model
        that is not the hand-made one; `takes_s`: until a body has arrived."""
        stop, seen, lock = threading.Event(), Load(), threading.Lock()
        one = body or request_body(rows(1, seed=5))

        def client() -> None:
            while not stop.wait(pause_s):
                try:
                    found = round(float(scores(self.infer_body(model, one, takes_s=takes_s))[0]), 4)
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    with lock:
                        seen.errors.append(str(error) or repr(error))
                    continue
                with lock:
                    seen.answered += 1
                    seen.seen.add(found)

        with beside(*[client] * clients, stop=stop):
            until(lambda: seen.answered > 5, "answers", within_s=60, said=lambda: seen.errors[:3])
            seen.errors.clear()  # of a gateway that has just got its first routes
            yield seen

    @contextmanager
    def server(self, model: str, *, bias: float = 0.0, delay_s: float = 0.0) -> Iterator[KServe]:
        """A server of the KServe v2 protocol that is not Serin's, with the hand-made model."""

        def answer(body: bytes) -> dict[str, Any]:
            sent = {each["name"]: each["data"] for each in json.loads(body)["inputs"]}
            found = chances(sent, bias).tolist()
            output = {"name": "score", "datatype": "FP32", "shape": [len(found), 1], "data": found}
            return {"model_name": model, "outputs": [output]}

        inputs = [
            {"name": each.name, "datatype": each.dtype, "shape": [-1, 1]} for each in bundles.SCHEMA.inputs
        ]
        tensors = {"inputs": inputs, "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1, 1]}]}
        with self.inside():
            made = KServe(model=model, tensors=tensors, answer=answer, delay_s=delay_s, host=self.address)
        with in_a_thread(made):
            yield made

    @contextmanager
    def receiver(self) -> Iterator[Webhook]:
        """Gets the alerts of this place while the block runs."""
        name = f"receiver-{next(self._numbers)}"
        with ExitStack() as ends:
            with self.inside():
                hook = ends.enter_context(webhook(self.address))
            self.open_port(urlsplit(hook.url).port or 80)
            self.ask_for("alerts", "receivers", "add", name, hook.url)
            try:
                yield hook
            finally:
                self.serin_done(["alerts", "receivers", "remove", name])

    def clean(self, model: str) -> None:
        """Takes a model out of service, so that the next scenario has the machine for itself."""
        code, out, err = self.serin_done(["retire", model, "--yes"])
        if code and "abort" in out + err:  # a rollout runs
            self.serin_done(["rollout", "abort", model])
            self.serin_done(["rollout", "watch", model])
            self.serin_done(["retire", model, "--yes"])

    bundles = True  # whether models come from the store
    block_s = 1.0  # of live quality: rows within it may depend on each other

    def train(self, document: Mapping[str, Any]) -> None:
        """Publishes a version that was trained by the stages."""
        path = self.file("spec.yaml")
        path.write_text(yaml.safe_dump(dict(document), sort_keys=False))  # the first table is the main one
        for stage in ("etl", "train", "export"):
            self.serin(stage, str(path))

    def open_again(self) -> None:
        """Lets clients in without a key."""
        self.serin_done(["keys", "require", "--off"])

    def file(self, name: str) -> Path:
        return self.folder / f"{next(self._numbers)}-{name}"


def last_line(said: str) -> str:
    """The error of a command."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no output")


class Machine(Place):
    """One machine with the stack of `serin up`."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        super().__init__(folder)
        self.stack = stack
        self.gateway = running_stack(stack.home).gateway_url.removeprefix("http://")

    def serin_done(
        self, words: Sequence[str], home: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        other = {} if home is None else {"SERIN_HOME": str(home)}
        done = serin_process(*words, env={**self.stack.environment, **other, **variables}, code=None)
        return done.returncode, done.stdout, done.stderr

    @property
    def gateways(self) -> list[str]:
        return [self.gateway]

    @property
    def store(self) -> Store:
        return Store(str(self.stack.home / "store"))

    def repositories(self, release: str) -> list[Path]:
        return [self.stack.home / "releases" / release / "repository"]


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Starts a stack, and ends it after the block."""
    stack = Stack(folder / "home")
    try:
        stack.serin("up")
        yield Machine(stack, folder)
        stack.serin("down")
    finally:
        stack.kill()
