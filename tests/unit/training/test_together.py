"""Ranks and hosts that train together: they agree, and learn what one process learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from serin.errors import Preempted, SpecError
from serin.formats.weights import read_weights
from serin.store.artifacts import Dataset
from serin.store.objects import FolderObjects
from serin.training.launch.job import Status
from serin.training.launch.machines import Machines, machines_told
from serin.training.launch.together.meeting import (
    GATHER_S,
    Hosts,
    Meeting,
    Member,
    Place,
    Round,
    View,
    distribute,
    next_step,
)
from tests.fakes.datasets import make_dataset
from tests.kit.waiting import until
from tests.unit.training.parallel_cases import (
    CASES,
    TOLERANCE,
    TRANSFORMER,
    difference,
    job,
    train,
    train_all,
)
from tests.unit.training.ranks import average_gradients, run_ranks, train_several
from tests.unit.training.runs import choices

THREE = Hosts(least=1, begin=3, most=3)


def member(host: str, *, gpus: int | None = None, instance: str = "1") -> Member:
    return Member(host=host, instance=instance, address="192.0.2.1", port=1, processes=1, gpus=gpus)


def there(*hosts: str) -> dict[str, Member]:
    return {host: member(host) for host in hosts}


def round_of(*hosts: str, seq: int = 1) -> Round:
    places = tuple(Place(host=host, instance="1", ranks=1) for host in hosts)
    return Round(seq=seq, by="a", places=places, address="192.0.2.1", port=1)


@pytest.mark.parametrize(
    ("view", "me", "after", "waited_s", "expected"),
    [
        (View(there=there("a", "b")), "a", 0, 0.0, "wait"),
        (View(there=there("a", "b", "c")), "a", 0, 0.0, "propose"),
        (View(there=there("a", "b", "c")), "b", 0, 0.0, "wait"),
        (View(there=there("b"), newest=round_of("a", "b", "c")), "b", 1, 0.0, "propose"),
        (View(there=there("b", "c"), newest=round_of("a", "b", "c")), "c", 1, 0.0, "wait"),
        (View(there=there("a", "b", "c"), newest=round_of("a", "b", "c")), "b", 0, 0.0, "work"),
        (View(there=there("a", "b", "c"), newest=round_of("a", "b")), "c", 0, 0.0, "wait"),
        (View(there=there("a"), newest=round_of("b", "c")), "a", 0, 0.0, "wait"),
        (View(there=there("a"), newest=round_of("a"), end=Status(state="done")), "a", 0, 0.0, "ended"),
        (View(there=there("a"), newest=round_of("a"), end=Status(state="failed")), "a", 0, 0.0, "wait"),
        (View(there=there("a"), newest=round_of("a"), end=Status(state="again")), "a", 1, 0.0, "propose"),
    ],
    ids=[
        "too few to begin", "the first of all proposes", "another does not", "one that remains continues",
        "the second that remains waits for the first", "a round with me", "a round without me is not disturbed",
        "a new session needs all hosts", "the end", "after a failure all must come again", "a repeated round",
    ],
)  # fmt: skip
def test_what_a_host_does_next(view: View, me: str, after: int, waited_s: float, expected: str) -> None:
    assert next_step(view, member(me), THREE, after=after, waited_s=waited_s).kind == expected


def test_enough_hosts_begin_without_the_others_after_a_while() -> None:
    view, hosts = View(there=there("a", "b")), Hosts(least=2, begin=2, most=3)
    assert next_step(view, member("a"), hosts, after=0, waited_s=GATHER_S - 1).kind == "wait"
    assert next_step(view, member("a"), hosts, after=0, waited_s=GATHER_S).kind == "propose"


def test_all_hosts_are_needed_to_begin_unless_fewer_were_allowed() -> None:
    view = View(there=there("a", "b"))
    assert next_step(view, member("a"), THREE, after=0, waited_s=10 * GATHER_S).kind == "wait"


def test_a_training_whose_result_was_removed_is_done_again() -> None:
    view = View(there=there("a", "b", "c"), newest=round_of("a", seq=4), end=Status(state="done"))
    assert next_step(view, member("a"), THREE, after=0, waited_s=0).kind == "ended"
    assert next_step(view, member("a"), THREE, after=4, waited_s=0, removed=4).kind == "propose"


def test_a_launcher_that_was_started_again_counts_as_lost() -> None:
    again = {**there("a", "b"), "c": member("c", instance="2")}
    view = View(there=again, newest=round_of("a", "b", "c"))
    assert view.lost(round_of("a", "b", "c")) == ["c"]
    assert next_step(view, member("a"), THREE, after=1, waited_s=0).kind == "propose"


@pytest.mark.parametrize(
    ("gpus", "ranks", "batch_rows", "expected"),
    [
        ([None, None, None], 3, None, [1, 1, 1]),
        ([None, None], 3, 120, [2, 1]),
        ([None], 3, 120, [3]),
        ([None, None, None], 2, None, [1, 1]),
        ([4, 4], 12, 96, [4, 4]),
        ([4, 3], 12, 96, [3, 3]),
        ([2, 8], 8, 96, [2, 6]),
    ],
)
def test_ranks_are_kept_where_hosts_allow_it(
    gpus: list[int | None], ranks: int, batch_rows: int | None, expected: list[int]
) -> None:
    members = [member(f"h{number}", gpus=count) for number, count in enumerate(gpus)]
    assert [place.ranks for place in distribute(members, ranks, batch_rows=batch_rows)] == expected


def test_members_see_each_other_and_the_first_proposal_wins(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    with Meeting(objects, "run", member("a")) as a, Meeting(objects, "run", member("b")) as b:
        until(lambda: a.view().there.keys() == b.view().there.keys() == {"a", "b"}, "both members")
        a.propose(round_of("a", "b"))
        b.propose(replace(round_of("b"), by="b"))
        seen = until(lambda: b.view().newest, "a proposal")
        assert seen == round_of("a", "b")
        b.come_again()
        until(lambda: a.view().lost(seen) == ["b"], "the loss of b")
    assert objects.keys("trainings/run/members/") == []


@pytest.mark.parametrize("words", ["two", "3:2", "0:2", "2:", ":2:3", ""])
def test_numbers_of_machines_that_mean_nothing_are_refused(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_MACHINES", words or "x")
    monkeypatch.setenv("SERIN_STORE", "s3://somewhere")
    with pytest.raises(SpecError):
        machines_told()


def test_machines_meet_in_the_store_unless_a_rendezvous_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_STORE", "s3://somewhere")
    assert machines_told(count="2:3") == Machines(count=3, least=2, store="s3://somewhere")
    assert machines_told(count="3").in_store
    assert not machines_told(count="3", rendezvous="10.0.0.1:29400").in_store
    assert not machines_told(count="1").in_store


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "dataset", rows={"train": 600, "valid": 301, "test": 200})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    """Every case by one process and by two."""
    folder = tmp_path_factory.mktemp("trained")
    train_all(folder, dataset, CASES)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_loss_curve_of_one(trained: Path, name: str) -> None:
    found = difference(trained / f"{name}-1", trained / f"{name}-2")
    print("largest difference of an epoch's loss", found)
    assert found < (5e-3 if "fp16" in name else TOLERANCE)
    assert choices(trained / f"{name}-2")["strategy"] == CASES[name].two["strategy"]


@pytest.mark.parametrize("name", ["tensor", "tensor-transformer"])
def test_what_is_cut_is_put_together_in_the_result(trained: Path, name: str) -> None:
    one, two = (read_weights(trained / f"{name}-{ranks}" / "result").state for ranks in (1, 2))
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in two.items()
    }
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-2
    metrics = [
        json.loads((trained / f"{name}-{ranks}" / "result" / "metrics.json").read_text())["metrics"]
        for ranks in (1, 2)
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=2e-3)


def test_ranks_of_fsdp_that_were_stopped_end_with_the_same_weights(tmp_path: Path, dataset: Dataset) -> None:
    """One rank alone is asked; both save and stop at the same step, and go on from there."""
    sharded = job(tmp_path, dataset, 2, {}, strategy="fsdp", checkpoint_every_steps=3)
    assert train(sharded, tmp_path / "run", stop_at=1) == [Preempted.exit_code] * 2
    jobs = {"run": sharded, "whole": job(tmp_path, dataset, 2, {}, strategy="fsdp")}
    done = run_ranks(
        2, train_several, {name: made.model_dump_json() for name, made in jobs.items()}, tmp_path
    )
    assert done == [0, 0]
    ours, theirs = (read_weights(tmp_path / name / "result").state for name in jobs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_resumes_with_other_ranks_and_another_strategy_and_its_batch(
    tmp_path: Path, dataset: Dataset, trained: Path
) -> None:
    """Tensor parallel, stopped; then FSDP, stopped; then one process to the end."""
    settings = {"clip_norm": 0.5, "checkpoint_every_steps": 3}
    folder = tmp_path / "run"
    for strategy in ("tensor", "fsdp"):
        made = job(tmp_path, dataset, 2, TRANSFORMER, strategy=strategy, **settings)
        assert train(made, folder, stop_at=1) == [Preempted.exit_code] * 2
    assert train(job(tmp_path, dataset, 1, TRANSFORMER, **settings), folder) == [0]
    assert choices(folder)["batch_rows"] == 100
    assert difference(folder, trained / "tensor-transformer-1") < TOLERANCE
    started = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    resumed = [(record["ranks"], record["strategy"]) for record in started if record["event"] == "started"]
    assert resumed == [(2, "tensor"), (2, "fsdp"), (1, "ddp")]


def test_out_of_memory_of_several_ranks_is_resumed_with_smaller_parts(
    tmp_path: Path, dataset: Dataset
) -> None:
    """What one rank cannot hold ends all; the next start has the same batch in smaller parts."""
    hungry = job(tmp_path, dataset, 2, {"module": "Hungry"}, batch_rows=100, strategy="ddp")
    assert 0 not in train(hungry, tmp_path / "run")
    assert choices(tmp_path / "run")["parts"] == 2
    assert train(hungry, tmp_path / "run") == [0, 0]
    assert choices(tmp_path / "run")["batch_rows"] == 100
    frugal = job(tmp_path, dataset, 1, {"module": "Net"}, batch_rows=100)
    assert train(frugal, tmp_path / "whole") == [0]
    assert difference(tmp_path / "run", tmp_path / "whole") < TOLERANCE


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**28])
def test_replicas_begin_alike_and_average_what_a_step_has_used_on_any_of_them(
    bucket_bytes: int, tmp_path: Path
) -> None:
    """Rank 0 uses all layers but `none`, rank 1 `all` and `wide`, rank 2 `all` alone."""
    assert run_ranks(3, average_gradients, tmp_path, bucket_bytes) == [0, 0, 0]
    first, *others = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(3))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    for name, mean in {"all": 2.0, "one": 1 / 3, "wide": 1.0, "last": 1 / 3}.items():
        assert first[f"{name}.weight.grad"].flatten().tolist() == pytest.approx([mean] * 6)
    assert "none.weight.grad" not in first
    for rank in range(3):
        said = (tmp_path / f"rank-{rank}.txt").read_text()
        assert said.startswith("none.bias has a gradient that it did not have in the first step")
