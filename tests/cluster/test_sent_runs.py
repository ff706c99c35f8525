"""Runs that are sent from hosts which share nothing with the worker but the Prefect server and the store."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.formats.bundle import read_manifest
from serin.store.open import open_objects
from serin.store.store import Store
from tests.cluster.hosts_cluster import three_hosts
from tests.cluster.namespaces import end
from tests.cluster.senders import Senders
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import NAME, small_spec
from tests.kit.ci_files import CI

pytestmark = pytest.mark.timeout(2400)  # a busy machine; waits are bounded


@pytest.fixture
def senders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Senders]:
    with three_hosts(tmp_path, monkeypatch) as cluster:
        made = Senders(cluster)
        for host in ("b", "c"):
            write_project(made.disks[host] / "project")
        made.hide_disks()
        made.start()
        yield made
        for process in reversed(made.processes):
            end(process)


def test_a_run_is_sent_by_content_and_every_form_of_a_spec_works_from_a_host_without_the_disk(
    senders: Senders,
) -> None:
    said = senders.run("c", CI / "train", "project/model/spec.yaml", "out")
    assert "sent package" in said
    assert f"{NAME} version 1 is published" in said
    report = senders.run("c", "cat", "out/report.md")
    assert f"## Completed: {NAME}" in report
    assert senders.run("c", "cat", "out/card.md").startswith(f"# {NAME}, version 1")
    again = senders.serin(
        "b", "run", "project/model/spec.yaml", "--no-serve"
    )  # the same content, from another host
    assert "sent package" not in again
    url = senders.cluster.store["SERIN_STORE"]
    first = _made(senders, url)
    assert {name: len(found) for name, found in first.items()} == dict.fromkeys(first, 1)
    with senders.cluster.network["store"].inside():
        package = read_manifest(Path(Store(url).bundle(NAME, 1).path)).lineage["package"]

    _runs_are_shown_and_come_back(senders, f"package:{package}")
    _every_form_works(senders, f"package:{package}")
    _failures_say_why(senders)
    _another_machine_makes_the_same(senders, f"{url}-other", first)


def _made(senders: Senders, url: str) -> dict[str, list[Any]]:
    """What a store has of the model: datasets, the keys of trainings, versions, and the trainings they came from."""
    with senders.cluster.network["store"].inside():
        store, objects = Store(url), open_objects(url)
        versions = store.versions(NAME)
        lineages = [read_manifest(Path(store.bundle(NAME, number).path)).lineage for number in versions]
        return {
            "datasets": store.datasets(),
            "training keys": objects.keys("stages/train/"),
            "trainings": [lineage["training"] for lineage in lineages],
            "versions": versions,
        }


def _another_machine_makes_the_same(senders: Senders, url: str, first: dict[str, list[Any]]) -> None:
    """The same content from another host, computed once more: on another worker, for a store that is empty."""
    while len(senders.processes) > 1:  # the server stays
        end(senders.processes.pop())
    senders.keep("b", "worker", "cpu", SERIN_STORE=url)
    said = senders.serin("b", "run", "project/model/spec.yaml", "--no-serve", SERIN_STORE=url)
    assert f"{NAME} version 1 is published" in said
    assert _made(senders, url) == first


def _runs_are_shown_and_come_back(senders: Senders, reference: str) -> None:
    run = json.loads(senders.serin("b", "runs", "list", "--json"))[0]["name"]
    shown = senders.serin("c", "runs", "show", run)
    assert f"code         {reference}" in shown
    senders.serin("c", "runs", "fetch", run, "--to", "back")
    assert "def width" in senders.run("c", "cat", "back/layers.py")
    assert "sent package" not in senders.serin("c", "run", reference, "--no-serve")


def _every_form_works(senders: Senders, reference: str) -> None:
    pushed = json.loads(senders.serin("c", "tables", "push", "project/model", "--json"))
    assert not json.loads(senders.serin("b", "tables", "push", "project/model", "--json"))["sent"]
    spec = small_spec(senders.folder / "unused", rows=10, model={"kind": "xgboost", "rounds": 5}, training={})
    spec["name"] = "plain"
    spec["data"]["tables"] = {"parcels": pushed["tables"]["parcels.parquet"]}
    url = f"{senders.cluster.store['SERIN_STORE']}/specs/plain.yaml"
    with senders.cluster.network["store"].inside():
        objects = open_objects(senders.cluster.store["SERIN_STORE"])
        objects.put("specs/plain.yaml", yaml.safe_dump(spec).encode())
    senders.write("a", "plain.yaml", yaml.safe_dump(spec))
    for form in (url, spec, str(senders.disks["a"] / "plain.yaml"), reference):
        assert "Completed" in senders.deployment(form)
    other = {**spec, "name": "other", "model": {"kind": "xgboost", "rounds": 6}}
    placed = senders.deployment(other, name="placed")
    assert "train placed as train/placed" in placed
    assert "export placed as export/placed" in placed
    with senders.cluster.network["store"].inside():
        assert (Store.open().versions("plain"), Store.open().versions("other")) == ([1], [1])


def _failures_say_why(senders: Senders) -> None:
    gone = str(senders.disks["c"] / "project/model/spec.yaml")
    assert "there is no such file on a, where the run is" in senders.deployment(gone, code=1)
    spec = senders.disks["c"] / "project/model/spec.yaml"
    senders.run("c", "sed", "-i", "s/hours > 30/hours > 3000/", spec)
    said = senders.run("c", CI / "train", spec, "out", code=1)
    assert "hours > 3000" in said
    assert "hours > 3000" in senders.run("c", "cat", "out/report.md")
    senders.run("c", CI / "train", spec, "out", code=2, SERIN_STORE="")
    report = senders.run("c", "cat", "out/report.md")
    assert report.startswith("## No run")
    assert "SERIN_STORE: is not set" in report
