"""What a stage computes decides its key; how and where that is written does not."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from serin.spec import code_digest
from serin.spec.code_digest import digest_of_all, digest_of_own, digest_of_own_names
from serin.spec.parsed_code import Package, Reached
from serin.store.stage_keys import STAGES
from tests.unit.key_walk import PACKAGE, computed_by

FILES = {
    "__init__.py": "",
    "errors.py": "class Bad(Exception): ...\n",
    "store.py": "def keep(value):\n    return value\n",
    "work.py": (
        "import logging\nfrom typing import Any\nimport numpy as np\nfrom ours import tools\n"
        "from ours.errors import Bad\nfrom ours.shapes import Shape\nfrom ours.store import keep\n"
        "logger = logging.getLogger(__name__)\n_HALF = 0.5\n"
        "def compute(rows, shape: Shape, *, scale=2) -> Any:\n"
        '    """Says what it does."""\n'
        "    total = 0\n"
        "    for row in rows:\n"
        "        total += _scaled(row, scale)  # one by one\n"
        "    if total < 0:\n"
        "        logger.info(f'{total} is below zero')\n"
        "        raise Bad('below zero')\n"
        "    assert total, 'nothing'\n"
        "    problems = [Bad('too large')]\n"
        "    return keep(np.sqrt(tools.double(total))), shape.area(), problems\n"
        "def _scaled(row, scale):\n    return row * scale * _HALF\n"
        "def unused():\n    return 1\n"
    ),
    "tools.py": "def double(x):\n    return x + x\n",
    "shapes.py": (
        "class Shape:\n    def area(self):\n        return sum(side ** 2 for side in self.sides())\n"
        "    def sides(self):\n        return PLUGINS\n"
        "PLUGINS = 'ours.plugins'\n"
    ),
    "other_shapes.py": "class Shape:\n    def area(self):\n        return 1\n",
    "plugins/__init__.py": "",
    "plugins/one.py": "from ours.tools import double\nclass One: ...\ndouble(One)\n",
}


def reach(folder: Path, files: Mapping[str, str]) -> Reached:
    for name, text in files.items():
        (folder / "ours" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "ours" / name).write_text(text)
    package = Package(folder / "ours", outside=("ours.errors", "ours.store"), errors="ours.errors")
    return package.reach(["ours.work:compute"])


def edited(file: str, before: str, after: str) -> dict[str, str]:
    assert before in FILES[file]
    return {**FILES, file: FILES[file].replace(before, after)}


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("work.py", "Says what it does.", "Explains it."),
        ("work.py", "  # one by one", ""),
        ("work.py", "is below zero'", "is negative'"),
        ("work.py", "'below zero'", "f'{total} rows'"),
        ("work.py", "'too large'", "'beyond the limit'"),
        ("work.py", "'nothing'", "'no rows'"),
        ("work.py", "return 1", "return 2"),
        ("work.py", "import numpy as np", "import numpy as np, json"),
        ("store.py", "return value", "return [value]"),
        ("errors.py", "...", "code = 1"),
        ("other_shapes.py", "1", "2"),
    ],
)
def test_what_computes_the_same_has_the_same_digest(
    tmp_path: Path, file: str, before: str, after: str
) -> None:
    files = edited(file, before, after)
    assert reach(tmp_path / "new", files).digest() == reach(tmp_path / "old", FILES).digest()


def test_definitions_may_be_moved_and_modules_merged(tmp_path: Path) -> None:
    before = reach(tmp_path / "old", FILES).digest()
    moved = {**FILES, "deep/__init__.py": "", "deep/kit.py": FILES["tools.py"] + FILES["shapes.py"]}
    del moved["tools.py"], moved["shapes.py"]
    moved["work.py"] = (
        moved["work.py"]
        .replace("from ours import tools\n", "from ours.deep import kit as tools\n")
        .replace("ours.shapes", "ours.deep.kit")
    )
    moved["plugins/one.py"] = moved["plugins/one.py"].replace("ours.tools", "ours.deep.kit")
    assert reach(tmp_path / "new", moved).digest() == before
    files = {**FILES, "plugs/__init__.py": "", "plugs/two.py": FILES["plugins/one.py"]}
    del files["plugins/one.py"], files["plugins/__init__.py"]
    files["shapes.py"] = files["shapes.py"].replace("ours.plugins", "ours.plugs")
    assert reach(tmp_path / "newer", files).digest() == before


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("work.py", "total < 0", "total <= 0"),
        ("work.py", "0.5", "0.25"),
        ("work.py", "scale=2", "scale=3"),
        ("work.py", "row * scale", "row + scale"),
        ("work.py", "(row, scale):", "(scale, row):"),
        ("work.py", "np.sqrt", "np.cbrt"),
        ("work.py", "import numpy as np", "import cupy as np"),
        ("work.py", "raise Bad(", "raise ValueError("),
        ("work.py", "return keep(", "return str("),
        ("work.py", "ours.shapes", "ours.other_shapes"),  # of the same name
        ("work.py", "def compute", "@tools.double\ndef compute"),
        ("tools.py", "x + x", "x * 2"),
        ("shapes.py", "** 2", "** 3"),
        ("shapes.py", "class Shape:", "class Shape(list):"),
        ("plugins/one.py", "double(One)", "double(double(One))"),  # run by an import
        ("plugins/one.py", "...", "size = 1"),
    ],
)
def test_what_computes_something_else_has_another_digest(
    tmp_path: Path, file: str, before: str, after: str
) -> None:
    files = edited(file, before, after)
    assert reach(tmp_path / "new", files).digest() != reach(tmp_path / "old", FILES).digest()


def test_a_root_that_is_not_defined_is_refused(tmp_path: Path) -> None:
    reach(tmp_path, FILES)
    for root in ("ours.work:nothing", "ours.nothing"):
        with pytest.raises(LookupError, match="nothing"):
            Package(tmp_path / "ours").reach([root])


def test_messages_and_moved_modules_change_no_key_of_a_stage(tmp_path: Path) -> None:
    """In every module at once."""
    counted = {module for stage in STAGES for module, _ in computed_by(stage).statements}
    for path in PACKAGE.rglob("*.py"):
        other, place = path.read_text(), Path("serin") / path.relative_to(PACKAGE)
        if ".".join(place.with_suffix("").parts) in counted:
            other = ast.unparse(_OtherTexts().visit(ast.parse(other)))
        for old, new in (
            ("serin/columns", "serin/deep/pillars"),
            ("serin/models/numbers", "serin/models/figures"),
        ):
            place = Path(str(place).replace(old, new, 1))
            other = other.replace(old.replace("/", "."), new.replace("/", "."))
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(other)
    package = Package(tmp_path / "serin")
    assert package.has("serin.deep.pillars.exact")
    for stage, about in STAGES.items():
        assert package.reach(about.computed_by).digest() == computed_by(stage).digest()


MINUS_FOR_PLUS = {
    "serin.columns.exact": {"etl", "export"},
    "serin.etl.dataset.split": {"etl"},
    "serin.export.gate.gate": {"export"},
    "serin.features.ops.log1p": {"etl", "export"},
    "serin.metrics": {"train", "export"},
    "serin.models.build": {"train", "export"},
    "serin.training.engine.optimizer": {"train"},
    "serin.reports.charts": set(),
    "serin.store.receipt": set(),
    "serin.training.launch.progress": set(),
}


def test_other_arithmetic_changes_the_keys_of_the_stages_that_compute_by_it(tmp_path: Path) -> None:
    for path in PACKAGE.rglob("*.py"):
        place = tmp_path / "serin" / path.relative_to(PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        if ".".join(place.relative_to(tmp_path).with_suffix("").parts) in MINUS_FOR_PLUS:
            assert " + " in text, place
            text = text.replace(" + ", " - ")
        place.write_text(text)
    package, changed = Package(tmp_path / "serin"), {module: set[str]() for module in MINUS_FOR_PLUS}
    for stage, about in STAGES.items():
        before, after = computed_by(stage), package.reach(about.computed_by)
        assert before.statements.keys() == after.statements.keys()
        assert before.digest() != after.digest()
        for unit, digest in after.statements.items():
            if digest != before.statements[unit] and unit[0] in MINUS_FOR_PLUS:
                changed[unit[0]].add(stage)
    assert changed == MINUS_FOR_PLUS


def test_own_code_counts_what_it_uses_of_serin() -> None:
    names = ("serin.metrics.auc", "serin.features.fitted")
    assert digest_of_own_names(names) == digest_of_own(("serin.features.fitted", "serin.metrics:auc"))
    assert digest_of_own_names(names) != digest_of_all()
    assert digest_of_own_names(("serin",)) == digest_of_own_names(("serin.metrics.none",)) == digest_of_all()


@pytest.mark.parametrize("writable", [True, False])
def test_a_digest_is_kept_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    source, otherwise = tmp_path / "serin" / "work.py", tmp_path / "otherwise"
    source.parent.mkdir()
    source.write_text("def compute():\n    return 1\n")
    if not writable:
        (tmp_path / "serin" / "__pycache__").write_text("")  # no folder
    monkeypatch.setattr(code_digest, "_own_folder", lambda: source.parent)

    def digest() -> str:
        digest_of_all.cache_clear()
        return digest_of_own.__wrapped__(("serin.work:compute",), otherwise=otherwise)

    first = digest()
    (kept,) = tmp_path.rglob("digest-*.json")
    assert kept.parent == (source.parent / "__pycache__" if writable else otherwise)
    kept.write_text(kept.read_text().replace(first, "kept"))
    assert digest() == "kept"
    source.write_text("def compute():\n    return 2\n")
    assert digest() not in ("kept", first)
    kept.write_text("damaged")
    source.write_text("def compute():\n    return 1\n")
    assert digest() == first
    digest_of_all.cache_clear()


LOGS = ("logger.info", "logger.warning")


class _OtherTexts(ast.NodeTransformer):
    """Other docstrings, log lines and texts of errors."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value = ast.Constant("other")
        elif isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in LOGS:
            node.value.args = [ast.Constant("other")]
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [ast.Constant("other")], []
        return node
