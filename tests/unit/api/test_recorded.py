"""Reasons of recorded answers: they add up for any rows, are the same wherever the records are, and take little
memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serin.api.recorded import Period, RecordedAnswers
from serin.errors import ExplanationRefused
from serin.monitoring.capture.all_hosts import AllHosts
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.fakes.live_quality import publish
from tests.fakes.recorded_answers import MODEL, NOON, answered, make_model, record, some_flights
from tests.fakes.sharing_hosts import SharingHost
from tests.kit.commands import run, serin_main
from tests.kit.recorded_parts import write_part
from tests.unit.export.small_dataset import CLASSES, make_trained
from tests.unit.export.test_explain import make_trees
from tests.unit.serving import bundles
from tests.unit.windows.test_gate import spec_of as windows_spec

ANYTIME = Period()
MOST_GROWTH = 48 << 20
FLIGHT = st.fixed_dictionaries(
    {
        "carrier": st.none() | st.sampled_from(["AA", "BB", "CÜ", "", "never seen"]),
        "distance": st.none() | st.floats(-(2**14), 2**14, width=32),
        "tailnum": st.none() | st.sampled_from(["N1", "N3", "N19", "N25", "x" * 40]),
        "dep": st.none() | st.integers(-(2**52), 2**52),
        "stops": st.none() | st.integers(-9, 9),
        "night": st.none() | st.booleans(),
        "num": st.none() | st.floats(-(2**-6), 2**-6, width=32),
    }
)
SCHEMA = pa.schema(
    {"carrier": pa.string(), "distance": pa.float64(), "tailnum": pa.string(), "dep": pa.timestamp("us"),
     "stops": pa.int64(), "night": pa.bool_(), "num": pa.float32()}
)  # fmt: skip


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("network")
    monitoring = {"capture": {"share": 1.0}}
    return make_trained(folder, "binary", monitoring=monitoring).export(folder)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("trees")
    return make_trees(folder, "multiclass", monitoring={"capture": {"share": 1.0}}).export(folder)


def store_of(bundle: Bundle) -> Store:
    return Store(str(Path(bundle.path).parents[3]))


def recorded(home: Path, bundle: Bundle) -> RecordedAnswers:
    return RecordedAnswers(bundle.model, AllHosts(home, None, "here", bundle.model), store_of(bundle))


@pytest.mark.parametrize("kind", ["network", "trees"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(FLIGHT, min_size=1, max_size=4))
def test_contributions_add_up_to_the_recorded_answer_minus_the_base_for_any_rows(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, object]],
) -> None:
    bundle: Bundle = request.getfixturevalue(kind)
    folder = tmp_path_factory.mktemp("rows")
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    record(folder / "home", bundle, folder / "scratch", table, ["r"] * len(rows))
    (found,), count = recorded(folder / "home", bundle).explain_request("r", ANYTIME)
    assert (count, len(found)) == (len(rows), len(rows))
    frame = found.explanation.frame
    parts = frame[found.columns].sum(axis=1) + frame["base"]
    assert parts.to_numpy() == pytest.approx(frame["margin"].to_numpy(), abs=1e-4)
    margin = frame["margin"].to_numpy().reshape(found.recorded.shape)
    assert answer_of(margin) == pytest.approx(found.recorded, abs=1e-5)
    assert found.agrees.all()
    assert [found.difference(row) for row in range(len(rows))] == [""] * len(rows)


def answer_of(margin: np.ndarray) -> np.ndarray:
    if margin.shape[1] == 1:
        return 1 / (1 + np.exp(-margin))
    raised = np.exp(margin - margin.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def test_each_class_has_its_reasons(tmp_path: Path, trees: Bundle) -> None:
    record(tmp_path / "home", trees, tmp_path / "scratch", some_flights(310, 2), ["a", "a"])
    answers = recorded(tmp_path / "home", trees)
    (found,), _ = answers.explain_request("a", ANYTIME)
    table = found.table([*found.columns, "of another version"])
    assert table["output"].to_pylist() == [*CLASSES, *CLASSES]
    assert table["_row"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert table["recorded"].to_numpy().reshape(2, 3).sum(axis=1) == pytest.approx([1, 1])
    assert table["of another version"].null_count == 6
    with pytest.raises(
        ExplanationRefused, match=r"flights-v1 .* began to answer while the records were read"
    ):
        found.table(found.columns[1:])
    chosen = list(answers.where("_answer_label = 2", ANYTIME))
    labels = found.recorded.argmax(axis=1).tolist()
    assert sum(rows.num_rows for rows in chosen) == labels.count(2)


def test_a_version_that_cannot_be_explained_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    bundle = publish(store, 0.0)
    rows = pa.table({name: pa.array(values.reshape(-1)) for name, values in bundles.rows(2).items()})
    record(tmp_path / "home", bundle, tmp_path / "scratch", rows, ["a", "b"])
    answers = RecordedAnswers(bundle.model, AllHosts(tmp_path / "home", None, "here", bundle.model), store)
    with pytest.raises(ExplanationRefused, match="version 1 cannot be explained"):
        answers.explain_request("a", ANYTIME)
    with pytest.raises(ExplanationRefused, match="version 1 cannot be explained"):
        answers.columns("_row = 0", ANYTIME)


def test_windows_that_the_platform_added_are_among_the_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    spec = windows_spec(tmp_path).model_dump(by_alias=True, mode="json", exclude_unset=True)
    spec |= {"monitoring": {"capture": {"share": 1.0}}, "objectives": {"latency_ms": 50}}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    for stage in ("etl", "train", "export"):
        assert serin_main(stage, str(tmp_path / "spec.yaml")) == 0
    bundle = Store.open().find("pay")
    windows = {"n": [3, None], "spent": [12.5, None], "mean": [4.0, None], "last": [None, 2.0]}
    rows = pa.table({"amount": [20.0, 30.0], **{name: pa.array(made) for name, made in windows.items()}})
    record(tmp_path / "home", bundle, tmp_path / "scratch", rows, ["a", "a"])
    (found,), _ = recorded(tmp_path / "home", bundle).explain_request("a", ANYTIME)
    assert found.agrees.all()
    assert set(found.columns) == {"amount", *windows}
    assert {found.explanation.sources[name] for name in windows} == {"online window"}
    first, second = found.explanation.rows()
    sent = {"amount": 20.0, **{name: made[0] for name, made in windows.items()}}
    assert {each.column: each.value for each in first.contributions} == sent
    assert first.margin != second.margin


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that hosts share."""
    return str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("bucket")


def test_reasons_are_the_same_on_every_host_that_shares_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "elsewhere"))
    model = make_model(tmp_path, url)
    a, b = (SharingHost(tmp_path, url, name) for name in "ab")
    rows = answered(model.base, tmp_path / "scratch", some_flights(310, 4), ["x", "y", "y", "z"])
    write_part(b.home, MODEL, 1, rows.slice(0, 3))
    write_part(a.home, MODEL, 1, rows.slice(3, 1))
    write_part(
        b.home, MODEL, 1, answered(model.base, tmp_path / "late", some_flights(320, 1), ["w"], t=NOON + 7200)
    )
    for host in (a, b):
        assert host.share() == {}
    found = {}
    for host in (a, b, SharingHost(tmp_path, url, "newcomer")):
        records = AllHosts(host.home, host.records, host.name, MODEL)
        answers = RecordedAnswers(MODEL, records, host.store)
        (reasons,), count = answers.explain_request("y", ANYTIME)
        assert count == 2
        assert reasons.agrees.all()
        found[host.name] = reasons.table(reasons.columns)
        tables = [each for rows in answers.where("_row = 0", ANYTIME) for each in answers.explain(rows)]
        assert sorted(name for each in tables for name in each.rows["_id"].to_pylist()) == [
            "w",
            "x",
            "y",
            "z",
        ]
        assert records.first_hour() == "2026-03-01T12"
    assert found["a"].equals(found["b"])
    assert found["a"].equals(found["newcomer"])


def test_a_day_of_reasons_takes_no_more_memory_than_an_hour(tmp_path: Path, trees: Bundle) -> None:
    rows = answered(trees, tmp_path / "scratch", some_flights(0, 400), ["r"] * 400)
    peaks = []
    for hours in (1, 12):
        home, out = tmp_path / str(hours), tmp_path / f"{hours}.parquet"
        for hour in range(hours):
            shift = pa.scalar(3600 * hour * 10**6, pa.duration("us"))
            table = pa.concat_tables([rows] * 25)
            times = pa.compute.add(table["_t"], shift)
            write_part(home, MODEL, 1, table.set_column(table.column_names.index("_t"), "_t", times))
        done = explain_process(home, trees, out, "")
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout.splitlines()[-1])["peak"])
        assert pq.read_metadata(out).num_rows == hours * 10_000 * len(CLASSES)
    print(f"peak of 10,000 rows {peaks[0] >> 20} MB, of 120,000 rows {peaks[1] >> 20} MB")
    assert peaks[1] - peaks[0] < MOST_GROWTH


def test_a_killed_command_leaves_no_file_and_the_next_one_writes_it(tmp_path: Path, trees: Bundle) -> None:
    home, out = tmp_path / "home", tmp_path / "why.csv"
    rows = answered(trees, tmp_path / "scratch", some_flights(0, 400), ["r"] * 400)
    for _ in range(2):
        write_part(home, MODEL, 1, rows)
    assert explain_process(home, trees, out, "killed").returncode == -signal.SIGKILL
    assert not out.exists()
    assert explain_process(home, trees, out, "").returncode == 0
    assert len(out.read_text().splitlines()) == 1 + 800 * len(CLASSES)


EXPLAIN = """
import json, os, re, signal, sys
from serin.api import recorded
from serin.cli import app
if sys.argv[1]:
    write, tables = recorded.Reasons.table, iter(range(9))
    def table(self, columns):
        if next(tables) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, columns)
    recorded.Reasons.table = table
app(["explain", "flights", "--where", "_row >= 0", "--out", sys.argv[2]], standalone_mode=False)
with open("/proc/self/status") as file:  # getrusage counts the process that started this one, too
    print(json.dumps({"peak": 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1])}))
"""


def explain_process(home: Path, bundle: Bundle, out: Path, fault: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "SERIN_HOME": str(home), "SERIN_STORE": store_of(bundle).url}
    return run(sys.executable, "-c", EXPLAIN, fault, str(out), env=variables, code=None)
