"""The demo's act about drift: a watched version goes live, then clients send another kind of flights.

A third of the new flights are of an airline that training never had. The watcher raises its alarm; the act prints what
that says and what to do. It needs what `make demo` leaves, and makes it where it is missing.

    make demo ACT=drift
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import demo
import pandas as pd
from demo import HERE, MODEL, ROOT, SERIN, STORIES, bring_up, clients, model_status, release, run, say, status

from serin.spec.load import load_spec
from serin.store.store import Store

WATCHED = {
    "model": "{kind: xgboost}",
    "training": "{seed: 1}",
    "serving": "{max_batch_rows: 1024}\nmonitoring: {capture: {share: 1}, drift: {false_alarms: 1 per year}}",
}
USUAL_S, ALARM_S, LOOK_S = 30.0, 180.0, 2.0


def main() -> int:
    os.chdir(ROOT)
    address = ((status() or bring_up())["gateway"]["url"]).split("://")[-1]
    if not live_version():
        demo.main(first=True)
    usual = usual_flights()
    if not is_watched(live_version()):
        say("a version whose requests are recorded and watched, under live traffic")
        release("watched", WATCHED, usual, address, why="watched for drift", ends="promoted")
    say(f"{USUAL_S:.0f} s of flights like those of the training rows")
    with clients(address, usual):
        time.sleep(USUAL_S)
    before = alarms()
    print(f"\nopen alarms: {', '.join(before) or 'none'}")
    say("flights of another kind: a third of them are of an airline that training never had")
    began = time.monotonic()
    with clients(address, other_flights(usual)):
        raised = wait_for_alarm()
    when = "is open since an earlier act" if before else f"came after {time.monotonic() - began:.0f} s"
    say(f"the alarm {when}: {', '.join(raised)}")
    run([SERIN, "alerts", "list"])
    run([SERIN, "drift", MODEL, "--report", str(STORIES / "drift.html")])
    say("done")
    print(
        "\n  what to do  The alarm names the column, its values then and now, and the commands to look further.\n"
        "              Wrong values: correct their client; the alarm ends by itself.\n"
        "              The world has changed: train on newer rows, `serin run SPEC`, or let\n"
        "              `monitoring: {retrain: [drift]}` do it.\n"
        f"  all columns {(STORIES / 'drift.html').relative_to(ROOT)}\n"
    )
    return 0


def live_version() -> int:
    return int(model_status()["live"] or 0) if Store.open().versions(MODEL) else 0


def is_watched(version: int) -> bool:
    spec = load_spec(Path(Store.open().bundle(MODEL, version).path) / "spec.yaml")
    return spec.monitoring.drift is not None


def usual_flights() -> pd.DataFrame:
    """Returns flights of the time that training has seen, with the weather of their hour."""
    flights = pd.read_parquet(HERE / "data" / "flights.parquet").sort_values("time_hour", kind="stable")
    weather = pd.read_parquet(HERE / "data" / "weather.parquet")
    seen = flights[: len(flights) * 7 // 10].sample(4_000, random_state=1)
    return seen.merge(weather, on=["origin", "time_hour"], how="left")


def other_flights(usual: pd.DataFrame) -> pd.DataFrame:
    other = usual.copy()
    other.loc[other.index % 3 == 0, "carrier"] = "ZZ"
    return other


def alarms() -> list[str]:
    """Returns the columns whose drift alarm is open."""
    done = subprocess.run([SERIN, "drift", MODEL, "--json"], cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"alarms": []}
    return [alarm["column"] for alarm in found["alarms"]]


def wait_for_alarm() -> list[str]:
    end = time.monotonic() + ALARM_S
    while not (found := alarms()):
        if time.monotonic() > end:
            sys.exit(
                f"demo: no alarm within {ALARM_S:.0f} s; `serin drift {MODEL}` and `serin status` show why"
            )
        time.sleep(LOOK_S)
    return found


if __name__ == "__main__":
    sys.exit(main())
