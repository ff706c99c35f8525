"""The whole chain on this machine: tables, stack, pipeline, a served model, predictions beside what really happened.

Runs the same commands a person would type. Can be run again: a stack that is up is used, what has not changed is kept.
    make demo
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from serin.metrics import auc

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SERIN = str(Path(sys.executable).with_name("serin"))
SPEC = HERE / "spec.yaml"
MODEL = "flight-delays"
SHOWN, SCORED, BATCH_ROWS = 10, 4_000, 500

BEGIN = time.monotonic()


def main() -> int:
    say("the tables")
    run([sys.executable, str(HERE / "fetch.py")])
    say("the stack: Prefect, the gateway, the rollout controller")
    stack = status() or bring_up()
    say("the pipeline: features, training, export, rollout")
    run([SERIN, "run", str(SPEC)])
    say("predictions through the gateway, by HTTP and gRPC, with NVIDIA's own client")
    flights = newest_flights()
    gateway = stack["gateway"]["url"]
    address = gateway.split("://")[-1]
    scores = predict_http(address, flights)
    late = (flights["arr_delay"] > 15).to_numpy()
    some = np.sort(np.concatenate([np.flatnonzero(late)[: SHOWN // 2], np.flatnonzero(~late)[: SHOWN // 2]]))
    show(flights.iloc[some], scores[some], predict_grpc(address, flights.iloc[some]))
    print(
        f"\nAUC {auc(late, scores):.3f} on the {len(flights):,} newest flights, which were not trained on\n"
    )
    run([SERIN, "status"])
    say("done")
    print(
        f"\n  Prefect     {stack['prefect']['url']}\n"
        f"  the model   {gateway}/v2/models/{MODEL}/infer   (HTTP, and gRPC on the same port)\n"
        f"  stop        {Path(SERIN).relative_to(ROOT)} down\n"
    )
    return 0


def say(text: str) -> None:
    print(f"\n=== {time.monotonic() - BEGIN:4.0f} s  {text}", flush=True)


def run(command: list[str]) -> None:
    """Shown as a person would type it; its output goes straight to the screen."""
    print(
        "$",
        *(str(Path(word).relative_to(ROOT)) if word.startswith(str(ROOT)) else word for word in command),
        flush=True,
    )
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"demo: that ended with code {done.returncode}; the lines above say why")


def status() -> dict[str, Any] | None:
    """The stack as it is; None when none is up."""
    done = subprocess.run([SERIN, "status", "--json"], cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return found


def bring_up() -> dict[str, Any]:
    run([SERIN, "up"])
    stack = status()
    if stack is None:
        sys.exit("demo: the stack came up but is not well; `serin status` shows it")
    return stack


def newest_flights() -> pd.DataFrame:
    """Flights of the last days with the weather of their hour: what a client would send, and the truth to compare."""
    flights = pd.read_parquet(HERE / "data" / "flights.parquet")
    weather = pd.read_parquet(HERE / "data" / "weather.parquet")
    arrived = flights[flights["arr_delay"].notna()].sort_values("time_hour", kind="stable").tail(SCORED)
    mixed = arrived.sample(frac=1.0, random_state=1)  # so that the first few are not all of one hour
    return mixed.merge(weather, on=["origin", "time_hour"], how="left")


def tensors(client: Any, kinds: dict[str, str], rows: pd.DataFrame) -> list[Any]:
    """One tensor of shape [rows, 1] per input the model names. Nulls are what the schema says: NaN, "", ..."""
    made = []
    for name, kind in kinds.items():
        column = rows[name]
        if kind == "BYTES":
            values = column.fillna("").to_numpy(dtype=object)
        elif pd.api.types.is_datetime64_any_dtype(column):
            values = column.dt.as_unit("us").astype("int64").to_numpy()
        else:
            values = column.to_numpy(dtype=np.float32 if kind == "FP32" else np.int64)
        tensor = client.InferInput(name, [len(rows), 1], kind)
        tensor.set_data_from_numpy(values.reshape(-1, 1))
        made.append(tensor)
    return made


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
    print("\nsome at random, half of them late: how likely that was said to be, and what happened")
    print(f"  {'flight':<8}{'from':<5}{'to':<5}{'scheduled (UTC)':<18}{'HTTP':>7}{'gRPC':>7}   what happened")
    for flight, http, grpc in zip(flights.itertuples(), by_http, by_grpc, strict=True):
        truth = f"{flight.arr_delay:.0f} min late" if flight.arr_delay > 15 else "on time"
        print(
            f"  {flight.carrier}{flight.flight:<6}{flight.origin:<5}{flight.dest:<5}{flight.time_hour:%Y-%m-%d %H:%M}  "
            f"{http:>7.3f}{grpc:>7.3f}   {truth}"
        )


if __name__ == "__main__":
    sys.exit(main())
