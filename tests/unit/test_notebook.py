"""The tutorial notebook runs from its first cell to its last, and the command finds what it has made."""

import json
import re
import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from typer.testing import CliRunner

from serin.cli import app

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/notebook/tutorial.ipynb"


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_stored_without_outputs_and_holds_the_readme_s_lines() -> None:
    cells = code(nbformat.read(NOTEBOOK, as_version=4))
    assert [cell.outputs for cell in cells if cell.outputs or cell.execution_count is not None] == []
    (shown,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    wanted = [line.partition("  #")[0] for line in shown.splitlines() if line]
    written = "\n".join(cell.source for cell in cells).splitlines()
    assert [line for line in wanted if line not in written] == []


def test_the_notebook_runs_and_the_command_finds_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of Jupyter's own libraries; what the cells warn about is in their outputs
        NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps([cell.outputs for cell in code(notebook)])
    assert "late-parcels is good" in shown, "check"
    assert "<summary>dataset of late-parcels: " in shown, "progress"
    assert "<iframe" in shown, "the report"
    assert "exported before: late-parcels version 1" in shown
    assert "stderr" not in shown, "no warning, and progress once"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "late-parcels.yaml"), "--json"])
    assert json.loads(done.stdout)["version"] == 1
