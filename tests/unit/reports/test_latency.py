from __future__ import annotations

import io
import random
import warnings

import matplotlib.image
import numpy as np
import pytest

from serin.formats.serving.request import Request
from serin.reports.latency import latency_picture


def requests(count: int, *, releases: int = 2) -> list[Request]:
    chance = random.Random(3)
    found = []
    for i in range(count):
        version = 1 + i % releases
        arm = "stable" if version == 1 else "candidate"
        us = chance.lognormvariate(9, 0.4) if i % 17 else None
        code = 503 if i % 50 == 1 else 200
        found.append(
            Request(
                1e9 + i / 10, "m", 1, arm, f"m-v{version}", code, None, us, us, 1, "-", "HTTP/1.1", str(i)
            )
        )
    return found


@pytest.mark.parametrize("many", [0, 1, 40, 1500])
def test_a_picture_is_drawn_of_any_number_of_requests(many: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png = latency_picture(requests(many), p99_ms=20.0, title="m: latency")
    image = matplotlib.image.imread(io.BytesIO(png))
    assert image.shape[:2] == (744, 1380)


def test_every_arm_has_its_own_colour_and_the_promise_is_drawn() -> None:
    png = latency_picture(requests(1500), p99_ms=20.0, title="m: latency")
    image = (matplotlib.image.imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)
    for colour in ((0x1F, 0x5F, 0xA8), (0xD9, 0x73, 0x1A), (0xB3, 0x26, 0x1E)):
        assert np.all(image == colour, axis=-1).sum() > 100


def test_more_releases_than_colours_are_drawn_too() -> None:
    assert latency_picture(requests(700, releases=9), p99_ms=20.0, title="m").startswith(b"\x89PNG")
