"""Prefect's task for the export, and the page about the checks of a new version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.formats.reason import Reason
from serin.pipeline import export as use_case
from serin.pipeline.stage import StageResult
from serin.reports.charts import Bar, bars
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from serin.store.receipt import Receipt
from tasks.in_thread import in_thread
from tasks.markdown import drawing, receipt_table, table
from tasks.retry import error_is_retryable


@task(
    task_run_name="export_model {spec.name}",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def export_model(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    *,
    fresh: bool = False,
    attempt: str | None = None,
    approved_by: str | None = None,
    reason: dict[str, Any] | None = None,
) -> Bundle:
    """Exports a version of the model; finds the one from the same weights, unless `fresh`.

    A fresh export finds the one that the same `attempt` (this run, when none is named) has made. `approved_by`: the
    person who approves it although it is worse than the live version. `reason`: why it was trained again, as JSON.
    """
    run = str(flow_run.id)
    done: StageResult[Bundle] = await in_thread(
        use_case.export_model,
        spec,
        checkpoint,
        dataset,
        approved_by=approved_by,
        reason=None if reason is None else Reason.from_json(reason),
        fresh=fresh,
        attempt=attempt or run,
        run=run,
    )
    bundle = done.value
    if done.ran:
        await acreate_markdown_artifact(
            key=f"{spec.name}-gate",
            markdown=_page(bundle, done.receipt),
            description=f"Checks of version {bundle.version} of {spec.name} before it was published",
        )
    return bundle


def _variants(gate: dict[str, Any]) -> str:
    rows = [
        (one["name"], one["status"], one["bytes"], one["mix_us"], one["drop"], one["reason"])
        for one in gate["variants"]
    ]
    head = ("variant", "", "bytes", "us at the batch mix", "drop", "reason")
    timed = [
        Bar(label=one["name"], value=one["mix_us"], text=f"{one['mix_us']:.0f} us")
        for one in gate["variants"]
        if one["mix_us"]
    ]
    speeds = drawing(bars(timed).standalone(), "Time at the batch mix") if timed else ""
    return f"## Variants\n\n{table(head, [['' if cell is None else cell for cell in row] for row in rows])}\n{speeds}"


def _champion(bundle: Bundle) -> str:
    report = json.loads((Path(bundle.path) / "champion.json").read_text(encoding="utf-8"))
    by = f", approved by {report['approved_by']}" if report["approved_by"] else ""
    return f"## Against the live model\n\n{report['verdict']}{by}: {report['reason']}\n"


def _page(bundle: Bundle, receipt: Receipt | None) -> str:
    gate: dict[str, Any] = json.loads((Path(bundle.path) / "gate.json").read_text(encoding="utf-8"))
    batches = ", ".join(str(size) for size in gate["batch_rows"])
    rounded = [
        ("logarithms and sines equal the ETL's within 1 ulp", gate["golden_rows"], column)
        for column in gate["rounded_columns"]
    ]
    proofs = table(
        ("proof", "rows", "found"),
        [
            (
                "features equal the ETL's, bit for bit",
                gate["golden_rows"],
                f"{gate['feature_columns']} columns",
            ),
            *rounded,
            (
                f"scores equal {gate['made_by']}'s within {gate['tolerance']:g} (batches of {batches})",
                gate["golden_rows"],
                f"largest difference {gate['largest_score_difference']:.2g}",
            ),
        ],
    )
    metrics = table(
        ("metric on the test split", gate["made_by"], "ONNX"),
        [(name, value, gate["test_onnx"].get(name, "")) for name, value in gate["test_trained"].items()],
    )
    parts = [
        f"# {bundle.model} version {bundle.version}\n\nIn `{bundle.path}`.\n",
        proofs,
        metrics,
        _variants(gate),
        _champion(bundle),
        f"## Cost\n\n{receipt_table(receipt.to_json())}" if receipt else "",
    ]
    return "\n".join(part for part in parts if part)
