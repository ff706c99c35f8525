"""Claims about training: a GPU instead of a CPU, mixed precision, warm-up and cosine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from benchmarks.claims.claim import Claim
from benchmarks.claims.trainings import Place, Precision, Settings, Table, Trained, train

SMALL, LARGE = (512, 256), (4096, 4096, 4096)
RATES, SEEDS, EPOCHS = (0.003, 0.01), (1, 2, 3), 6
WORSE = 0.005  # of a log loss, relative: above that two trainings are not of equal quality


def devices(table: Table) -> Claim:
    """The same trainings on both devices, in the same precision."""
    kinds = {
        "a small network": Settings(hidden=(64,), rows=2**16, batch_rows=256, epochs=1, place="cpu", seed=1),
        "a middle one": Settings(hidden=SMALL, rows=2**19, batch_rows=8192, epochs=1, place="cpu"),
        "a large one": Settings(
            hidden=LARGE, rows=2**15, batch_rows=16384, epochs=1, place="cpu", rate=0.0002
        ),
    }
    cases, lines, figures = {}, [], {}
    for name, wanted in kinds.items():
        found = {place: train(table, _on(wanted, place)) for place in ("cpu", "cuda")}
        times = found["cpu"].seconds / found["cuda"].seconds
        equal = _equal(found["cpu"], found["cuda"])
        cases[name] = times >= 10 and equal
        figures[f"gpu_{name.split()[1]}"] = times
        lines.append(
            f"{name} {list(wanted.hidden)}, {wanted.batch_rows} rows per step: GPU {times:.1f} times as fast; "
            f"log loss {found['cpu'].logloss:.4f} and {found['cuda'].logloss:.4f}; "
            f"the GPU took {_joules(found['cuda'])}"
        )
    return Claim(
        name="devices",
        says="a GPU trains ten times as fast as a CPU",
        cases=cases,
        lines=lines,
        figures=figures,
    )


def precision(table: Table, place: Place) -> Claim:
    """Each precision of Serin's steps for the same number of steps."""
    if place == "cuda":
        kinds = {
            "a middle network": Settings(
                hidden=SMALL, rows=2**19, batch_rows=8192, epochs=20, place=place, rate=0.001
            ),
            "a large one": Settings(
                hidden=LARGE, rows=2**19, batch_rows=16384, epochs=1, place=place, rate=0.0005
            ),
        }
        others: tuple[Precision, ...] = ("tf32", "bf16", "fp16")
    else:
        kinds = {
            "a middle network": Settings(hidden=SMALL, rows=2**15, batch_rows=4096, epochs=1, place=place)
        }
        others = ("bf16",)
    cases, lines, figures = {}, [], {}
    for name, wanted in kinds.items():
        whole = train(table, wanted)
        lines.append(f"{name} {list(wanted.hidden)}, fp32: {whole.seconds:.2f} s, {_joules(whole)}, "
                     f"log loss {whole.logloss:.4f}, {whole.step}")  # fmt: skip
        held = []
        for kind in others:
            half = train(table, _in(wanted, kind))
            times = whole.seconds / half.seconds
            saved = 1 - half.joules / whole.joules if half.joules and whole.joules else None
            energy = "" if saved is None else f", {saved:.0%} less energy"
            lines.append(
                f"{name}, {kind}: {half.seconds:.2f} s, {times:.2f} times as fast{energy} ({_joules(half)}), "
                f"log loss {half.logloss:.4f}"
            )
            figures[f"{kind}_{name.split()[1]}"] = times
            if saved is not None:
                figures[f"{kind}_{name.split()[1]}_saved"] = saved
            if kind != "tf32":
                held.append(times >= 2 and (saved is None or saved >= 0.3) and _equal(whole, half))
        cases[name] = any(held)
    says = "mixed precision trains 2 to 4 times as fast with 30 to 50% less energy"
    return Claim(name="precision", says=says, cases=cases, lines=lines, figures=figures)


def schedule(tables: Mapping[str, Table], place: Place) -> Claim:
    """Cosine runs of several lengths, beside one long run with a constant rate; each with the better of two rates.

    Serin's constant rate has the same warm-up, so the difference is the cosine's."""
    cases, lines, figures = {}, [], {}
    for name, table in tables.items():
        saved = []
        for seed in SEEDS:
            needed, best = _with_constant_rate(table, place, seed)
            found = {
                epochs: min(
                    _scheduled(table, place, epochs, rate, "cosine", seed).losses[-1] for rate in RATES
                )
                for epochs in sorted({max(1, needed * share // 10) for share in (5, 7, 10)})
            }
            enough = min((epochs for epochs, loss in found.items() if loss <= best), default=None)
            saved.append(None if enough is None else 1 - enough / needed)
            told = ", ".join(f"{epochs}: {loss:.4f}" for epochs, loss in found.items())
            lines.append(
                f"{name}, seed {seed}: constant {best:.4f} after {needed} of {EPOCHS} epochs; cosine of epochs {told}"
            )
        reached = [each for each in saved if each is not None]
        cases[name] = len(reached) == len(SEEDS) and min(reached) >= 0.3 - 1e-9
        figures[f"cosine_as_good_{name}"] = len(reached) / len(SEEDS)
        figures |= {f"epochs_saved_{name}": sum(reached) / len(reached)} if reached else {}
    says = "warm-up and cosine save 30% of the epochs"
    return Claim(name="schedule", says=says, cases=cases, lines=lines, figures=figures)


def _with_constant_rate(table: Table, place: Place, seed: int) -> tuple[int, float]:
    """Returns the epochs after which the best valid loss was reached, and that loss, with the better rate."""
    runs = [_scheduled(table, place, EPOCHS, rate, "constant", seed).losses for rate in RATES]
    losses = min(runs, key=min)
    return losses.index(min(losses)) + 1, min(losses)


def _scheduled(
    table: Table, place: Place, epochs: int, rate: float, kind: Literal["cosine", "constant"], seed: int
) -> Trained:
    batch, hidden = (8192, SMALL) if place == "cuda" else (1024, (64, 32))
    wanted = Settings(
        hidden=hidden, rows=table.train_rows, batch_rows=batch, epochs=epochs, place=place, rate=rate,
        schedule=kind, seed=seed,
    )  # fmt: skip
    return train(table, wanted, each_epoch=True)


def _on(wanted: Settings, place: Place) -> Settings:
    return replace(wanted, place=place)


def _in(wanted: Settings, precision: Precision) -> Settings:
    return replace(wanted, precision=precision)


def _equal(one: Trained, other: Trained) -> bool:
    return abs(other.logloss - one.logloss) <= WORSE * one.logloss


def _joules(trained: Trained) -> str:
    return "no energy counter" if trained.joules is None else f"{trained.joules:.0f} J"
