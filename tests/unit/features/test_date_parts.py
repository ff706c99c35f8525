import datetime as dt

import numpy as np
import pytest

from serin.columns.column import Column
from serin.features.ops.date_parts import FittedDateParts
from serin.formats.schema import INT64_NULL

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
PARTS = ("minute", "hour", "weekday", "day", "month", "quarter")


def codes(*times: int) -> list[tuple[int, ...]]:
    made = FittedDateParts(PARTS).transform(Column(kind="timestamp", values=np.asarray(times, np.int64)))
    return list(zip(*(part.tolist() for part in made), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_every_part_agrees_with_the_calendar_from_year_1_to_9999(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = [
        dt.datetime.min.replace(tzinfo=dt.UTC) + dt.timedelta(days=int(day), seconds=int(second))
        for day, second in zip(rng.integers(0, 3_652_058, 2000), rng.integers(0, 86_400, 2000), strict=True)
    ]
    times = [(moment - EPOCH) // dt.timedelta(microseconds=1) for moment in moments]
    expected = [
        (m.minute + 1, m.hour + 1, m.isoweekday(), m.day, m.month, (m.month - 1) // 3 + 1) for m in moments
    ]
    assert codes(*times) == expected


def test_the_last_microsecond_of_a_leap_day_before_1970_is_in_that_day() -> None:
    moment = dt.datetime(1968, 2, 29, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    time = (moment - EPOCH) // dt.timedelta(microseconds=1)
    assert codes(time, time + 1) == [(60, 24, 4, 29, 2, 1), (1, 1, 5, 1, 3, 1)]


def test_a_null_time_has_code_0_in_every_part() -> None:
    assert codes(INT64_NULL) == [(0,) * len(PARTS)]


def test_outputs_carry_the_part_in_their_name_and_a_fixed_size() -> None:
    outputs = FittedDateParts(("hour", "month")).outputs("departure")
    assert [(output.name, output.size) for output in outputs] == [
        ("departure_hour", 25),
        ("departure_month", 13),
    ]


@pytest.mark.parametrize("parts", [PARTS, PARTS[1:]])
@pytest.mark.parametrize("in_order", [True, False])
def test_times_that_lie_close_together_have_the_parts_of_the_calendar(
    parts: tuple[str, ...], in_order: bool
) -> None:
    seconds = np.random.default_rng(1).integers(-300_000, 300_000, 20_000)
    seconds = np.sort(seconds) if in_order else seconds
    made = FittedDateParts(parts).transform(Column(kind="timestamp", values=seconds * 1_000_000 + 999_999))
    moments = [EPOCH + dt.timedelta(seconds=int(second)) for second in seconds]
    expected = [
        (m.minute + 1, m.hour + 1, m.isoweekday(), m.day, m.month, (m.month - 1) // 3 + 1)[6 - len(parts) :]
        for m in moments
    ]
    assert list(zip(*(part.tolist() for part in made), strict=True)) == expected
