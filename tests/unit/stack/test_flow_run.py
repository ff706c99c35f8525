from __future__ import annotations

from pathlib import Path

import pytest

from serin.errors import NotUp
from serin.stack.prefect.flow_run import run_pipeline, translate


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("▪      :02.118 d684f4e0e0c1 epoch 1/2 done: loss 0.62", "epoch 1/2 done: loss 0.62"),
        ("▪ 02:07:55.706 d684f4e0e0c1 clip [0.1, 0.9] * x", "clip [0.1, 0.9] * x"),
        ("● 02:07:55.706 d684f4e0e0c1 prefect.flow-run.Running * slim-whippet", "slim-whippet: running"),
        (
            "●         .141 d684f4e0e0c1 prefect.task-run.Failed * train_model flights",
            "train_model flights: failed",
        ),
        ("●      :56.055 d684f4e0e0c1 prefect.worker.submitted-flow-run * serin-cpu", None),
        (
            "└── URL: http://127.0.0.1:4200/runs/flow-run/6a4d",
            "URL: http://127.0.0.1:4200/runs/flow-run/6a4d",
        ),
        ("└── Job Variables: {}", None),
        ("                    RuntimeError: no", "                    RuntimeError: no"),
        ("Something new that Prefect says", "Something new that Prefect says"),
        ("", ""),
    ],
)
def test_what_prefect_says_is_shown_without_what_only_it_needs(line: str, shown: str | None) -> None:
    assert translate(line) == shown


def test_a_run_without_a_stack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotUp, match="serin up"):
        run_pipeline(tmp_path, tmp_path / "spec.yaml", placed=False, fresh=[], serve=True, follow=True)
