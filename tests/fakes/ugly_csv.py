"""A CSV file with everything that real exports do wrong, and the same rows as a careful person would clean them.

A byte order mark, semicolons, decimal commas with points between thousands, "NA" and "None" for nulls, two formats of
dates, emoji, ids above 2^53, repeated rows, 0.3% positives, and a column that is filled after the event.
"""

from pathlib import Path

import numpy as np
import pandas as pd

TARGET = "betrug"
LEAK = "rückbuchung"
_CITIES = ("Köln 🐤", "Łódź", "São Paulo 🌞", "München", "Graz", "Zürich")
_CHANNELS = ("app", "web", "filiale", "telefon")


def ugly_frame(rows: int, seed: int = 7) -> pd.DataFrame:
    """The rows as they are meant. About 1% of them repeat another row in every column."""
    draw = np.random.default_rng(seed)
    amount = np.round(draw.lognormal(4.5, 1.1, rows), 2)
    age = draw.integers(18, 90, rows).astype(float)
    age[draw.random(rows) < 0.06] = np.nan
    city = draw.choice([*_CITIES, None], rows, p=[0.3, 0.2, 0.15, 0.15, 0.1, 0.05, 0.05])
    channel = draw.choice([*_CHANNELS, None], rows, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    tries = draw.poisson(0.6, rows)
    moment = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.sort(draw.integers(0, 365, rows)), unit="D")
    risk = (
        0.9 * (np.log(amount) - 4.5)
        + 2.0 * (tries >= 2)
        + 2.4 * (channel == "telefon")
        + 1.2 * (city == "Łódź")
        + 0.02 * (45 - np.nan_to_num(age, nan=45.0))
        + draw.logistic(0.0, 0.45, rows)
    )
    fraud = risk > np.quantile(risk, 0.997)
    back = np.where(fraud, np.round(amount * draw.uniform(0.9, 1.0, rows), 2), 0.0)
    frame = pd.DataFrame(
        {
            "kundennr": 2**53 + draw.permutation(rows) * 3 + 1,
            "datum": moment,
            "betrag": amount,
            "alter": age,
            "stadt": city,
            "kanal": channel,
            "versuche": tries,
            LEAK: back,
            TARGET: np.where(fraud, "ja", "nein"),
        }
    )
    repeated = np.sort(np.append(np.arange(rows), draw.choice(rows, rows // 100)))
    return frame.iloc[repeated].reset_index(drop=True)


def write_ugly_csv(path: Path, rows: int, seed: int = 7) -> pd.DataFrame:
    """Writes the file; returns the clean rows."""
    clean = ugly_frame(rows, seed)
    two = np.random.default_rng(seed + 1).random(len(clean)) < 0.7
    ugly = pd.DataFrame(
        {
            "kundennr": clean["kundennr"].astype(str),
            "datum": np.where(
                two, clean["datum"].dt.strftime("%d.%m.%Y"), clean["datum"].dt.strftime("%Y-%m-%d")
            ),
            "betrag": [_german(value) for value in clean["betrag"]],
            "alter": ["None" if np.isnan(value) else f"{value:.0f}" for value in clean["alter"]],
            "stadt": clean["stadt"].fillna("NA"),
            "kanal": clean["kanal"].fillna("None"),
            "versuche": clean["versuche"].astype(str),
            LEAK: [_german(value) for value in clean[LEAK]],
            TARGET: clean[TARGET],
        }
    )
    ugly.to_csv(path, sep=";", index=False, encoding="utf-8-sig")
    return clean


def _german(value: float) -> str:
    """1234.5 as 1.234,50."""
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))
