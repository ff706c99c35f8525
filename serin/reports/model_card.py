"""Renders card.md, the model card of a version: inputs, features, metrics, checks and lineage as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serin.features.plan import FeaturePlan
from serin.formats.champion import ChampionReport
from serin.formats.dataset import DatasetDescription
from serin.formats.gate import GateReport, GroupReport, Measured
from serin.formats.importance import Importance
from serin.formats.reason import read_reason
from serin.formats.schema import Schema
from serin.spec.model import ModelSpec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Release

_SHOWN_COLUMNS = 30
_ANSWER = {
    "binary": "`score`: the probability that the target is true, between 0 and 1.",
    "regression": "`score`: the predicted value, in the target's own unit.",
    "multiclass": "`label`: the index of the most likely class; `probabilities`: one per class, in this order: ",
}


def model_card(
    spec: PipelineSpec,
    release: Release,
    dataset: DatasetDescription,
    plan: FeaturePlan,
    schema: Schema,
    report: GateReport,
    champion: ChampionReport,
    *,
    metrics: Mapping[str, float],
    lineage: Mapping[str, Any],
    importance: Importance | None = None,
) -> str:
    """Returns the text of card.md."""
    sections = [
        f"# {release.model}, version {release.version}",
        *_why(lineage),
        _what(spec, dataset, schema),
        _inputs(dataset, schema),
        _features(plan),
        _metrics(metrics),
        *([] if importance is None else [_importance(importance)]),
        _gate(report, schema),
        *([] if report.groups is None else [groups_table(report.groups)]),
        variants_table(report),
        _champion(champion),
        _lineage(spec, dataset, lineage),
    ]
    return "\n\n".join(sections) + "\n"


def own_inputs_card(
    spec: PipelineSpec,
    release: Release,
    schema: Schema,
    report: GateReport,
    champion: ChampionReport,
    *,
    metrics: Mapping[str, float],
    lineage: Mapping[str, Any],
    known_answers: bool,
) -> str:
    """Returns the card of a model whose inputs are not columns of a dataset.

    `known_answers`: it came with its own answers to the golden rows.
    """
    inputs = [(_code(each.name), each.dtype, str(list(each.dims))) for each in schema.inputs]
    outputs = [(_code(each.name), each.dtype, str(list(each.dims))) for each in schema.outputs]
    classes = f"\n\nClasses, in order: {_words(schema.classes)}." if schema.classes else ""
    compared = "the answers that came with the model" if known_answers else "its answers to all rows at once"
    checked = (
        f"{report.golden_rows} golden rows at batch sizes {', '.join(map(str, report.batch_rows))}: within "
        f"{report.largest_score_difference:.2g} of {compared} (allowed {report.tolerance:g})"
    )
    sections = [
        f"# {release.model}, version {release.version}",
        *_why(lineage),
        f"A {schema.task} model with its own inputs (model.{spec.model.kind}).",
        "## Request tensors\n\n" + _table(("tensor", "type", "shape"), inputs),
        "## Answers\n\n" + _table(("tensor", "type", "shape"), outputs) + classes,
        _metrics(metrics) if metrics else "## Metrics\n\nNone were reported.",
        f"## Checks before publication\n\n- {checked}",
        _champion(champion),
    ]
    return "\n\n".join(sections) + "\n"


def _why(lineage: Mapping[str, Any]) -> list[str]:
    """Why it was trained again, if that happened by itself."""
    reason = read_reason(lineage)
    return [] if reason is None else [f"Trained again because of {reason.kind}: {_escape(reason.text)}."]


def _what(spec: PipelineSpec, dataset: DatasetDescription, schema: Schema) -> str:
    network = _kind(spec.model)
    answer = _ANSWER[schema.task]
    if schema.targets:
        answer = f"{answer[:-1]}; one column for each target, in this order: {_words(schema.targets)}."
    if schema.classes is not None:
        answer += ", ".join(map(_code, schema.classes)) + "."
    split = (
        f"by time ({_code(spec.data.time)}: the newest rows are the test)"
        if spec.data.time
        else "at random by row"
    )
    rows = ", ".join(f"{name} {count:,}" for name, count in dataset.rows.items())
    return (
        f"Predicts {_code(dataset.target)} ({schema.task}) with {network}.\n"
        f"{answer}\n\n"
        f"Trained on {_words(spec.data.tables)}; rows: {rows}; split {split}.{_dropped(dataset)}"
    )


def _kind(model: ModelSpec) -> str:
    match model.kind:
        case "mlp" | "dcn":
            return f"a network ({model.kind}, hidden layers {', '.join(map(str, model.hidden))})"
        case "tabm":
            return f"a network (tabm, {model.members} members, hidden layers {', '.join(map(str, model.hidden))})"
        case "auto":
            return "the best of several kinds (model.kind: auto)"
        case "xgboost":
            return f"XGBoost trees (at most {model.rounds:,} rounds)"
        case "module":
            return f"a network ({_code(model.module)})"
        case "script":
            return f"a model trained by {_code(Path(model.script or '').name)}"
        case "onnx":
            return f"an imported model ({_code(Path(model.onnx or '').name)})"
        case "server":
            return "a server that runs elsewhere"
        case "ft_transformer":
            return f"a network (ft_transformer, {model.blocks} blocks)"


def _dropped(dataset: DatasetDescription) -> str:
    reasons = [
        f"{count:,} ({reason.replace('_', ' ')})" for reason, count in dataset.dropped.items() if count
    ]
    return f" Rows excluded: {', '.join(reasons)}." if reasons else ""


def _inputs(dataset: DatasetDescription, schema: Schema) -> str:
    rows = [(_code(c.name), c.kind, c.dtype, _code(c.null)) for c in schema.inputs]
    text = "## Request columns\n\n" + _table(("column", "kind", "type in a request", "if missing"), rows)
    lookups = [f"{_words(table.columns)} by {_code(table.key)}" for table in dataset.lookups]
    return text + (f"\n\nLooked up inside the model: {'; '.join(lookups)}." if lookups else "")


def _features(plan: FeaturePlan) -> str:
    lines = "\n".join(f"- {_escape(line)}" for line in plan.describe())
    return f"## Features\n\n{len(plan.numeric)} numeric and {len(plan.categorical)} categorical columns:\n\n{lines}"


def _metrics(metrics: Mapping[str, float]) -> str:
    rows = [(name, f"{value:.6g}") for name, value in sorted(metrics.items())]
    return "## Metrics\n\n" + _table(("metric", "value"), rows)


def _importance(importance: Importance) -> str:
    rows = [
        (
            _code(each.column),
            _escape(each.source),
            f"{each.loss:+.5f}",
            f"{each.low:+.5f} to {each.high:+.5f}",
        )
        for each in importance.columns[:_SHOWN_COLUMNS]
    ]
    left = len(importance.columns) - len(rows)
    more = f" {left} more columns are in importance.json." if left else ""
    return (
        "## Importance of columns\n\n"
        + _table(("column", "from", "loss", "smallest to largest"), rows)
        + "\n\n"
        f"The loss of {importance.metric} ({importance.value:.5f}) when a column is shuffled among {importance.rows:,} "
        f"test rows: the mean and the range of {importance.repeats} repeats.{more}"
    )


def _gate(report: GateReport, schema: Schema) -> str:
    sizes = ", ".join(map(str, report.batch_rows))
    measured = ", ".join(
        f"{name} {value:.6g} ({report.made_by} {report.test_trained[name]:.6g})"
        for name, value in report.test_onnx.items()
    )
    names = _words([output.name for output in schema.outputs])
    rounded = (
        f"- {_words(report.rounded_columns)} equal them within 1 ulp\n" if report.rounded_columns else ""
    )
    return (
        "## Checks before publication\n\n"
        f"- {report.feature_columns} feature columns are bit-identical to training on {report.golden_rows} golden "
        f"rows, at batch sizes {sizes}\n{rounded}"
        f"- {names} within {report.largest_score_difference:.2g} of {report.made_by} (allowed {report.tolerance:g})\n"
        f"- on {report.test_rows:,} test rows the exported network has {measured}"
    )


def groups_table(report: GroupReport) -> str:
    """The metric and the selection rate of every group, and which groups are too small to be judged."""
    rows = [
        (_escape(one.group), f"{one.rows:,}", *map(_banded, (one.metric, one.gap, one.rate, one.rate_gap)))
        for one in report.groups
    ]
    head = ("group", "rows", report.metric, "worse than other rows by", "selection rate", "difference")
    limits = {"gap": report.max_gap, "difference": report.max_rate_gap}
    allowed = ", ".join(f"{name} at most {limit:g}" for name, limit in limits.items() if limit is not None)
    small = ", ".join(f"{_escape(name)} ({rows})" for name, rows in [*report.small.items()][:_SHOWN_COLUMNS])
    text = (
        f"By {_words(report.columns)} on {report.rows:,} test rows, with bands at {report.confidence:g}; limits: "
        f"{allowed or 'none'}."
    )
    if report.threshold is not None:
        text += f" A row is selected from a score of {report.threshold:g}."
    if small:
        text += f" Not judged, with fewer than {report.min_rows} rows: {small}."
    return "## Groups\n\n" + text + ("\n\n" + _table(head, rows) if rows else "")


def _banded(found: Measured | None) -> str:
    return "-" if found is None else f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def variants_table(report: GateReport) -> str:
    """Every requested variant: its size, speed and quality, and why it is served or not."""
    rows = []
    for one in report.variants:
        worst = next(iter(one.segments.items()), None)
        rows.append(
            (
                one.name,
                f"**{one.status}**" if one.status == "chosen" else one.status,
                _number(one.bytes, "{:,.0f}"),
                " / ".join(f"{one.latency_us[size]:,.0f}" for size in sorted(one.latency_us)) or "-",
                _number(one.mix_us, "{:,.0f}"),
                _number(one.drop, "{:+.5f}"),
                "-" if worst is None else f"{_escape(worst[0])} {worst[1]:+.5f}",
                _escape(one.reason) or "-",
            )
        )
    sizes = sorted({size for one in report.variants for size in one.latency_us})
    times = f"us at {' / '.join(map(str, sizes))} rows" if sizes else "us"
    head = (
        "variant",
        "",
        "bytes",
        times,
        "us at the mix",
        "drop",
        "worst segment",
        "reason",
    )
    threads = ", ".join(f"{count}: {micros:,.0f} us" for count, micros in report.runtime.mix_us.items())
    return (
        "## Variants\n\n" + _table(head, rows) + "\n\nTimes are for one thread on the exporting machine. "
        f"Served with {report.runtime.threads} thread(s) of ONNX Runtime ({threads}); target: {report.target}."
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _champion(champion: ChampionReport) -> str:
    text = f"## Comparison with the live model\n\n{champion.verdict}: {_escape(champion.reason)}."
    if champion.approved_by is not None:
        text += f" {_code(champion.approved_by)} approved it nevertheless."
    contests = {} if champion.overall is None else {"all rows": champion.overall}
    rows = [
        (_escape(name), f"{c.rows:,}", f"{c.candidate:.5f}", f"{c.live:.5f}", f"{c.loss:+.5f}",
         f"{c.at_least:+.5f} to {c.at_most:+.5f}")
        for name, c in {**contests, **champion.segments}.items()
    ]  # fmt: skip
    head = ("", "rows", "candidate", f"version {champion.live_version}", "loss", f"at {champion.confidence}")
    return text + ("\n\n" + _table(head, rows) if rows else "")


def _lineage(spec: PipelineSpec, dataset: DatasetDescription, lineage: Mapping[str, Any]) -> str:
    facts = {"spec": spec.digest(), "dataset": dataset.digest, **lineage}
    sources = facts.pop("sources", [])
    if (reason := read_reason(lineage)) is not None:
        facts["reason"] = str(reason)
    rows = [(_escape(name), _code(value)) for name, value in facts.items()]
    rows += [
        (f"table {_code(one['table'])}", f"{_code(one['path'])}, {one['bytes']:,} bytes") for one in sources
    ]
    return "## Lineage\n\n" + _table(("", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _words(names: Any) -> str:
    return ", ".join(map(_code, names))


def _code(value: object) -> str:
    """Returns a value as inline code. Names come from users' tables and must not break the table they are in."""
    return f"`{_escape(value).replace('`', chr(39))}`"


def _escape(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
