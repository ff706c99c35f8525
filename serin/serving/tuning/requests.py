"""The tuner's requests: several sizes, in the shares in which clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from serin.errors import TuningFailed
from serin.formats.bundle import read_golden
from serin.formats.schema import read_schema
from serin.serving.triton.repository import serving_settings
from serin.serving.tuning.load import model_target
from serin.serving.tuning.load_connections import Target
from serin.spec.stored import stored_section
from serin.store.artifacts import Bundle

Mix = Mapping[int, float]  # rows in a request: share of the requests, summing to 1

ONE_ROW: Mix = {1: 1.0}
_ROUND = 100  # requests, over which the shares are kept


def parse_mix(text: str) -> Mix:
    """Parses `8`, or `1:0.9,64:0.1`. Shares need not sum to 1. Raises ValueError with what is wrong."""
    shares: dict[int, float] = {}
    for part in text.split(","):
        rows, _, share = part.partition(":")
        try:
            shares[int(rows)] = float(share or 1)
        except ValueError:
            raise ValueError(
                f"{text!r}: give rows in a request and their share, such as 1:0.9,64:0.1"
            ) from None
    if min(shares) < 1 or min(shares.values()) <= 0:
        raise ValueError(f"{text!r}: a request has one row or more, and a share above 0")
    return _normalised(shares)


def declared_mix(bundle: Bundle) -> Mix:
    """Returns `export.batch_mix` of the bundle's spec, by which its variant was chosen; one row if it has none.

    Sizes that a release would refuse are left out.
    """
    mix = stored_section(Path(bundle.path), "export").get("batch_mix") or ONE_ROW
    most = serving_settings(bundle).max_batch_rows
    return _normalised(
        {int(rows): float(share) for rows, share in mix.items() if int(rows) <= most} or ONE_ROW
    )


def _normalised(shares: Mix) -> Mix:
    total = sum(shares.values())
    return {rows: share / total for rows, share in sorted(shares.items())}


def in_words(mix: Mix) -> str:
    if len(mix) == 1:
        (rows,) = mix
        return f"{rows:,} row{'s' * (rows > 1)}"
    return ", ".join(f"{rows:,} ({share:.0%})" for rows, share in mix.items()) + " rows"


def mixed_target(url: str, bundle: Bundle, mix: Mix) -> Target:
    """Returns requests directly to a Triton: golden rows repeated, sizes spread evenly over every hundred requests."""
    folder = Path(bundle.path)
    schema = read_schema(folder)
    golden = read_golden(folder, schema)
    if not len(golden):
        raise TuningFailed(model=bundle.model, reason="it has no golden rows to send")
    targets = {}
    for rows in mix:
        times = -(-rows // len(golden))
        inputs = {name: np.concatenate([values] * times) for name, values in golden.inputs.items()}
        targets[rows] = model_target(url, bundle.model, inputs, schema, rows_per_request=rows)
    requests = []
    sent = dict.fromkeys(mix, 0)
    for number in range(1, max(_ROUND, *(len(target.requests) for target in targets.values())) + 1):
        rows = max(mix, key=lambda size: mix[size] * number - sent[size])  # the furthest behind its share
        own = targets[rows].requests
        requests.append(own[sent[rows] % len(own)])
        sent[rows] += 1
    return replace(next(iter(targets.values())), requests=tuple(requests))
