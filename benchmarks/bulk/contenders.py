"""Contenders of the bulk benchmark: the same rows scored by the same version.

Serin from files to files, the same as a first run of `serin score`, a loop over the files with pandas, and as the limit
ONNX Runtime in one process on rows that are already in memory, without reading and writing. Each answers with the sum
of its scores.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.clock import Watch
from serin.formats.wire import to_wire
from serin.pipeline.score import score_new
from serin.scoring.bulk import find_pieces, score_into_folder
from serin.scoring.predict import Scorer

_kept: dict[str, Any] = {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    out = Path(request["scratch"]) / f"{request['who']}-{os.getpid()}"
    shutil.rmtree(out, ignore_errors=True)
    watch = Watch()
    if request["who"] == "limit":
        scorer, inputs = _kept["limit"]
        scores = scorer.wire_answers(inputs)["score"][:, 0]
        spent = watch.read()
    else:
        {"ours": _ours, "scheduled": _scheduled, "pandas": _pandas}[request["who"]](request, out)
        spent = watch.read()
        scores = pq.read_table(out, columns=["score"]).column("score").to_numpy()
    return {**spent, "rows": len(scores), "sum": float(np.sum(scores, dtype=np.float64))}


def _ours(request: dict[str, Any], out: Path) -> None:
    score_into_folder(
        Path(request["bundle"]),
        find_pieces(request["rows"]),
        out,
        workers=request["threads"],
        place=request["place"],
    )


def _scheduled(request: dict[str, Any], out: Path) -> None:
    score_new(
        ":".join(Path(request["bundle"]).parts[-3::2]),
        request["rows"],
        str(out),
        device="gpu" if request["place"] == "cuda" else "cpu",
        workers=request["threads"],
    )


def _pandas(request: dict[str, Any], out: Path) -> None:
    """One file after the other: read, score, write."""
    import pandas as pd

    scorer: Scorer = _kept["pandas"]
    out.mkdir()
    for path in sorted(Path(request["rows"]).iterdir()):
        frame = pd.read_parquet(path)
        frame["score"] = scorer.answers(pa.Table.from_pandas(frame))["score"][:, 0]
        frame.to_parquet(out / path.name)


def prepare(request: dict[str, Any]) -> None:
    if request["who"] in ("ours", "scheduled"):
        os.environ["SERIN_STORE"] = f"{request['scratch']}/store"
        os.environ["SERIN_HOME"] = f"{request['scratch']}/home"
        return
    scorer = Scorer(request["bundle"], threads=request["threads"], place=request["place"])
    if request["who"] == "pandas":
        _kept["pandas"] = scorer
    else:
        _kept["limit"] = scorer, to_wire(pq.read_table(request["rows"]), scorer.schema)
