"""Import rules that import-linter cannot state: what runs in Triton's Python, what is pure, what a process loads."""

import ast
import os
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from serin.cli import MODULES
from tests.architecture.sources import ROOT, imported_modules, nodes, python_files, tree
from tests.kit.commands import run
from tests.kit.stacks import stack_in

PURE = [
    *(
        name
        for name in python_files("serin/evidence", "serin/rollout/decide")
        if not name.endswith("__init__.py")
    ),
    "serin/monitoring/latency.py",
    "serin/monitoring/objectives/burn.py",
    "serin/monitoring/history/sketch.py",
    "serin/monitoring/drift/detector.py",
    "serin/formats/serving/request.py",
]
PURE_MAY_IMPORT = {
    "__future__", "base64", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "operator", "statistics", "types", "typing", "zlib", "annotated_types", "numpy",
    "serin.store.artifacts", "serin.errors", "serin.spec", "serin.machine.typed_json", "serin.formats.serving.request",
    "serin.monitoring.latency", "serin.monitoring.alerts.alert", "serin.monitoring.objectives.burn",
    "serin.monitoring.history.sketch",
    "serin.formats.drift", "serin.monitoring.drift",
    "serin.evidence", "serin.rollout.decide",
}  # fmt: skip
HEAVY = {
    "botocore", "dask", "matplotlib", "mlflow", "numpy", "obstore", "onnx", "onnxruntime", "pandas", "prefect",
    "pyarrow", "rich", "torch", "xgboost", "yaml",
}  # fmt: skip
GPU_ONLY = {  # for GPUs, absent here
    "cudf", "cupy", "cupyx", "dask_cuda", "pylibcudf", "pynvml", "rmm", "tensorrt",
}  # fmt: skip


def test_a_triton_model_imports_only_what_triton_s_environment_holds() -> None:
    models = python_files("triton_models")
    present = {"numpy", "onnxruntime", "triton_python_backend_utils"} | sys.stdlib_module_names
    assert models
    imports = [(name, line, module) for name in models for module, line in imported_modules(name)]
    assert [found for found in imports if found[2].split(".")[0] not in present] == []


@pytest.mark.parametrize("name", PURE)
def test_a_decision_imports_nothing_that_could_look_outside(name: str) -> None:
    strangers = [
        f"{name}:{line}: {module}"
        for module, line in imported_modules(name)
        if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in PURE_MAY_IMPORT)
    ]
    assert not strangers


@pytest.mark.parametrize("name", PURE)
def test_a_decision_opens_and_prints_nothing(name: str) -> None:
    called = [node.func for node in nodes(name) if isinstance(node, ast.Call)]
    outside = [
        call
        for call in called
        if isinstance(call, ast.Name) and call.id in ("open", "print", "input", "exec", "eval")
    ]
    assert [f"{name}:{call.lineno}: {call.id}" for call in outside] == []


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("serin.training.programs.worker", {"prefect", "pandas", "dask", "mlflow", "optuna"}),
        ("serin.training.launch.launcher", {"prefect", "torch", "mlflow", "optuna"}),
        ("serin.training.search.search", {"prefect", "torch", "mlflow", "optuna"}),
        ("serin.cluster.home_controller", {"prefect", "torch", "pandas", "dask"}),
        ("serin.cli", {"prefect", "torch", "pandas", "dask", "matplotlib"}),
        ("serin.api.pipeline", {"prefect", "torch", "pandas", "dask", "matplotlib", "rich"}),
        ("serin", {"prefect", "torch", "pandas", "numpy", "pydantic", "yaml"}),
    ],
)
def test_a_process_does_not_load_what_it_must_not_pay_for(module: str, never: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = run(sys.executable, "-c", program, cwd=ROOT)
    assert set(done.stdout.split()) & never == set()


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("status", {"stack"}),  # of a stack that is up, and does not answer
        ("runs", {"runs"}),
        ("models list", {"models", "signing"}),
        ("gpus", {"models", "signing"}),
    ],
)
def test_a_command_that_looks_loads_no_heavy_library_and_no_other_command(
    words: str, own: set[str], tmp_path: Path
) -> None:
    if words == "status":
        stack_in(tmp_path)
    program = (
        "import contextlib, io, sys; from serin.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()\n"
        "print(*sys.modules)"
    )
    env = {**os.environ, "SERIN_HOME": str(tmp_path)}
    done = run(sys.executable, "-c", program, *words.split(), cwd=ROOT, env=env)
    loaded = set(done.stdout.split())
    assert loaded & HEAVY == set()
    assert {module for module in MODULES if f"serin.commands.{module}" in loaded} == own


def test_every_imported_package_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [text for extra, texts in extras.items() if extra not in ("dev", "gpu") for text in texts]
    declared = {_distribution(text) for text in [*project["dependencies"], *named]}
    owners = {
        package: {_distribution(name) for name in names}
        for package, names in packages_distributions().items()
    }
    owners |= {part: {"pydantic"} for part in ("pydantic_core", "annotated_types")}  # required by it
    known = sys.stdlib_module_names | {"serin", "flows", "tasks"} | GPU_ONLY
    files = python_files("serin", "flows", "tasks", "deployments")
    imports = [(name, line, module) for name in files for module, line in imported_modules(name)]
    third_party = [found for found in imports if found[2].split(".")[0] not in known]
    assert [found for found in third_party if not owners.get(found[2].split(".")[0], set()) & declared] == []


def _distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-")


def test_every_file_parses_on_the_oldest_python() -> None:
    for name in python_files():
        tree(name)


def test_a_module_that_can_be_run_defines_everything_before_it_runs() -> None:
    asks = "__name__ == '__main__'"
    early = [
        name
        for name in python_files("serin", "tasks", "deployments", "benchmarks", "tests")
        if any(isinstance(node, ast.If) and ast.unparse(node.test) == asks for node in tree(name).body[:-1])
    ]
    assert early == []


def test_every_name_that_is_imported_from_the_repository_exists() -> None:
    """Also in files that are not run or typed everywhere, such as the tests of a GPU and the benchmarks."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in python_files()
    }
    packages = {name.rpartition(".")[0] for name in modules}
    roots = {name.partition(".")[0] for name in modules}
    missing = []
    for name in python_files():
        for node in nodes(name):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            module = node.module or ""
            if module.partition(".")[0] not in roots:
                continue
            defined = _defined(modules[module]) if module in modules else set[str]()
            for alias in node.names:
                below = f"{module}.{alias.name}"
                if alias.name not in defined and below not in modules and below not in packages:
                    missing.append(f"{name}:{node.lineno}: {below}")
    assert missing == []


@cache
def _defined(name: str) -> set[str]:
    """All that a module binds, at any depth: which branch runs is not known here."""
    names: set[str] = set()
    for node in nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names
