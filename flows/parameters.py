"""Types that several flows take as parameters."""

from __future__ import annotations

from typing import Literal

Stage = Literal["train", "export"]
"""A stage that can be asked to do its work again. ETL cannot: the same tables give the same dataset, bit for bit."""
