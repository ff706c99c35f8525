"""Checks, splits and progress of a build."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed.comm import connect
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serin.columns.column import Column, column_from_arrow
from serin.errors import CheckFailed, SpecError
from serin.etl.build import find_dataset
from serin.etl.dataset.compare import distance
from serin.etl.dataset.split import LEFT_OUT, SplitRule, TimeSplit, hash_split, stratified_split, time_split
from serin.etl.engines.dask_engine import DaskEngine
from serin.etl.engines.engine import ProcessEngine
from serin.etl.engines.progress import Progress
from serin.etl.relational.checks import FRESHNESS
from serin.etl.relational.groups import group_hashes
from serin.etl.relational.relation import Prepared
from serin.etl.relational.target import TargetPart
from serin.formats.statistics import CategoryStatistics, NumberStatistics
from serin.machine.dask_cluster import local_cluster
from serin.spec.split import SplitSpec
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import START, build, spec_of, trips


def built(folder: Path, *checks: dict[str, Any], frame: pd.DataFrame | None = None, **data: Any) -> list[str]:
    chosen = [
        {"columns": ["fare"], "steps": ["fill_median", "normalize"]},
        {"columns": ["taxi"], "steps": ["categorify"]},
    ]
    spec = spec_of(folder, checks=list(checks), frame=frame, features=chosen, **data)
    lines: list[str] = []
    with heard(lines.append):
        build(spec, Store(str(folder / "store")))
    return lines


def test_checks_that_hold_say_nothing(tmp_path: Path) -> None:
    lines = built(
        tmp_path,
        {"column": "taxi", "type": "string", "values": ["t1", "t2", "t3", "ü4"], "max_nulls": 0.2},
        {"column": "zone", "min": 0, "max": 3, "values": [0, 1, 2, 3]},
        {"column": "start", "type": "timestamp", "newest_within": "100000d"},
        {"min_rows": 900, "max_rows": 900},
    )
    assert not [line for line in lines if "warning" in line or "also" in line]


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ({"column": "fare", "type": "int"}, "'fare' breaks type: int: it is a float"),
        (
            {"column": "zone", "min": 1, "max": 2},
            r"'zone' breaks min: 1, max: 2: \d+ of 900 rows; for example \d in row \d",
        ),
        (
            {"column": "taxi", "values": ["t1", "t2"]},
            r"breaks values: \['t1', 't2'\]: .*for example '(t3|ü4)' in row \d",
        ),
        ({"column": "zone", "values": [0, 1, 2]}, r"breaks values: \[0, 1, 2\].*for example 3 in row"),
        (
            {"column": "taxi", "max_nulls": 0.01},
            r"'taxi' breaks max_nulls: 0.01: \d+ of 900 rows are null .*for example row \d",
        ),
        (
            {"column": "trip", "unique": True},
            r"450 rows repeat an earlier one; for example 0 again in row 1, 2 again in row 3",
        ),
        (
            {"column": "start", "newest_within": "7d"},
            r"newest_within: 7d: the newest is 2024-01-30T\d\d:\d\d:00\+00:00",
        ),
        ({"min_rows": 1000}, "the table breaks min_rows: 1,000: there are 900 rows"),
        ({"max_rows": 10}, "the table breaks max_rows: 10: there are 900 rows"),
    ],
)
def test_a_check_that_does_not_hold_is_named_with_its_rows(
    tmp_path: Path, check: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckFailed, match=says):
        built(tmp_path, check)
    lines = built(tmp_path, check | {"otherwise": "warn"})
    assert [line for line in lines if line.startswith("warning: data.checks")]


def test_all_failures_are_said_and_the_first_is_raised(tmp_path: Path) -> None:
    lines: list[str] = []
    spec = spec_of(tmp_path, checks=[{"column": "zone", "max": 1}, {"min_rows": 1000}])
    with pytest.raises(CheckFailed, match="'zone' breaks max: 1"), heard(lines.append):
        build(spec, Store(str(tmp_path / "store")))
    assert any(line.startswith("also: data.checks: the table breaks min_rows") for line in lines)


def test_freshness_is_asked_again_of_a_dataset_that_is_there(tmp_path: Path) -> None:
    days = (pd.Timestamp.now() - START).days
    spec = spec_of(tmp_path, checks=[{"column": "start", "newest_within": f"{days}d"}])
    store = Store(str(tmp_path / "store"))
    dataset = build(spec, store)
    assert build(spec, store) == dataset
    (Path(dataset.path) / FRESHNESS).write_text('{"start": 0}')
    with pytest.raises(CheckFailed, match="the newest is 1970-01-01"):
        build(spec, store)
    with pytest.raises(CheckFailed, match="the newest is 1970-01-01"):
        find_dataset(spec.data, spec.features, store)


def test_a_dataset_is_compared_with_the_one_before(tmp_path: Path) -> None:
    checks = [
        {"max_row_change": 0.2},
        {"column": "fare", "max_null_change": 0.05, "max_shift": 0.1},
        {"column": "taxi", "max_shift": 0.1},
    ]
    assert any("no earlier dataset" in line for line in built(tmp_path, *checks))
    assert not any("warning" in line for line in built(tmp_path, *checks, frame=trips().iloc[:-50]))
    says = r"max_row_change: 0.2: 400 rows now, 850 in the dataset before \(-52\.9%\)"
    with pytest.raises(CheckFailed, match=says):
        built(tmp_path, *checks, frame=trips().iloc[:400])
    with pytest.raises(
        CheckFailed, match=r"'fare' breaks max_shift: 0.1: \d+\.\d% of the rows are distributed differently"
    ):
        built(tmp_path, *checks, frame=trips().assign(fare=trips()["fare"] * 2))
    with pytest.raises(CheckFailed, match=r"'fare' breaks max_null_change: 0.05: .*% null now"):
        built(tmp_path, *checks, frame=trips().assign(fare=trips()["fare"].where(trips()["zone"] > 0)))
    with pytest.raises(CheckFailed, match=r"'taxi' breaks max_shift"):
        built(tmp_path, *checks, frame=trips().assign(taxi=trips()["taxi"].replace({"t1": "t2"})))


def test_another_pipeline_s_dataset_is_not_the_one_before(tmp_path: Path) -> None:
    checks, store, said = [{"max_row_change": 0.2}], Store(str(tmp_path / "store")), list[str]()
    build(spec_of(tmp_path, checks=checks), store, name="trips")
    few = spec_of(tmp_path, checks=checks, frame=trips().iloc[:400])
    with heard(said.append):
        build(few, store, name="other-trips")
    assert any("no earlier dataset" in line for line in said)
    fewer = spec_of(tmp_path, checks=checks, frame=trips().iloc[:300])
    with pytest.raises(CheckFailed, match="900 in the dataset before"):
        build(fewer, store, name="trips")


def test_only_features_can_be_compared(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'zone' is not a feature"):
        built(tmp_path, {"column": "zone", "max_shift": 0.1})


def test_distances_are_shares_of_rows() -> None:
    left = NumberStatistics(kind="float", rows=10, nulls=0, edges=(0.0, 1.0, 2.0), counts=(5, 5))
    right = NumberStatistics(kind="float", rows=10, nulls=0, edges=(1.0, 2.0), counts=(10,))
    assert distance(left, left) == 0
    assert distance(left, right) == pytest.approx(0.5)
    one = CategoryStatistics(
        kind="string", rows=4, nulls=0, distinct=2, values=("a", "b"), counts=(2, 2), others=0
    )
    two = CategoryStatistics(
        kind="string", rows=4, nulls=0, distinct=2, values=("a", "c"), counts=(2, 2), others=0
    )
    assert distance(one, two) == pytest.approx(0.5)
    assert distance(one, left) is None


SPLIT = SplitSpec(train=0.7, valid=0.2, test=0.1)


def piece(
    rows: np.ndarray,
    time: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    group: Column | None = None,
) -> Prepared:
    labels = np.zeros(len(rows)) if labels is None else labels
    target = TargetPart(values=labels, null=np.zeros(len(rows), bool))
    return Prepared(
        columns={},
        rows=rows,
        target=target,
        time=time,
        group=None if group is None else group_hashes(group),
        id=None,
        dropped={},
        checks=(),
        unknown={},
    )


def place(rule: SplitRule, prepared: Prepared) -> list[int]:
    return rule.place(prepared, prepared.target.coded(())).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63) + 1, 2**63 - 1)), min_size=3, max_size=80),
    st.integers(1, 5),
    st.sampled_from([0, 5, 2**20]),
    st.booleans(),
)
@example([0, -1, -2, 2**63 - 1], 2, 5, False)  # a range as wide as all times, and a row before it
def test_a_split_by_time_is_a_cut_of_the_rows_sorted_by_time_and_id(
    times: list[int], pieces: int, few_rows: int, in_order: bool
) -> None:
    time, rows = np.asarray(sorted(times) if in_order else times, np.int64), np.arange(len(times)) * 3
    with ProcessEngine(1) as engine, patch("serin.etl.dataset.split.FEW_ROWS", few_rows):
        held = engine.hold(
            lambda cut: piece(rows[cut], time[cut]), np.array_split(np.arange(len(times)), pieces)
        )
        rule = time_split(SPLIT, engine, held, len(times))
    order = np.lexsort((rows, time))
    found = np.asarray(place(rule, piece(rows, time)))[order]
    ends = [int(0.7 * len(times) + 0.5), int(0.9 * len(times) + 0.5)]
    ends = [min(end, len(times) - 1) for end in ends]
    assert found.tolist() == [sum(index >= end for end in ends) for index in range(len(times))]


def test_a_split_by_hash_depends_on_the_row_id_alone() -> None:
    rule = hash_split(SPLIT)
    rows = np.arange(100_000, dtype=np.int64)
    found = place(rule, piece(rows))
    assert place(rule, piece(rows[::-1]))[::-1] == found
    assert np.bincount(found) / len(rows) == pytest.approx([0.7, 0.2, 0.1], abs=0.01)


def test_a_gap_leaves_out_the_rows_just_before_the_next_split() -> None:
    rule = TimeSplit(((100, 0), (200, 0)), gap_us=10)
    times = np.asarray([0, 90, 91, 99, 100, 190, 191, 200, 999])
    assert place(rule, piece(np.arange(9), times)) == [0, 0, LEFT_OUT, LEFT_OUT, 1, 1, LEFT_OUT, 2, 2]


def test_a_group_is_never_torn_and_hashes_alike_in_every_piece() -> None:
    rule = hash_split(SPLIT, by_group=True)
    names = [f"user {number % 700}" for number in range(5000)]
    whole = column_from_arrow(pa.array(names), "string")
    found = place(rule, piece(np.arange(5000), group=whole))
    part = column_from_arrow(pa.array(names[4000:]), "string")
    assert place(rule, piece(np.arange(4000, 5000), group=part)) == found[4000:]
    homes: dict[str, set[int]] = {}
    for name, split in zip(names, found, strict=True):
        homes.setdefault(name, set()).add(split)
    assert all(len(home) == 1 for home in homes.values())
    assert np.bincount([min(home) for home in homes.values()]) / 700 == pytest.approx(
        [0.7, 0.2, 0.1], abs=0.05
    )


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_stratified_split_gives_every_class_its_shares_to_the_row(pieces: int) -> None:
    rows = np.arange(20_000)
    labels = (rows % 97 == 0).astype(np.float32)  # 207 of one class
    with ProcessEngine(1) as engine:
        held = engine.hold(
            lambda cut: piece(rows[cut], labels=labels[cut]), np.array_split(np.arange(len(rows)), pieces)
        )
        rule = stratified_split(SPLIT, engine, held, ())
    found = np.asarray(place(rule, piece(rows, labels=labels)))
    assert np.bincount(found[labels == 1]).tolist() == [144, 42, 21]
    assert np.bincount(found[labels == 0]).tolist() == [13855, 3958, 1980]


def test_a_long_pass_says_how_far_it_is_and_a_quick_one_nothing() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(clock=lambda: now[0])
    progress.begin("read")
    with heard(lines.append):
        for done in range(1, 11):
            now[0] += 0.9
            progress(done, 10)
    assert lines == ["read: 3 of 10 pieces", "read: 6 of 10 pieces", "read: 9 of 10 pieces"]
    progress.begin("written")
    now[0] += 1.0
    with heard(lines.append):
        progress(5, 10)
    assert len(lines) == 3


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with local_cluster(1) as found:
        yield found


def test_nobody_but_its_client_can_talk_to_a_local_cluster(client: Any) -> None:
    """Whoever can runs code on its workers; any user of the machine can reach the port."""
    address = client.scheduler.address
    careless = ssl.create_default_context()
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    for wanted, arguments in ((address.replace("tls:", "tcp:"), {}), (address, {"ssl_context": careless})):
        with pytest.raises(OSError, match=r"Timed out|in <T"):
            asyncio.run(connect(wanted, timeout=1, **arguments))


def test_every_engine_tells_of_every_piece(tmp_path: Path, client: Any) -> None:
    with ProcessEngine(2) as engine:
        for each in (engine, DaskEngine(client, scratch=tmp_path)):
            told: list[tuple[int, int]] = []
            each.tell = lambda done, total, told=told: told.append((done, total))
            assert each.collect(abs, each.hold(abs, [-1, -2, 3])) == [1, 2, 3]
            assert told[-3:] == [(1, 3), (2, 3), (3, 3)]
