import pytest
from pydantic import ValidationError

from serin.spec.rate import read_rate
from serin.spec.serving import ServingSpec


def test_a_rate_is_a_number_per_unit_with_a_burst() -> None:
    rate = read_rate("600/m")
    assert (rate.count, rate.period_s, rate.burst) == (600, 60, 600)
    assert (str(read_rate("100/s")), str(read_rate("5/h", 2))) == ("100/s", "5/h, 2 at once")


@pytest.mark.parametrize(
    ("text", "wait_s"), [("100/s", 1), ("1/s", 1), ("30/m", 2), ("7/m", 9), ("1/h", 3600)]
)
def test_a_refused_caller_is_told_to_wait_until_there_may_be_a_token(text: str, wait_s: int) -> None:
    assert read_rate(text).wait_s == wait_s


@pytest.mark.parametrize(
    "text", ["", "100", "0/s", "-1/s", "1.5/s", "100/d", "100/s ", "1e3/s", "9999999999/s", "١/s"]
)
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid rate: use a number per s, m or h, such as 100/s"):
        read_rate(text)
    with pytest.raises(ValidationError, match="is not a valid rate"):
        ServingSpec(rate_limit=text)


def test_a_burst_needs_a_rate_and_at_least_one_request() -> None:
    assert ServingSpec(rate_limit="100/s", rate_burst=7).rate_burst == 7
    with pytest.raises(ValidationError, match="rate_burst needs a rate_limit, such as 100/s"):
        ServingSpec(rate_burst=7)
    with pytest.raises(ValueError, match="0 is not a valid burst"):
        read_rate("1/s", 0)
