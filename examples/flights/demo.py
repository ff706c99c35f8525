"""The whole chain on this machine, in three parts.

1. Tables, stack, pipeline, a served model, and predictions beside the real outcomes.
2. A second version, a tree model, replaces the first under live traffic.
3. A third version, deliberately slow, is rolled back.

Each rollout writes a report. The demo runs the same commands that a person would type. It can be repeated: a running
stack is used, and unchanged results are reused.

    make demo
    make demo ACT=drift                                    (drift.py: what happens when requests change)
    .venv/bin/python examples/flights/demo.py --first      (the first part alone)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from traffic import Traffic

from serin.metrics import auc
from serin.store.store import Store

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SERIN = str(Path(sys.executable).with_name("serin"))
SPEC = HERE / "spec.yaml"
MODEL = "flight-delays"
SHOWN, SCORED, BATCH_ROWS = 10, 4_000, 500

STORIES = HERE / "data"
BEGIN = time.monotonic()


def main(*, first: bool) -> int:
    os.chdir(ROOT)  # the stack's state is there, for the commands and for this script
    say("the tables")
    run([sys.executable, str(HERE / "fetch.py")])
    say("the stack: Prefect, the gateway, the rollout controller")
    stack = status() or bring_up()
    address = stack["gateway"]["url"].split("://")[-1]
    told = (model_status()["live"] or 0) if Store.open().versions(MODEL) else 0
    if told < 2:
        say("the pipeline: features, training, export, rollout")
        with (
            clients(address, newest_flights()) if told else nullcontext()
        ):  # a rollout over a live version needs some
            run([SERIN, "run", str(SPEC)])
    else:
        say(f"version {told} is live: the pipeline and its rollouts have run before")
    say("predictions through the gateway, by HTTP and gRPC, with NVIDIA's own client")
    flights = newest_flights()
    scores = predict_http(address, flights)
    late = (flights["arr_delay"] > 15).to_numpy()
    some = np.sort(np.concatenate([np.flatnonzero(late)[: SHOWN // 2], np.flatnonzero(~late)[: SHOWN // 2]]))
    show(flights.iloc[some], scores[some], predict_grpc(address, flights.iloc[some]))
    print(
        f"\nAUC {auc(late, scores):.3f} on the {len(flights):,} newest flights, which are not in the training data\n"
    )
    if told < 2 and not first:
        say("a second version, with trees instead of a network, under live traffic")
        trees = {"model": "{kind: xgboost}", "training": "{seed: 1}"}
        release("second", trees, flights, address, why="trees", ends="promoted")
        say("a third version, whose network is deliberately slow")
        wide = {
            "model": "{module: wide_network.py:Wide}",
            "training": "{epochs: 1, batch_rows: 1024, learning_rate: 0.004, seed: 1}",
        }
        release("third", wide, flights, address, why="deliberately slow", ends="rolled_back")
    run([SERIN, "status"])
    say("done")
    print(
        f"\n  console     {stack['console']['url']}   (its secret: {Path(SERIN).relative_to(ROOT)} console secret)\n"
        f"  Prefect     {stack['prefect']['url']}\n"
        f"  the model   {stack['gateway']['url']}/v2/models/{MODEL}/infer   (HTTP, and gRPC on the same port)"
    )
    for story in sorted(STORIES.glob("*-rollout.html")):
        print(f"  a story     {story.relative_to(ROOT)}")
    print(f"  stop        {Path(SERIN).relative_to(ROOT)} down\n")
    return 0


def release(
    name: str, sections: dict[str, str], rows: pd.DataFrame, address: str, *, why: str, ends: str
) -> None:
    """Publishes the example's spec with other sections, rolls it out under traffic, and writes the report."""
    spec = re.sub(
        r"^search:.*\n(?: .*\n)+", "", SPEC.read_text(), flags=re.MULTILINE
    )  # fits the network only
    path = HERE / f"{name}.yaml"
    for section, text in sections.items():
        spec = re.sub(rf"^{section}: .*$", f"{section}: {text}", spec, flags=re.MULTILINE)
    path.write_text(spec)
    print(
        f"{path.relative_to(ROOT)} is spec.yaml with another model section: {sections['model']}", flush=True
    )
    run([SERIN, "run", str(path), "--no-serve"])
    version = Store.open().versions(MODEL)[-1]
    with clients(address, rows) as traffic:
        start = [SERIN, "rollout", "start", f"{MODEL}:{version}", "--why", why]
        run(start, code=0 if ends == "promoted" else 1)
    now, failed = model_status(), sum(traffic.failures.values())
    if (now["rollout"]["version"], now["rollout"]["phase"]) != (version, ends):
        sys.exit(f"demo: version {version} should have been {ends}; `serin rollout status` shows its state")
    print(
        f"\nversion {version} was {ends.replace('_', ' ')}, version {now['live']} is live; "
        f"of {traffic.answered + failed:,} requests in the meantime {failed} failed\n"
    )
    if failed:
        sys.exit(f"demo: no request should have failed: {traffic.failures}")
    run([SERIN, "rollout", "report", MODEL, "--out", str(STORIES / f"{name}-rollout.html")])


def clients(address: str, rows: pd.DataFrame) -> Traffic:
    return Traffic(address, MODEL, request_bodies(address, rows[:1000]))


def model_status() -> dict[str, Any]:
    """Returns the live version and the state of the newest rollout."""
    found = subprocess.run(
        [SERIN, "rollout", "status", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    known = (entry for entry in json.loads(found.stdout) if entry["name"] == MODEL)
    return next(known, {"live": None})


def say(text: str) -> None:
    print(f"\n=== {time.monotonic() - BEGIN:4.0f} s  {text}", flush=True)


def run(command: list[str], code: int = 0) -> None:
    """Runs a command as a person would type it, with its output on the screen. It must exit with `code`."""
    print(
        "$",
        *(str(Path(word).relative_to(ROOT)) if word.startswith(str(ROOT)) else word for word in command),
        flush=True,
    )
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != code:
        sys.exit(f"demo: the command exited with code {done.returncode}; the lines above say why")


def status() -> dict[str, Any] | None:
    """Returns the status of the stack; None when none is up."""
    done = subprocess.run([SERIN, "status", "--json"], cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return found


def bring_up() -> dict[str, Any]:
    run([SERIN, "up"])
    stack = status()
    if stack is None:
        sys.exit("demo: the stack is up but not healthy; `serin status` shows it")
    return stack


def newest_flights() -> pd.DataFrame:
    """Returns flights of the last days with the weather of their hour: what a client would send, and the truth."""
    flights = pd.read_parquet(HERE / "data" / "flights.parquet")
    weather = pd.read_parquet(HERE / "data" / "weather.parquet")
    arrived = flights[flights["arr_delay"].notna()].sort_values("time_hour", kind="stable").tail(SCORED)
    mixed = arrived.sample(frac=1.0, random_state=1)  # so that the first few are not all from one hour
    return mixed.merge(weather, on=["origin", "time_hour"], how="left")


def tensors(client: Any, kinds: dict[str, str], rows: pd.DataFrame) -> list[Any]:
    """Returns one tensor of shape [rows, 1] per input of the model. Nulls are as in the schema: NaN, "", ..."""
    made = []
    for name, kind in kinds.items():
        tensor = client.InferInput(name, [len(rows), 1], kind)
        tensor.set_data_from_numpy(column_values(rows[name], kind).reshape(-1, 1))
        made.append(tensor)
    return made


def column_values(column: pd.Series, kind: str) -> np.ndarray:
    """Returns the values in the type of the model's input of that name."""
    if kind == "BYTES":
        return column.fillna("").to_numpy(dtype=object)
    if pd.api.types.is_datetime64_any_dtype(column):
        return column.dt.as_unit("us").astype("int64").to_numpy()
    return column.to_numpy(dtype=np.float32 if kind == "FP32" else np.int64)


def request_bodies(address: str, rows: pd.DataFrame) -> list[list[dict[str, Any]]]:
    """Returns a request of one row for each of `rows`, as JSON that any HTTP client can send."""
    with http_client.InferenceServerClient(address) as client:
        kinds = {entry["name"]: entry["datatype"] for entry in client.get_model_metadata(MODEL)["inputs"]}
    rows = rows.dropna(subset=list(kinds))  # JSON has no NaN
    columns = {name: column_values(rows[name], kind).tolist() for name, kind in kinds.items()}
    return [
        [
            {"name": name, "datatype": kind, "shape": [1, 1], "data": [columns[name][row]]}
            for name, kind in kinds.items()
        ]
        for row in range(len(rows))
    ]


def predict_http(address: str, rows: pd.DataFrame) -> np.ndarray:
    with http_client.InferenceServerClient(address) as client:
        kinds = {entry["name"]: entry["datatype"] for entry in client.get_model_metadata(MODEL)["inputs"]}
        answers = [
            client.infer(MODEL, tensors(http_client, kinds, rows[start : start + BATCH_ROWS])).as_numpy(
                "score"
            )
            for start in range(0, len(rows), BATCH_ROWS)
        ]
    return np.concatenate(answers).ravel()


def predict_grpc(address: str, rows: pd.DataFrame) -> np.ndarray:
    with grpc_client.InferenceServerClient(address) as client:
        kinds = {entry.name: entry.datatype for entry in client.get_model_metadata(MODEL).inputs}
        return client.infer(MODEL, tensors(grpc_client, kinds, rows)).as_numpy("score").ravel()


def show(flights: pd.DataFrame, by_http: np.ndarray, by_grpc: np.ndarray) -> None:
    print("\na random sample, half of them late: the predicted probability, and what happened")
    print(f"  {'flight':<8}{'from':<5}{'to':<5}{'scheduled (UTC)':<18}{'HTTP':>7}{'gRPC':>7}   what happened")
    for flight, http, grpc in zip(flights.itertuples(), by_http, by_grpc, strict=True):
        truth = f"{flight.arr_delay:.0f} min late" if flight.arr_delay > 15 else "on time"
        print(
            f"  {flight.carrier}{flight.flight:<6}{flight.origin:<5}{flight.dest:<5}{flight.time_hour:%Y-%m-%d %H:%M}  "
            f"{http:>7.3f}{grpc:>7.3f}   {truth}"
        )


if __name__ == "__main__":
    sys.exit(main(first="--first" in sys.argv[1:]))
