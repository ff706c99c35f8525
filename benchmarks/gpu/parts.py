"""The parts of `make gpu-test`: files of tests/gpu, and benchmarks with their goals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.suite.parts import ROOT, Goal, Part

_ALONE = "pytest.mark.alone"
_MEMORY = Path("/dev/shm")  # a disk would be the limit
_FAST_FOLDER = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
_ETL = (
    "-m", "benchmarks.etl.gpu", "--only", "strings", "speed", "--repetitions", "3", "--without-host",
    "--scratch", str(_FAST_FOLDER),
)  # fmt: skip
_LONGEST = (  # begin first, in this order
    "test_whole_chain", "test_tuning_cuda", "test_etl_cuda", "test_shared_gpu", "test_serving_cuda", "test_training",
    "test_trees_cuda",
)  # fmt: skip

BENCHMARKS = (
    Part(
        name="trees",
        command=("-m", "benchmarks", "trees"),
        alone=True,
        goals={"cpu": Goal(least=1.0), "pandas": Goal(least=1.0)},
    ),
    Part(
        name="bulk",
        command=("-m", "benchmarks", "bulk"),
        alone=True,
        goals={"pandas": Goal(least=1.0)},
    ),
    Part(
        name="etl.gpu",
        command=_ETL,
        alone=True,
        goals={
            "strings_cudf": Goal(least=0.8),
            "strings_cudf_polars": Goal(least=1.0),
            "strings_cold_s": Goal(most=5.0),
            "limit": Goal(least=0.8),
            "limit_durable": Goal(least=0.8),
            "cudf": Goal(least=0.7),
        },
    ),
    Part(
        name="parallel",
        command=("-m", "benchmarks", "parallel"),
        alone=True,
        goals={"ddp": Goal(least=0.95), "tax": Goal(most=0.03)},
    ),
    Part(
        name="training",
        command=("-m", "benchmarks", "training"),
        alone=True,
        goals={"limit": Goal(least=0.9), "eager": Goal(least=1.0)},
    ),
    Part(
        name="serving.gpu",
        command=("-m", "benchmarks.serving.gpu", "--rounds", "2", "--seconds", "0.5"),
        alone=True,
        goals={
            **{f"limit_{rows}": Goal(least=0.7) for rows in (64, 512, 4096)},
            **{f"before_{rows}": Goal(least=5.0) for rows in (512, 4096)},
            "one_row_ms": Goal(most=0.3),
        },
    ),
)


def parts_of_tests(folder: Path = ROOT / "tests" / "gpu") -> list[Part]:
    """Each file of tests twice where it has tests that need the GPU for themselves: with and without those."""
    found = []
    for file in sorted(folder.glob("test_*.py"), key=_turn):
        name = file.stem  # with test_: a benchmark has the name without it
        command = ("-m", "pytest", str(file), "-q", "-rs", "--durations=5")
        found.append(Part(name=name, command=(*command, "-m", "not alone"), tests=True))
        if _ALONE in file.read_text(encoding="utf-8"):
            found.append(
                Part(name=f"{name}, alone", command=(*command, "-m", "alone"), alone=True, tests=True)
            )
    return found


def _turn(file: Path) -> tuple[int, str]:
    return _LONGEST.index(file.stem) if file.stem in _LONGEST else len(_LONGEST), file.stem
