import numpy as np
import pytest

from serin.columns.unscaled import unscaled_warning

RANDOM = np.random.default_rng(4)
FINE = {
    "normalized": RANDOM.normal(size=1000),
    "a share": RANDOM.random(1000),
    "a flag that is nearly always off": (RANDOM.random(1000) < 0.001).astype(float),
    "hours": RANDOM.integers(0, 24, 1000).astype(float),
    "zeros": np.zeros(1000),
    "nothing": np.full(1000, np.nan),
    "one outlier": np.append(RANDOM.normal(size=1000), 500.0),
}
UNSCALED = {
    "dollars": RANDOM.lognormal(10, 1, 1000),
    "a year": RANDOM.integers(1990, 2020, 1000).astype(float),
    "far from zero": 1e6 + RANDOM.normal(size=1000),
    "meters per light year": RANDOM.normal(0, 1e-9, 1000),
    "with nulls": np.append(RANDOM.normal(0, 1e4, 1000), np.nan),
}


@pytest.mark.parametrize("name", FINE)
def test_numbers_of_about_one_are_fit_for_a_network(name: str) -> None:
    assert unscaled_warning({name: FINE[name]}) is None


@pytest.mark.parametrize("name", UNSCALED)
def test_large_and_tiny_numbers_are_named_with_the_remedies(name: str) -> None:
    text = unscaled_warning({**FINE, name: UNSCALED[name]})
    assert text is not None
    assert text.startswith(f"not scaled for a network: {name} (")
    assert "end the steps of these columns with normalize, or set model.numeric_scaling: robust" in text


def test_of_many_columns_three_are_shown() -> None:
    assert "and 2 more" in str(unscaled_warning(UNSCALED))
