"""What a step computes and moves, and what the machine could do at best."""

from __future__ import annotations

import torch

from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from serin.training.engine.tuning.roofline import measure_peaks, weigh

SHAPE = TableShape(numeric=3, sizes=(7, 40), outputs=1)


def test_products_of_a_row_are_those_of_its_layers_three_times() -> None:
    network = build_model(ModelSpec(hidden=(8, 4), embedding=2), SHAPE)
    found = weigh(network, SHAPE, optimizer="adamw")
    assert found is not None
    assert found.flops_per_row == 3 * 2 * (7 * 8 + 8 * 4 + 4 * 1)
    assert found.table_bytes_per_step == 4 * 10 * 47 * 2
    assert (
        found.of(100, 2, by_row=True)[1] == found.of(100, 2, by_row=False)[1] - 2 * found.table_bytes_per_step
    )
    assert network.training


def test_weighing_draws_no_random_number_and_leaves_the_network_as_it_was() -> None:
    network = build_model(ModelSpec(hidden=(8,), dropout=0.5), SHAPE)
    before = torch.get_rng_state()
    weigh(network, SHAPE, optimizer="sgd")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks for module in network.modules())


def test_a_network_that_refuses_is_not_weighed() -> None:
    class Refuses(torch.nn.Module):
        def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("wants more than two rows")

    assert weigh(Refuses(), SHAPE, optimizer="adamw") is None


def test_the_machine_s_best_is_more_than_nothing() -> None:
    best = measure_peaks(torch.device("cpu"), "fp32")
    print(f"{best.flops_per_s / 1e9:.1f} GFLOP/s, {best.bytes_per_s / 1e9:.1f} GB/s")
    assert best.flops_per_s > 1e8
    assert best.bytes_per_s > 1e8
