"""The search as a flow, and the command after it: they find each other's trials."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prefect.artifacts import Artifact
from typer.testing import CliRunner

from flows.search import search
from serin.cli import app
from serin.errors import SpecError
from serin.spec.load import load_spec
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

SPACE = {"training.learning_rate": {"choice": [0.000001, 0.02]}}


def test_a_search_chooses_leaves_a_page_and_is_found_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    raw = small_spec(tmp_path / "data", search={"space": SPACE, "sampler": "grid", "parallel": 2})
    spec = write_spec(tmp_path, raw)
    found = asyncio.run(search(str(spec)))
    assert found.settings == {"training.learning_rate": 0.02}
    page = Artifact.get(f"{NAME}-search")
    assert page is not None
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
