"""Card fraud from the first table to the retrained model, on this machine, in less than five minutes.

1. A bank's payments of 45 days become a model: windows over the past hour and day, and a lookup of merchants.
2. A month is replayed: the gateway adds the windows, labels come days later, the table of merchants is read again.
3. A new way of paying appears, and a new kind of fraud with it. The watcher raises its alarm.
4. The alarm trains the model again. The new version is a canary first, then it is live.
5. A page with pictures tells what happened: data/page.html.

The commands are those that a person would type. All state is in data/, and no process is left.

    make payments
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from page import REFUSED_AT, WINDOWS, Told, payments_page
from terminals import Terminals
from world import HOUR_US, World, write_merchants, write_payments

import serin
from serin.host.state import read_stack
from serin.monitoring.alerts.alert import AlertRecord
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.quality.view import read_quality
from serin.monitoring.retrain import read_retraining
from serin.rollout.run.status import ModelStatus, model_status

HERE = Path(__file__).resolve().parent
SERIN = str(Path(sys.executable).with_name("serin"))
MODEL = "payments"
HISTORY_DAYS, JOB_DAYS, REFRESH_DAY, AFTER_DAYS = 45, 5, 57, 8
STREAM_DAYS = 200  # more than are needed
RATE = 150.0  # payments per second of the replay
LOOK_S, LONGEST_S = 0.2, 600.0  # of a wait
T = TypeVar("T")


class StoryEnded(Exception):
    """Something did not happen; the text says what, and where to look."""


@dataclass(kw_only=True)
class Story:
    """`folder`: where all files are written. `home`: the state of the stack. `marks`: events with their times in the
    simulation."""

    folder: Path
    home: Path
    world: World
    rate: float = RATE
    began: float = field(default_factory=time.monotonic)
    marks: dict[str, pd.Timestamp] = field(default_factory=dict)
    seen: pd.DataFrame = field(default_factory=pd.DataFrame)  # all payments up to the end of the stream
    labelled: pd.Timestamp = field(init=False)  # labels that became known later are not added yet
    next_job: pd.Timestamp = field(init=False)

    def __post_init__(self) -> None:
        self.labelled = self.world.moment(HISTORY_DAYS)
        self.next_job = self.world.moment(HISTORY_DAYS + JOB_DAYS)

    # What a person sees and types

    def say(self, text: str) -> None:
        print(f"\n=== {time.monotonic() - self.began:4.0f} s  {text}", flush=True)

    def serin(self, *words: str) -> None:
        """Runs a command with its output on the screen. It must succeed."""
        print("$ serin", *words, flush=True)
        done = subprocess.run([SERIN, *words], cwd=self.folder)
        if done.returncode:
            raise StoryEnded(
                f"`serin {' '.join(words)}` exited with code {done.returncode}; the lines above say why"
            )

    def ask(self, *words: str) -> Any:
        """Returns the answer of a command as JSON."""
        print("$ serin", *words, "--json", flush=True)
        done = subprocess.run([SERIN, *words, "--json"], cwd=self.folder, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise StoryEnded(
                f"`serin {' '.join(words)}` exited with code {done.returncode}; the lines above say why"
            )
        return json.loads(done.stdout)

    @property
    def address(self) -> str:
        return str(self.ask("status")["gateway"]["url"]).partition("://")[2]

    def until(self, found: Callable[[], T | None], what: str, terminals: Terminals) -> T:
        """Waits until something is found. Ends the story when a process or the time is over."""
        end = time.monotonic() + LONGEST_S
        while not (result := found()):
            up = read_stack(self.home)
            if up is None or not up.is_alive:
                raise StoryEnded(f"the stack has ended before {what}; its logs are in {self.home / 'logs'}")
            if terminals.is_over:
                raise StoryEnded(f"all payments were sent before {what}")
            if time.monotonic() > end:
                raise StoryEnded(
                    f"{what}: not within {LONGEST_S:.0f} s; the logs are in {self.home / 'logs'}"
                )
            time.sleep(LOOK_S)
        return result

    # The chapters

    def write_tables(self, day: float) -> None:
        """The bank's nightly job: the payments of the last 45 days, with the labels that are known."""
        now = self.world.moment(day)
        recent = (self.seen["at"] < now) & (self.seen["at"] >= now - timedelta(days=HISTORY_DAYS))
        write_payments(self.seen[recent], self.folder / "payments.parquet", now)

    def prepare(self) -> None:
        self.say(f"{HISTORY_DAYS} days of payments, and what comes after")
        self.seen = self.world.payments(0, HISTORY_DAYS + STREAM_DAYS)
        self.write_tables(HISTORY_DAYS)
        write_merchants(self.world.merchant_table(HISTORY_DAYS - 1), self.folder / "merchants.parquet")
        spec = (HERE / "spec.yaml").read_text().replace("data/", "")
        (self.folder / "spec.yaml").write_text(spec)
        rows = int((self.world.day_of(self.seen["at"]) < HISTORY_DAYS).sum())
        print(f"{rows:,} payments of {self.world.cards} cards at {self.world.merchants} merchants")

    def first_version(self) -> None:
        self.say("the first version: features, training, export")
        self.serin("check", "spec.yaml")
        for stage in ("etl", "train", "export"):
            self.serin(stage, "spec.yaml")
        self.say("its windows start warm, then it goes live")
        self.serin("events", "backfill", MODEL)
        self.serin("rollout", "start", MODEL)

    def terminals(self) -> Terminals:
        live = self.seen[self.world.day_of(self.seen["at"]) >= HISTORY_DAYS]
        return Terminals(self.address, MODEL, live, self.rate)

    def replay(self, terminals: Terminals, found: Callable[[], T | None], what: str) -> T:
        """Sends payments until something is found. Every fifth day the nightly job runs."""
        terminals.resume()
        while True:
            self.until(lambda: found() or terminals.at >= self.next_job, what, terminals)
            if terminals.at >= self.next_job:
                self.nightly(terminals.at)
                self.next_job += timedelta(days=JOB_DAYS)
            if result := found():
                return result

    def replay_to(self, terminals: Terminals, day: float) -> None:
        moment = self.world.moment(day)
        self.replay(terminals, lambda: terminals.at >= moment, f"day {day:g}")

    def nightly(self, now: pd.Timestamp) -> None:
        """Writes the bank's table again, and gives the labels that became known to the platform."""
        self.write_tables(self.world.day_of(pd.Series([now]))[0])
        self.add_labels(now)

    def add_labels(self, now: pd.Timestamp) -> None:
        live = self.seen["at"] >= self.world.moment(HISTORY_DAYS)
        new = self.seen[live & (self.seen["known"] > self.labelled) & (self.seen["known"] <= now)]
        self.labelled = now
        if len(new):
            new[["payment", "fraud"]].to_parquet(self.folder / "labels.parquet")
            self.serin("labels", "add", MODEL, "labels.parquet", "--client-id", "payment")

    def refresh(self, terminals: Terminals) -> None:
        self.say("the bank's list of merchants has changed: the live model reads it again")
        write_merchants(self.world.merchant_table(REFRESH_DAY), self.folder / "merchants.parquet")
        terminals.rate = self.rate / 3  # the days pass more slowly while it does
        self.serin("lookups", "refresh", MODEL, "--why", "new chargebacks")
        terminals.rate = self.rate

    def wait_for_alarm(self, terminals: Terminals) -> AlertRecord:
        """Replays until a column has drifted. The clock of the simulation then waits for the retraining."""
        found = self.replay(terminals, self.alarm, "an alarm")
        self.marks["alarm"] = terminals.at
        terminals.pause()
        return found

    def alarm(self) -> AlertRecord | None:
        found = read_alerts(self.home, MODEL, resolved=5)
        return next((each for each in (*found.open, *found.resolved) if each.alert.kind == "drift"), None)

    def retrained(self, terminals: Terminals) -> None:
        """Waits for the retraining that the alarm has started, and for the canary of its version."""
        now = self.until(lambda: self._rollout_of(2), "the retraining", terminals)
        self.say(f"version {now.rollout.version} is trained and takes its first traffic")
        self.marks["canary"] = terminals.at
        try:
            ended = self.replay(terminals, lambda: self._ended(2), "the end of the rollout")
        except StoryEnded as error:
            found = self._rollout_of(2)
            raise StoryEnded(
                f"{error}; {found.rollout.phase}: {found.rollout.reason}" if found else str(error)
            ) from error
        if ended.rollout.phase != "promoted":
            raise StoryEnded(f"version 2 was {ended.rollout.phase}: {ended.rollout.reason}")
        self.marks["version 2"] = terminals.at
        self.say("version 2 is live")

    def _rollout_of(self, version: int) -> ModelStatus | None:
        for each in read_retraining(self.home, MODEL).begun:
            if each.outcome == "failed":
                raise StoryEnded(f"the retraining failed: {each.detail}")
        now = model_status(self.home, MODEL)
        return now if now and now.rollout.version == version else None

    def _ended(self, version: int) -> ModelStatus | None:
        now = self._rollout_of(version)
        return now if now and not now.rollout.running else None

    # The end

    def collect(self, terminals: Terminals) -> pd.DataFrame:
        """Returns the recorded requests with the truth, once the labels of all payments have come."""
        self.say("some quiet days later all labels are known")
        terminals.pause()
        self.add_labels(terminals.at + timedelta(days=7))
        wanted = terminals.answered
        self.until(lambda: self._labels() >= wanted, "all labels are joined", terminals)
        self.serin("quality", MODEL)
        self.serin("captures", "export", MODEL, "--out", "captures.parquet")
        return self.recorded()

    def _labels(self) -> int:
        found = read_quality(self.home, MODEL)
        return 0 if found is None else sum(release.labelled for release in found.releases)

    def recorded(self) -> pd.DataFrame:
        """The recorded requests, and what the bank knows of each payment."""
        rows = pd.read_parquet(self.folder / "captures.parquet").rename(columns={"_client_id": "payment"})
        rows = rows.merge(self.seen[["payment", "card", "fraud"]], on="payment", validate="one_to_one")
        rows["score"], rows["at"] = rows["_answer_score"], rows["at"].dt.tz_localize("UTC")
        rows["day"] = self.world.day_of(rows["at"])
        rows["seconds"] = (rows["_t"] - rows["_t"].min()).dt.total_seconds()
        first, then = (
            self.world.merchant_table(day).set_index("merchant")["risk"] for day in (0, REFRESH_DAY)
        )
        rows["taken_over"] = rows["merchant"].isin(then.index[then > first])
        return rows.sort_values("at", kind="stable", ignore_index=True)

    def different_windows(self, rows: pd.DataFrame) -> int:
        """How many recorded windows are not what the whole table gives, bit by bit."""
        table = windows_of(self.seen[self.seen["at"] <= rows["at"].max()])
        expected = rows[["payment"]].merge(table, on="payment", how="left", validate="one_to_one")
        return sum(int((~_same(rows[name], expected[name])).sum()) for name in WINDOWS)

    def explain(self, row: pd.Series) -> dict[str, Any]:
        """Why a recorded payment got its score, by the release that gave it."""
        (found,) = self.ask("explain", MODEL, "--id", row["_id"])
        values = {name: _short(value) for name, value in found["values"].items()}
        return {**found, "values": {**values, "at": f"{row['at']:%H:%M}"}}

    def before(self, rows: pd.DataFrame) -> np.ndarray:
        """What the newest edition of version 1 answers to the requests of version 2."""
        editions = [name for name in rows["_release"].unique() if name.startswith(f"{MODEL}-v1")]
        old = serin.Model.load(MODEL, max(editions).removeprefix(f"{MODEL}-v"))
        newer = rows[rows["_release"].str.contains("-v2")]
        sent = ["amount", "merchant", "channel", "at", *WINDOWS]
        return old.predict(newer[sent])["score"].to_numpy(np.float64)

    def _days(self, rows: pd.DataFrame) -> dict[str, float]:
        """The days of the marks, and that of the first payment that an edition with a newer table answered."""
        days = {name: float(self.world.day_of(pd.Series([at]))[0]) for name, at in self.marks.items()}
        newer = rows[rows["_release"].str.fullmatch(rf"{MODEL}-v1e\d+")]
        return {**days, "lookup refreshed": float(newer["day"].min())} if len(newer) else days

    def write_page(self, terminals: Terminals, rows: pd.DataFrame) -> Path:
        alarm = self.alarm()
        refused = refused_payment(rows)
        newer = "version 2" in self.marks
        if newer:
            self.serin("rollout", "report", MODEL, "--out", "rollout.html")
        told = Told(
            rows=rows,
            marks=self._days(rows),
            failures=sum(terminals.failures.values()),
            equal=(len(rows) * len(WINDOWS), self.different_windows(rows)),
            seconds=time.monotonic() - self.began,
            alarm=None if alarm is None else (alarm.alert.title, alarm.alert.text),
            refused=refused,
            reason=None if refused is None else self.explain(refused),
            before=self.before(rows) if newer else None,
            report="rollout.html" if newer else None,
        )
        page = self.folder / "page.html"
        page.write_text(payments_page(told), encoding="utf-8")
        return page


def refused_payment(rows: pd.DataFrame) -> pd.Series | None:
    """The refused fraud with the most payments of its card in the hour before, of the newest version."""
    newest = rows["_release"].str.extract(r"-v(\d+)")[0].astype(int)
    found = rows[(newest == newest.max()) & rows["fraud"] & (rows["score"] >= REFUSED_AT)]
    return found.sort_values(["payments_1h", "payment"]).iloc[-1] if len(found) else None


def windows_of(payments: pd.DataFrame) -> pd.DataFrame:
    """The windows of each payment by plain sums over the table, to compare what was served with."""
    made = []
    for _, own in payments.groupby("card"):
        at = own["at"].dt.as_unit("us").astype("int64").to_numpy()
        amount = own["amount"].to_numpy(np.float64)
        columns: dict[str, list[Any]] = {name: [] for name in WINDOWS}
        for hours, name in ((1, "1h"), (24, "1d")):
            firsts = np.searchsorted(at, at - hours * HOUR_US)
            for first, end in zip(firsts, np.searchsorted(at, at), strict=True):
                inside = amount[first:end]
                columns[f"payments_{name}"].append(len(inside))
                columns[f"spent_{name}"].append(np.float32(inside.sum()) if len(inside) else np.nan)
                if name == "1d":
                    columns["largest_1d"].append(np.float32(inside.max()) if len(inside) else np.nan)
        made.append(pd.DataFrame({"payment": own["payment"].to_numpy(), **columns}))
    return pd.concat(made, ignore_index=True)


def _same(served: pd.Series, expected: pd.Series) -> np.ndarray:
    first, second = (np.asarray(each, np.float32) for each in (served, expected))
    return (first == second) | (np.isnan(first) & np.isnan(second))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


@contextmanager
def stack(story: Story) -> Iterator[None]:
    """A stack within the block. Nothing is left of one that an earlier run could not stop."""
    earlier = read_stack(story.home)
    if earlier is not None and earlier.is_alive:
        story.serin("down")
    shutil.rmtree(story.home, ignore_errors=True)
    story.say("the stack: Prefect, the gateway, the windows, the rollout controller, the watcher")
    try:
        story.serin("up")
        yield
    finally:  # whatever is left is stopped, also of a start that failed
        print("$ serin down", flush=True)
        subprocess.run([SERIN, "down"], cwd=story.folder)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--out", type=Path, default=HERE / "data", help="the folder for all files")
    arguments.add_argument("--seed", type=int, default=7)
    given = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stack is stopped
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    home = folder / "serin-home"  # is removed before each run: nobody else has a folder of that name
    os.environ["SERIN_HOME"] = str(home)  # for the commands and for serin.Model
    first = datetime.now(UTC).date() - timedelta(days=HISTORY_DAYS + STREAM_DAYS + 5)
    story = Story(folder=folder, home=home, world=World(seed=given.seed, first=first))
    try:
        tell(story)
    except StoryEnded as error:
        print(f"\npayments: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def tell(story: Story) -> None:
    story.prepare()
    with stack(story):
        story.first_version()
        with story.terminals() as terminals:
            story.say("a month of payments, replayed")
            story.replay_to(terminals, REFRESH_DAY)
            story.refresh(terminals)
            story.replay_to(terminals, story.world.change)
            story.say("a new way of paying appears, and a new fraud with it")
            story.marks["change"] = story.world.moment(story.world.change)
            alarm = story.wait_for_alarm(terminals)
            story.say(f"the alarm: {alarm.alert.title}")
            story.serin("alerts", "list")
            story.retrained(terminals)
            end = story.world.day_of(pd.Series([terminals.at]))[0] + AFTER_DAYS
            story.replay_to(terminals, end)
            page = story.write_page(terminals, story.collect(terminals))
    story.say("done")
    print(f"\n  the page    {page}\n  the rollout {page.with_name('rollout.html')}\n")


if __name__ == "__main__":
    sys.exit(main())
