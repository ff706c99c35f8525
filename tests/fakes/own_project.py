"""A project as a user has it: a spec beside its table and its network, which imports what is beside it, and an operator
in a package at the project's root, which imports what is beside it."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from tests.fakes import own_operators
from tests.fakes.small_pipeline import parcels, small_spec

NET = """
import torch

from layers import width


class Net(torch.nn.Module):
    def __init__(self, numeric, sizes, outputs):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(numeric + len(sizes), width()), torch.nn.ReLU(), torch.nn.Linear(width(), outputs)
        )

    def forward(self, num, cat):
        return self.body(torch.cat([num, cat.float()], 1))
"""
LAYERS = "def width():\n    return 8\n"


def write_project(root: Path, *, rows: int = 3000, **sections: Any) -> Path:
    """The path of the spec, root/model/spec.yaml; `root` is where `ours.steps` is imported from."""
    folder = root / "model"
    folder.mkdir(parents=True)
    pq.write_table(parcels(rows), folder / "parcels.parquet")
    (folder / "net.py").write_text(NET)
    (folder / "layers.py").write_text(LAYERS)
    (root / "ours").mkdir()
    (root / "ours" / "__init__.py").touch()
    operators = Path(own_operators.__file__).read_text().replace("1e30", "LIMIT")
    (root / "ours" / "steps.py").write_text(f"from .limits import LIMIT\n{operators}")
    (root / "ours" / "limits.py").write_text("LIMIT = 1e30\n")
    spec = small_spec(folder, model={"module": "net.py:Net"}, **sections)
    spec["data"]["tables"] = {"parcels": "parcels.parquet"}
    spec["features"][0]["steps"].append("ours.steps:Squash")
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path
