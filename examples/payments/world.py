"""The made-up world of the example: cards, merchants, payments, frauds, and what changes. All of it follows a seed.

Each day is drawn by itself, so the first days are the same however many are asked for. Frauds come in bursts: somebody
uses a stolen card several times within an hour. At first they buy dear things online from merchants with a high risk.
On the day `taken_over` the gangs move to other merchants: the table of merchants has to be read again. On the day
`change` a new way of paying, `wallet`, appears. Honest people like it, and the gangs use it for many small payments,
which is a pattern that no model has seen before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

CATEGORIES = {
    "grocery": 22.0,
    "transit": 3.5,
    "restaurant": 18.0,
    "fuel": 38.0,
    "electronics": 90.0,
    "fashion": 48.0,
    "games": 25.0,
}
"""The kinds of merchants, with the middle of what is paid there."""
WEB_SHOPS = ("electronics", "fashion", "games")
SMALL = ("grocery", "transit", "restaurant")
SCHEMA = pa.schema(
    {
        "payment": pa.string(),
        "at": pa.timestamp("us", "UTC"),
        "card": pa.string(),
        "merchant": pa.string(),
        "amount": pa.float32(),
        "channel": pa.string(),
        "fraud": pa.bool_(),
    }
)
HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
CHIP, CONTACTLESS, ONLINE, WALLET = CHANNELS = ("chip", "contactless", "online", "wallet")
Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class World:
    """`first`: the day with number 0. `per_day`: honest single payments. `taken_over`, `change`: numbers of days."""

    seed: int = 7
    first: date
    cards: int = 300
    merchants: int = 80
    per_day: int = 200
    taken_over: int = 50
    change: int = 75

    @property
    def start(self) -> pd.Timestamp:
        return pd.Timestamp(datetime.combine(self.first, datetime.min.time(), UTC))

    def day_of(self, at: pd.Series) -> pd.Series:
        """The number of the day of each time, with its fraction."""
        return (at - self.start) / pd.Timedelta(days=1)

    def moment(self, day: float) -> pd.Timestamp:
        """The time at which a day begins, or its fraction has passed."""
        return self.start + pd.Timedelta(days=day)

    def merchant_table(self, day: int) -> pd.DataFrame:
        """The merchants as the bank knows them on a day: `risk` is the share of their payments that were disputed."""
        return pd.DataFrame(self._merchants[day >= self.taken_over])

    def payments(self, begin: int, end: int) -> pd.DataFrame:
        """The payments of the days from `begin` until before `end`, by time. `fraud` is the truth, `known` the time
        at which the bank learns it: two to six days later."""
        days = [self._day(day) for day in range(begin, end)]
        found = {name: np.concatenate([day[name] for day in days]) for name in days[0]}
        at = self.start + pd.to_timedelta(found["us"], unit="us")
        return pd.DataFrame(
            {
                "payment": [f"{us // DAY_US:03d}-{us % DAY_US:011d}" for us in found["us"].tolist()],
                "at": at,
                "card": np.array([f"c{number:04d}" for number in range(self.cards)])[found["card"]],
                "merchant": self._merchants[0]["merchant"][found["merchant"]],
                "amount": found["amount"].astype(np.float32),
                "channel": np.array(CHANNELS)[found["channel"]],
                "fraud": found["fraud"],
                "known": at + pd.to_timedelta(found["late_us"], unit="us"),
            }
        )

    @cached_property
    def _merchants(self) -> tuple[Columns, Columns]:
        """The merchants before and after the gangs have moved to others."""
        rng = np.random.default_rng([self.seed, 1])
        category = rng.choice(list(CATEGORIES), self.merchants)
        risk = rng.uniform(0.001, 0.02, self.merchants)
        shops = rng.permutation(np.flatnonzero(np.isin(category, WEB_SHOPS)))
        high = rng.uniform(0.15, 0.4, len(shops))
        third = max(len(shops) // 3, 1)
        made = []
        for risky in (slice(0, third), slice(third, 2 * third)):
            own = risk.copy()
            own[shops[risky]] = high[risky]
            names = np.array([f"m{number:03d}" for number in range(self.merchants)])
            made.append({"merchant": names, "category": category, "risk": own.astype(np.float32)})
        return made[0], made[1]

    def _day(self, day: int) -> Columns:
        rng = np.random.default_rng([self.seed, 2, day])
        dear, small = (130, None) if day < self.change else (400, 120)
        parts = [self._honest(rng, day)]
        parts += [self._errands(rng) for _ in range(rng.poisson(self.per_day / 60))]
        parts += [self._dear(rng, day) for _ in range(rng.poisson(self.per_day / dear))]
        parts += [self._small(rng) for _ in range(rng.poisson(self.per_day / small) if small else 0)]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        us, places = np.unique(np.minimum(found["us"], DAY_US - 1), return_index=True)  # an id has one time
        found = {name: values[places] for name, values in found.items()}
        late_us = rng.integers(2 * DAY_US, 6 * DAY_US, len(us))
        return {**found, "us": us + day * DAY_US, "late_us": late_us}

    def _honest(self, rng: np.random.Generator, day: int) -> Columns:
        """Single payments, most of them at noon and in the evening; from the change on many by wallet."""
        count = rng.poisson(self.per_day)
        hour = np.where(rng.random(count) < 0.45, rng.normal(12.5, 2.2, count), rng.normal(18.5, 2.8, count))
        merchant = (self.merchants * rng.beta(0.8, 1.6, count)).astype(np.int64)
        found = self._rows(rng, merchant, np.clip(hour, 0, 23.99), self._used(rng, count))
        moved = (rng.random(count) < 0.4) & (day >= self.change)
        found["channel"][moved] = CHANNELS.index(WALLET)
        return found

    def _errands(self, rng: np.random.Generator) -> Columns:
        """One person who pays several small sums within an hour: a bus, a coffee, a shop."""
        count = int(rng.integers(3, 6))
        hour = rng.uniform(8, 20) + rng.uniform(0, 0.8, count)
        card = np.repeat(self._used(rng, 1), count)
        return self._rows(rng, self._ordinary(rng, count), hour, card, channel=CONTACTLESS)

    def _dear(self, rng: np.random.Generator, day: int) -> Columns:
        """A stolen card: dear things, online, from merchants with a high risk."""
        count = int(rng.integers(3, 6))
        weights = self._merchants[day >= self.taken_over]["risk"].astype(np.float64) ** 2
        merchant = rng.choice(self.merchants, count, p=weights / weights.sum())
        hour = rng.uniform(0, 23) + rng.uniform(0, 0.9, count)
        card = np.repeat(self._used(rng, 1), count)
        found = self._rows(rng, merchant, hour, card, channel=ONLINE, fraud=True)
        found["amount"] = np.round(found["amount"] * 1.5 + rng.uniform(20, 260, count), 2)
        return found

    def _small(self, rng: np.random.Generator) -> Columns:
        """The new pattern: many small payments by wallet, at ordinary merchants."""
        count = int(rng.integers(5, 9))
        hour = rng.uniform(0, 23) + rng.uniform(0, 0.9, count)
        card = np.repeat(self._used(rng, 1), count)
        return self._rows(rng, self._ordinary(rng, count), hour, card, channel=WALLET, fraud=True)

    def _used(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Cards by how often they are used: a few are used every day, most are not."""
        return (self.cards * rng.beta(0.9, 1.4, count)).astype(np.int64)

    def _ordinary(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.choice(np.flatnonzero(np.isin(self._merchants[0]["category"], SMALL)), count)

    def _rows(
        self,
        rng: np.random.Generator,
        merchant: np.ndarray,
        hour: np.ndarray,
        card: np.ndarray,
        channel: str | None = None,
        fraud: bool = False,
    ) -> Columns:
        """`channel`: None: a web shop is paid online, another one with the card."""
        count, category = len(hour), self._merchants[0]["category"][merchant]
        middle = np.array([CATEGORIES[each] for each in category])
        card_in_shop = np.where(rng.random(count) < 0.5, CHANNELS.index(CONTACTLESS), CHANNELS.index(CHIP))
        usual = np.where(np.isin(category, WEB_SHOPS), CHANNELS.index(ONLINE), card_in_shop)
        return {
            "us": (hour * HOUR_US).astype(np.int64),
            "card": card,
            "merchant": merchant,
            "amount": np.round(np.maximum(middle * rng.lognormal(0, 0.6, count), 0.5), 2),
            "channel": usual if channel is None else np.full(count, CHANNELS.index(channel)),
            "fraud": np.full(count, fraud),
        }


def write_payments(payments: pd.DataFrame, path: Path, now: pd.Timestamp | None = None) -> None:
    """Writes what the bank's table holds at a time: all payments, and of those that are known the truth."""
    table = payments[[*SCHEMA.names]].copy()
    if now is not None:
        table["fraud"] = table["fraud"].astype(object).where(payments["known"] <= now, None)
    _replace(pa.Table.from_pandas(table, SCHEMA, preserve_index=False), path)


def write_merchants(merchants: pd.DataFrame, path: Path) -> None:
    _replace(pa.Table.from_pandas(merchants, preserve_index=False), path)


def _replace(table: pa.Table, path: Path) -> None:
    """Replaces the file in one step, as a careful job does: a reader sees the old table or the new one."""
    beside = path.with_suffix(".part")
    pq.write_table(table, beside)
    beside.replace(path)
