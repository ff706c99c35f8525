"""The whole pipeline and a search in this process; rolling out is for e2e/."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.artifacts import Artifact
from typer.testing import CliRunner

from flows.pipeline import pipeline
from flows.search import search
from serin.cli import app
from serin.commands.models import show_model
from serin.errors import ColumnMissing, SpecError
from serin.formats.bundle import verify_bundle
from serin.formats.reason import Reason, read_reason
from serin.spec.load import load_spec
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

FIRST = Release(model=NAME, version=1)


def run(spec: Any, **parameters: Any) -> Release:
    return asyncio.run(pipeline(spec, serve=False, **parameters))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Iterator[Path]:
    """A folder with a spec whose pipeline has run once."""
    path = tmp_path_factory.mktemp("pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(path / "home"))
        assert run(str(write_spec(path, small_spec(path / "data")))) == FIRST
        yield path


def test_a_version_is_published_and_whole(folder: Path) -> None:
    bundle = Store.open().bundle(NAME, 1)
    assert verify_bundle(Path(bundle.path)).lineage["training"].startswith("train-")
    assert bundle.metrics["test_auc"] > 0.8


@pytest.mark.parametrize(
    ("page", "words"),
    [("data", "| train | 2,391 |"), ("training", "| epoch | steps done | loss |"), ("gate", "bit for bit")],
)
def test_every_stage_leaves_a_page(folder: Path, page: str, words: str) -> None:
    artifact = Artifact.get(f"{NAME}-{page}")
    assert words in artifact.data
    assert "| seconds |" in artifact.data


def test_a_version_is_shown_beside_the_live_one_with_its_card(folder: Path) -> None:
    assert Artifact.get(f"{NAME}-card").data == Path(Store.open().bundle(NAME, 1).path, "card.md").read_text()
    page = Artifact.get(f"{NAME}-version").data
    assert page.startswith(f"# {NAME} version 1\n\n| metric | version 1 |\n")
    assert "| auc, each on its own test rows | 0.9" in page
    assert "not compared: " in page


def test_a_run_is_tagged_with_its_model_also_when_nobody_did_before_it_began(folder: Path) -> None:
    async def tags() -> list[list[str]]:
        async with get_client() as client:
            return [run.tags for run in await client.read_flow_runs()]

    assert [NAME] in asyncio.run(tags())


def test_running_it_again_does_nothing_twice(folder: Path) -> None:
    trainings = sorted((folder / "home" / "runs").iterdir())
    assert run(str(folder / "spec.yaml")) == FIRST
    assert sorted((folder / "home" / "runs").iterdir()) == trainings
    assert Store.open().versions(NAME) == [1]


def test_the_spec_may_come_as_an_object(folder: Path) -> None:
    assert run(small_spec(folder / "data")) == FIRST


def test_another_monitoring_is_another_version_because_it_is_read_from_there(folder: Path) -> None:
    newest = Store.open().versions(NAME)[-1]
    other = small_spec(folder / "data", rollout={"steps": [100]}, monitoring={"retrain": ["data"]})
    assert run(other) == Release(model=NAME, version=newest + 1)
    assert run(other) == Release(model=NAME, version=newest + 1)


def test_a_wrong_spec_fails_with_every_problem_named(folder: Path) -> None:
    wrong = small_spec(folder / "data", training={"epoch": 2}, objectives={"latency_ms": -1})
    with pytest.raises(SpecError, match=r"(?s)training\.epoch.*objectives\.latency_ms"):
        run(wrong)


def test_a_spec_that_does_not_fit_its_table_fails_once_and_names_the_column(folder: Path) -> None:
    spec = small_spec(folder / "data")
    spec["features"][0]["columns"] = ["weigth", "distance"]
    with pytest.raises(ColumnMissing, match="did you mean 'weight'"):
        run(spec)


def test_a_relative_path_is_taken_from_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run("spec.yaml") == FIRST


def test_a_fresh_export_is_a_new_version_that_says_why_it_was_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Store.open().versions(NAME)[-1]
    reason = Reason(kind="drift", text="weight drifted since 2026-11-09 04:10 UTC", noticed=1.8e9)
    release = run(str(folder / "spec.yaml"), fresh=("export",), reason=reason.to_json())
    assert release == Release(model=NAME, version=newest + 1)
    bundle = Path(Store.open().bundle(NAME, release.version).path)
    assert read_reason(verify_bundle(bundle).lineage) == reason
    card = (bundle / "card.md").read_text()
    assert "Trained again because of drift: weight drifted since 2026-11-09 04:10 UTC." in card
    capsys.readouterr()
    show_model(f"{NAME}:{release.version}")
    assert "  reason   drift: weight drifted since 2026-11-09 04:10 UTC\n" in capsys.readouterr().out


SPACE = {"training.learning_rate": {"choice": [0.000001, 0.02]}}


def test_a_search_chooses_leaves_a_page_and_is_found_by_the_command(
    tmp_path: Path, home: Path, prefect_server: None
) -> None:
    raw = small_spec(tmp_path / "data", search={"space": SPACE, "sampler": "grid", "parallel": 2})
    spec = write_spec(tmp_path, raw)
    found = asyncio.run(search(str(spec)))
    assert found.settings == {"training.learning_rate": 0.02}
    page = Artifact.get(f"{NAME}-search")
    assert "| training.learning_rate | 0.02 |" in page.data
    assert "data:image/svg+xml;base64," in page.data
    assert load_spec(Path(found.folder) / "chosen.yaml").training.learning_rate == 0.02

    done = CliRunner().invoke(app, ["search", str(spec), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["folder"], answer["settings"]) == (found.folder, found.settings)
    assert load_spec(answer["spec"]).training == load_spec(spec).training.model_copy(
        update={"learning_rate": 0.02}
    )


def test_a_spec_without_a_search_section_is_refused_with_an_example(
    tmp_path: Path, prefect_server: None
) -> None:
    spec = write_spec(tmp_path, small_spec(tmp_path / "data"))
    with pytest.raises(SpecError, match=r"search: is missing; add for example search: \{space"):
        asyncio.run(search(str(spec)))
