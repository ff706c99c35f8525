"""Answers of the gate are torch's, without torch."""

import numpy as np
import torch

from serin.scoring.answers import answers


def test_scores_are_zero_and_one_where_those_of_torch_are() -> None:
    """AUC counts ties: a score that is tiny here and 0 there would have an order."""
    logits = np.linspace(-130, 130, 100_001, dtype=np.float32)[:, None]
    found, wanted = answers(logits, "binary")["score"], torch.sigmoid(torch.from_numpy(logits)).numpy()
    assert found.dtype == wanted.dtype
    for edge in (0, 1):
        assert np.array_equal(found == edge, wanted == edge)
    assert np.max(np.abs(found - wanted)) <= 2.0**-22


def test_probabilities_are_zero_where_those_of_torch_are() -> None:
    logits = np.random.default_rng(0).normal(0, 60, (20_000, 5)).astype(np.float32)
    found = answers(logits, "multiclass")["probabilities"]
    wanted = torch.softmax(torch.from_numpy(logits), dim=1).numpy()
    assert np.array_equal(found == 0, wanted == 0)
    assert np.max(np.abs(found - wanted)) <= 2.0**-21
