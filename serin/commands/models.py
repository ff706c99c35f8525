"""Model versions: list, show, diff, import, copy, delete; and what may go: gc. Who holds which GPU: gpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands import signing
from serin.commands.arguments import (
    Commands,
    DurationOption,
    ModelVersion,
    Why,
    Yes,
    add_group,
    open_store,
)
from serin.commands.output import (
    Json,
    confirm,
    say,
    show,
    show_json,
    show_problems,
    show_table,
    when,
)
from serin.errors import SerinError, SpecError
from serin.machine import environment
from serin.machine.hardware import human_bytes
from serin.spec.names import split_version
from serin.store.artifacts import Release

if TYPE_CHECKING:
    from serin.cluster.host_list import HostEntry
    from serin.formats.importance import Importance
    from serin.formats.schema import InputColumn, Schema
    from serin.store.artifacts import Bundle
    from serin.store.receipt import Receipt
    from serin.store.store import Store
    from serin.store.version_cost import VersionCost

_SHOWN_COLUMNS = 10


def register(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_models, "show": show_model, "diff": diff_models, "verify": signing.verify_model,
        "sign": signing.sign_model, "import": import_model, "copy": copy_model, "remove": remove_model,
    }  # fmt: skip
    add_group(app, "models", "Published model versions.", commands)
    for command in (gpus, gc):
        app.command()(command)


def list_models(as_json: Json = False) -> None:
    """List every version with its aliases and metrics."""
    from serin.host.state import running_here
    from serin.machine.contained import contained

    store, failed = open_store(), dict[str, str]()
    if store.local and environment.text("PREFECT_API_URL") and not running_here(environment.home()):
        say(
            f"PREFECT_API_URL is set and SERIN_STORE names no shared store: these are the versions in {store.url}"
        )
    found = []
    for model in store.models():
        aliases: dict[str, Release] = {}
        with contained(failed, model):
            aliases = store.aliased(model)
        for number in store.versions(model):
            names = ", ".join(
                name if release.edition == 1 else f"{name} (edition {release.edition})"
                for name, release in aliases.items()
                if release.version == number
            )
            entry: dict[str, Any] = {"model": model, "version": number}
            try:
                entry = dataclasses.asdict(store.bundle(model, number))
            except (SerinError, OSError) as error:  # one version does not hide the others
                entry["trouble"] = str(error)
            found.append({**entry, "alias": names or None})
    if as_json:
        show_json(found)
        show_problems(failed)
        return
    rows = [
        (each["model"], each["version"], each["alias"], each.get("trouble") or _metrics(each["metrics"]))
        for each in found
    ]
    show_table(
        ("model", "version", "alias", "metrics"), rows, empty="no models yet; `serin run SPEC` publishes one"
    )
    show_problems(failed)


def show_model(name: ModelVersion, as_json: Json = False) -> None:
    """Show one version: its origin, request columns and metrics. [default: the newest]"""
    from serin.formats.answers import answer_meaning
    from serin.formats.bundle import read_manifest
    from serin.formats.importance import read_importance
    from serin.formats.schema import read_schema
    from serin.store.origin import read_origin

    store = open_store()
    bundle = store.find(name)
    folder, stops = Path(bundle.path), read_origin(store, bundle.model, bundle.version)
    manifest, schema, importance = read_manifest(folder), read_schema(folder), read_importance(folder)
    if as_json:
        show_json(
            {
                "manifest": dataclasses.asdict(manifest),
                "schema": dataclasses.asdict(schema),
                "importance": None if importance is None else dataclasses.asdict(importance),
                "path": bundle.path,
                "edition": bundle.edition,
                "editions": store.editions(bundle.model, bundle.version),
                "copied": [dataclasses.asdict(stop) for stop in stops],
                "costs": _cost(bundle, manifest.lineage).to_json(),
            }
        )
        return
    show(f"{bundle.model} version {bundle.release.label}")
    for line in _edition_lines(store, bundle):
        show(line)
    show(f"  at       {bundle.path} (card.md, gate.json, ...)")
    show(f"  metrics  {_metrics(manifest.metrics)}")
    for line in _lineage_lines(manifest.lineage):
        show(line)
    for stop in stops:
        show(f"  copied   from {stop.store} by {stop.by} on {stop.host}, {when(stop.at)}")
    _show_inputs(folder, schema)
    show("  answers with")
    for output in schema.outputs:
        meaning = answer_meaning(output.name, schema, folder)
        show(f"    {output.name:<20} {output.dtype} {list(output.dims)}{meaning and f'  {meaning}'}")
    if importance is not None:
        _show_importance(importance)
    for line in cost_lines(_cost(bundle, manifest.lineage)):
        show(line)


def _show_inputs(folder: Path, schema: Schema) -> None:
    """What clients send, and the columns that the gateway adds to it."""
    from serin.formats.windows import read_windows

    show("  clients send")
    if not schema.inputs:
        show("    not known: its server did not describe its tensors when it was registered")
    plan = read_windows(folder)
    for column in schema.inputs if plan is None else plan.sent(schema.inputs):
        show(f"    {column.name:<20} {column.kind:<10} {column.dtype:<6} {_form(column)}")
    for column in schema.inputs:
        if column.window is not None:
            show(f"    {column.name:<20} added by the gateway: {column.window}")


def _lineage_lines(lineage: Mapping[str, Any]) -> Iterator[str]:
    """What the version was made of. The edition is described elsewhere."""
    from serin.formats.reason import read_reason

    reason = read_reason(lineage)
    for name, value in lineage.items():
        if name == "reason" and reason is not None:
            yield f"  {name:<8} {reason}"
        elif name != "edition":
            for line in value if name == "sources" else [value]:
                # A source is a table, a path, a size and a time.
                yield f"  {name:<8} {' '.join(map(str, line.values())) if isinstance(line, dict) else line}"


def _edition_lines(store: Store, bundle: Bundle) -> Iterator[str]:
    """Which edition of the lookups it has, and when their tables were read."""
    from serin.pipeline.lookups import lookup_ages

    editions, live = store.editions(bundle.model, bundle.version), store.aliased(bundle.model).get("live")
    if len(editions) > 1:
        which = f"; {live.label} is live" if live and live.version == bundle.version else ""
        yield f"  edition  {bundle.edition} of {', '.join(map(str, editions))}{which}"
    for table in lookup_ages(store, bundle.release):
        yield f"  lookup   {table.table}: {table.rows:,} rows, read {when(table.read)}"


def _show_importance(importance: Importance) -> None:
    show(
        f"  loses so much {importance.metric} when a column is shuffled (range of {importance.repeats} repeats)"
    )
    for each in importance.columns[:_SHOWN_COLUMNS]:
        show(f"    {each.column:<20} {each.loss:+.4f}  ({each.low:+.4f} to {each.high:+.4f})")
    if len(importance.columns) > _SHOWN_COLUMNS:
        show(f"    and {len(importance.columns) - _SHOWN_COLUMNS} more, which matter less (card.md)")


def _form(column: InputColumn) -> str:
    also = "".join(f' or "{text}"' for text in column.null_texts)
    return f"null: {column.null}{also}" if column.dims == (1,) else "x".join(map(str, column.dims))


def diff_models(left: ModelVersion, right: ModelVersion, as_json: Json = False) -> None:
    """Show how two versions differ: columns, spec, metrics, origin, files."""
    from serin.formats.bundle_diff import diff_bundles

    store = open_store()
    first, second = store.find(left), store.find(right)
    found = diff_bundles(Path(first.path), Path(second.path))
    if as_json:
        show_json([difference._asdict() for difference in found])
        return
    columns = ("part", "what", *(f"{each.model}:{each.version}" for each in (first, second)))
    show_table(columns, [tuple(difference) for difference in found], empty="the two versions are identical")


def import_model(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A version's folder from another store, a Triton repository, or models:/NAME/VERSION or "
            "models:/NAME@ALIAS of MLflow."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The model's name here. [default: the version's own]")
    ] = None,
    entry: Annotated[str | None, typer.Option(help="For a repository: the model that clients call.")] = None,
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Also import a repository's own model.py.")
    ] = False,
    task: Annotated[
        str | None, typer.Option(help="For ONNX in MLflow: binary, multiclass or regression.")
    ] = None,
    answer: Annotated[
        str, typer.Option(help="For ONNX in MLflow: what it answers, logits or probabilities.")
    ] = "logits",
    golden: Annotated[
        Path | None,
        typer.Option(help="For ONNX in MLflow: rows to check it with. [default: its input example]"),
    ] = None,
) -> None:
    """Import a version, a team's own Triton repository, or an ONNX model that is registered in MLflow, under the next
    version number."""
    from serin.export.take_over import import_bundle, import_repository, is_repository
    from serin.pipeline.import_registered import PREFIX, How, import_registered

    if str(folder).startswith(PREFIX):
        how = How(task=task, answer=answer, golden=golden)
        bundle = import_registered(str(folder), open_store(), how, name=name)
    elif is_repository(folder):
        if name is None:
            raise SpecError(
                where=str(folder), problems=[("", "is a Triton repository; name the model with --name")]
            )
        bundle = import_repository(folder, open_store(), name=name, entry=entry, with_code=with_code)
    else:
        bundle = import_bundle(folder, open_store(), name=name)
    show(f"{bundle.model} version {bundle.version} in {bundle.path}")


def copy_model(
    name: ModelVersion,
    to: Annotated[str, typer.Option("--to", metavar="STORE", help="A folder, or the URL of a bucket.")],
    rollout: Annotated[
        bool, typer.Option("--rollout", help="Start the rollout there, by the plan of the version's spec.")
    ] = False,
    why: Why = "",
) -> None:
    """Copy a version to another store, under the same number. [default: the newest]

    Its lineage and signatures go with it, and every file is compared with its digest. The policy of that store
    (`serin trust policy`) may refuse it. Golden rows are checked on the hosts that serve it, before it gets traffic.
    """
    from serin.pipeline.copy_version import copy_version, find_target_rollouts, start_copied
    from serin.store.store import Store

    source, target = open_store(), Store(to)
    rollouts = find_target_rollouts(target, name) if rollout else None
    done = copy_version(source, target, name)
    what = f"{done.value.model} version {done.value.version}"
    show(f"{what} {f'is copied to {to}' if done.ran else f'is in {to} already'} ({done.value.digest[:12]})")
    if rollouts is None:
        return
    if start_copied(rollouts, done.value, why=why or f"copied from {source.url}") is None:
        show(f"{what} is live there already")
    else:
        show(f"its rollout has begun; follow it with SERIN_STORE={to} serin rollout watch {done.value.model}")


def remove_model(name: ModelVersion, yes: Yes = False) -> None:
    """Remove versions and their recorded requests for good: one, or all of a model. Refused while one is served or
    rolled out."""
    from serin.stack.delete_versions import delete_versions, versions_to_delete
    from serin.watcher.captures import delete_records

    store, home = open_store(), environment.home()
    model, version = split_version(name)
    going = versions_to_delete(store, home, model, version)
    what = f"version {going[0]}" if len(going) == 1 else f"all {len(going)} versions"
    confirm(f"Delete {what} of {model} from {store.url}, and the requests recorded of it?", yes=yes)
    going = delete_versions(store, home, model, version)
    for number in going:
        show(f"{model} version {number} is deleted")
    if size := delete_records(home, model, going, whole=not store.versions(model)):
        show(f"{human_bytes(size)} of recorded requests are deleted")


def gpus(as_json: Json = False) -> None:
    """List the GPUs: who holds them since when, which releases they serve, who waits for them, and who is asked to
    give way.

    Those of this machine, and of all hosts that report to the store that SERIN_STORE names.
    """
    from serin.cluster.host_list import read_hosts_if_reachable
    from serin.host.gpu_use import read_gpu_use
    from serin.machine.leases import asked_to_give_way, waiters

    home, own = environment.home(), environment.host()
    found, waiting, asked = read_gpu_use(home), waiters(home), asked_to_give_way(home)
    gives = {
        each.ticket: [device for device in asked if asked[device].ticket == each.ticket] for each in waiting
    }
    others = [entry for entry in read_hosts_if_reachable() if entry.host != own]
    if as_json:
        devices = {
            "devices": [use.to_json() for use in found],
            "waiting": [
                {**dataclasses.asdict(each), "counts_as": each.counts_as, "asked": gives[each.ticket]}
                for each in waiting
            ],
        }
        hosts = [
            {key: entry.to_json()[key] for key in ("host", "age_s", "silent", "gpus")} for entry in others
        ]
        show_json({**devices, "hosts": hosts} if hosts else devices)
        return
    rows = [
        (
            use.device.id,
            use.device.name,
            human_bytes(use.device.memory_bytes),
            None if use.used_bytes is None else human_bytes(use.used_bytes),
            "; ".join(map(str, (*use.holders, *use.releases))) or "free",
        )
        for use in found
    ]
    columns = ("id", "name", "memory", "used", "held by")
    show_table(columns, rows, empty="no GPUs here; everything runs on the CPU")
    for place, waiter in enumerate(waiting, start=1):
        asks = ", ".join(gives[waiter.ticket])
        show(f"{place}. {waiter}{f'; the holder of {asks} is asked to give way' if asks else ''}")
    for entry in others:
        _show_other_host(entry)


def _show_other_host(entry: HostEntry) -> None:
    show(f"{entry}")
    for gpu in entry.gpus:
        held = [
            *(f"{holder['purpose']}" for holder in gpu["holders"]),
            *(r["release"] for r in gpu["releases"]),
        ]
        show(f"  {gpu['id']}  {gpu['name']}  {human_bytes(gpu['memory_bytes'])}  {'; '.join(held) or 'free'}")


def gc(
    keep_versions: Annotated[int, typer.Option(min=1, help="The newest versions of each model to keep.")] = 5,
    keep: Annotated[
        float, DurationOption("Keep datasets and runs younger than this. [default: 7d]", zero=True)
    ] = 604_800.0,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove it; without this it is only listed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List old versions, unused datasets and environments, old runs, expired records and leftovers of crashes; remove
    them with --remove."""
    from serin.store.remote_retention import collect_remote_garbage
    from serin.store.retention import Policy, collect_garbage
    from serin.watcher.captures import expired_records

    store = open_store()
    policy = Policy(keep_versions=keep_versions, keep_days=keep / 86_400)
    home = environment.home()
    collect = collect_garbage if store.local else collect_remote_garbage
    found = collect(store, home, policy, remove=remove)
    found += expired_records(home, store, remove=remove)
    if as_json:
        show_json([dataclasses.asdict(entry) for entry in found])
        return
    rows = [(entry.kind, entry.name, human_bytes(entry.bytes)) for entry in found]
    show_table(("kind", "name", "size"), rows, empty="nothing to remove")
    if rows:
        total = human_bytes(sum(entry.bytes for entry in found))
        show(f"{total} removed" if remove else f"{total} can be removed: add --remove")


def _metrics(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items())) or "-"


def _cost(bundle: Bundle, lineage: Mapping[str, Any]) -> VersionCost:
    from serin.store.version_cost import read_version_cost

    name = Release(model=bundle.model, version=bundle.version).name
    return read_version_cost(environment.home(), name, lineage)


def cost_lines(made: VersionCost) -> list[str]:
    """One line per stage, and their sum. Nothing when nothing is known."""
    lines = [f"    {stage:<8} {_receipt(receipt)}" for stage, receipt in made.receipts.items()]
    if not lines:
        return []
    unknown = f" (unknown: {', '.join(made.unknown)})" if made.unknown else ""
    numbers = _numbers(seconds=made.seconds, gpu_s=made.gpu_s, joules=made.joules, cost=made.cost)
    return ["  cost", *lines, f"    {'together':<8} {numbers}{unknown}"]


def _receipt(receipt: Receipt) -> str:
    """Time, device, and what was measured of it."""
    shares = [cost.busy_share for cost in receipt.device if cost.busy_share is not None]
    peaks = [cost.peak_bytes for cost in receipt.device if cost.peak_bytes is not None]
    parts = [
        _numbers(seconds=receipt.seconds, joules=receipt.joules, cost=receipt.cost),
        f"on {', '.join(dict.fromkeys(cost.name for cost in receipt.device))}",
        f"busy {sum(shares) / len(shares):.0%}" if shares else "",
        f"{human_bytes(sum(peaks))} at most" if peaks else "",
        "" if receipt.data_wait_share is None else f"waiting for data {receipt.data_wait_share:.0%}",
        "" if receipt.mfu is None else f"MFU {receipt.mfu:.1%}",
    ]
    return ", ".join(part for part in parts if part)


def _numbers(
    *, seconds: float, gpu_s: float = 0.0, joules: float | None = None, cost: float | None = None
) -> str:
    parts = [
        f"{seconds:,.1f} s",
        f"{gpu_s:,.1f} GPU s" if gpu_s else "",
        "" if joules is None else f"{joules:,.0f} J",
        "" if cost is None else f"cost {cost:,.4f}",
    ]
    return ", ".join(part for part in parts if part)
