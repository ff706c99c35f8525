"""Model versions: list, show, diff, import, delete; and what may go: gc. Who holds which GPU: gpus."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serin.commands import signing
from serin.commands.output import Json, confirm, human_bytes, say, show, show_json, show_problems, show_table
from serin.commands.predict import predict
from serin.errors import NotFound, SerinError, SpecError
from serin.machine import environment

if TYPE_CHECKING:
    from serin.formats.importance import Importance
    from serin.formats.schema import InputColumn
    from serin.store.artifacts import Bundle
    from serin.store.store import Store

Model = Annotated[str, typer.Argument(help="The model's name.")]
_SHOWN_COLUMNS = 10
Version = Annotated[str, typer.Argument(help="A number, or live, candidate, previous.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Published model versions.", no_args_is_help=True)
    group.command("list")(list_models)
    group.command("show")(show_model)
    group.command("diff")(diff_models)
    group.command("verify")(signing.verify_model)
    group.command("sign")(signing.sign_model)
    group.command("import")(import_model)
    group.command("delete")(delete_model)
    app.add_typer(group, name="models")
    for command in (predict, gpus, gc):
        app.command()(command)


def list_models(as_json: Json = False) -> None:
    """List every version with its aliases and metrics."""
    from serin.machine.contained import contained
    from serin.stack.host.state import running_here
    from serin.store.store import Store

    store, failed = Store.open(), dict[str, str]()
    if store.local and environment.prefect_api_url() and not running_here(environment.home()):
        say(
            f"PREFECT_API_URL is set and SERIN_STORE names no shared store: these are the versions in {store.url}"
        )
    found = []
    for model in store.models():
        aliases: dict[str, int] = {}
        with contained(failed, model):
            aliases = store.aliases(model)
        for number in store.versions(model):
            names = ", ".join(name for name, version in aliases.items() if version == number)
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


def show_model(model: Model, version: Version = "", as_json: Json = False) -> None:
    """Show one version: its origin, request columns and metrics. [default: the newest]"""
    from serin.commands.version_costs import cost_lines, costs_json
    from serin.formats.answers import answer_meaning
    from serin.formats.bundle import read_manifest
    from serin.formats.importance import read_importance
    from serin.formats.reason import read_reason
    from serin.formats.schema import read_schema
    from serin.store.store import Store

    bundle = find_bundle(Store.open(), model, version)
    folder = Path(bundle.path)
    manifest, schema, importance = read_manifest(folder), read_schema(folder), read_importance(folder)
    if as_json:
        show_json(
            {
                "manifest": dataclasses.asdict(manifest),
                "schema": dataclasses.asdict(schema),
                "importance": None if importance is None else dataclasses.asdict(importance),
                "path": bundle.path,
                "costs": costs_json(bundle, manifest.lineage),
            }
        )
        return
    show(f"{bundle.model} version {bundle.version}")
    show(f"  at       {bundle.path} (card.md, gate.json, ...)")
    show(f"  metrics  {_metrics(manifest.metrics)}")
    reason = read_reason(manifest.lineage)
    for name, value in manifest.lineage.items():
        if name == "reason" and reason is not None:
            show(f"  {name:<8} {reason}")
            continue
        for line in value if name == "sources" else [value]:
            show(f"  {name:<8} {_lineage(line)}")
    show("  clients send")
    for column in schema.inputs:
        show(f"    {column.name:<20} {column.kind:<10} {column.dtype:<6} {_form(column)}")
    show("  answers with")
    for output in schema.outputs:
        meaning = answer_meaning(output.name, schema, folder)
        show(f"    {output.name:<20} {output.dtype} {list(output.dims)}{meaning and f'  {meaning}'}")
    if importance is not None:
        _show_importance(importance)
    for line in cost_lines(bundle, manifest.lineage):
        show(line)


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


def diff_models(
    model: Model,
    left: Annotated[str, typer.Argument(help="A number or an alias.")],
    right: Annotated[str, typer.Argument(help="Another.")],
    as_json: Json = False,
) -> None:
    """Show how two versions differ: columns, spec, metrics, origin, files."""
    from serin.formats.bundle_diff import diff_bundles
    from serin.store.store import Store

    store = Store.open()
    first, second = (store.bundle(model, version) for version in (left, right))
    found = diff_bundles(Path(first.path), Path(second.path))
    if as_json:
        show_json([difference._asdict() for difference in found])
        return
    columns = ("part", "what", f"version {first.version}", f"version {second.version}")
    show_table(columns, [tuple(difference) for difference in found], empty="the two versions are identical")


def import_model(
    folder: Annotated[
        Path, typer.Argument(help="A version's folder from another store, or a Triton repository.")
    ],
    name: Annotated[
        str | None, typer.Option(help="The model's name here. [default: the version's own]")
    ] = None,
    entry: Annotated[str | None, typer.Option(help="For a repository: the model that clients call.")] = None,
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Also import a repository's own model.py.")
    ] = False,
) -> None:
    """Import a version, or a team's own Triton repository, under the next version number."""
    from serin.export.take_over import import_bundle
    from serin.export.take_repository import import_repository, is_repository
    from serin.store.store import Store

    if is_repository(folder):
        if name is None:
            raise SpecError(
                where=str(folder), problems=[("", "is a Triton repository; name the model with --name")]
            )
        bundle = import_repository(folder, Store.open(), name=name, entry=entry, with_code=with_code)
    else:
        bundle = import_bundle(folder, Store.open(), name=name)
    show(f"{bundle.model} version {bundle.version} in {bundle.path}")


def delete_model(
    name: Annotated[str, typer.Argument(metavar="MODEL[:VERSION]", help="A model, or one of its versions.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete versions and their recorded requests for good: one, or all of a model. Refused while one is served or
    rolled out."""
    from serin.stack.captures import delete_records
    from serin.stack.delete_versions import delete_versions, versions_to_delete
    from serin.stack.shared_captures import delete_shared_records
    from serin.store.store import Store

    store, home = Store.open(), environment.home()
    model, _, version = name.partition(":")
    going = versions_to_delete(store, home, model, version or None)
    what = f"version {going[0]}" if len(going) == 1 else f"all {len(going)} versions"
    confirm(f"Delete {what} of {model} from {store.url}, and the requests recorded of it?", yes=yes)
    going = delete_versions(store, home, model, version or None)
    whole = not store.versions(model)
    size = delete_records(home, model, going, whole=whole) + delete_shared_records(
        home, model, going, whole=whole
    )
    for number in going:
        show(f"{model} version {number} is deleted")
    if size:
        show(f"{human_bytes(size)} of recorded requests are deleted")


def gpus(as_json: Json = False) -> None:
    """List the GPUs: who holds them since when, which releases they serve, and who waits for them.

    Those of this machine, and of all hosts that report to the store that SERIN_STORE names.
    """
    from serin.machine.leases import waiters
    from serin.stack.gpu_use import read_gpu_use
    from serin.stack.hosts import read_hosts_if_reachable

    home, own = environment.home(), environment.host()
    found, waiting = read_gpu_use(home), waiters(home)
    others = [entry for entry in read_hosts_if_reachable() if entry.host != own]
    if as_json:
        devices = {
            "devices": [use.to_json() for use in found],
            "waiting": [dataclasses.asdict(waiter) for waiter in waiting],
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
        show(f"{place}. {waiter}")
    for entry in others:
        show(f"{entry}")
        for gpu in entry.gpus:
            held = [
                *(f"{holder['purpose']}" for holder in gpu["holders"]),
                *(r["release"] for r in gpu["releases"]),
            ]
            show(
                f"  {gpu['id']}  {gpu['name']}  {human_bytes(gpu['memory_bytes'])}  {'; '.join(held) or 'free'}"
            )


def gc(
    keep_versions: Annotated[int, typer.Option(min=1, help="The newest versions of each model to keep.")] = 5,
    keep_days: Annotated[float, typer.Option(min=0, help="Keep datasets and runs younger than this.")] = 7.0,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove it; without this it is only listed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List old versions, unused datasets, old runs, expired records and leftovers of crashes; remove them with
    --remove."""
    from serin.stack.captures import expired_records
    from serin.stack.shared_captures import expired_shared_records
    from serin.store.remote_retention import collect_remote_garbage
    from serin.store.retention import Policy, collect_garbage
    from serin.store.store import Store

    store = Store.open()
    if not store.local and not store.url.startswith("s3://"):
        problem = "this object store has its own retention (lifecycle rules); use those"
        raise SpecError(where=store.url, problems=[("", problem)])
    policy = Policy(keep_versions=keep_versions, keep_days=keep_days)
    home = environment.home()
    collect = collect_garbage if store.local else collect_remote_garbage
    found = collect(store, home, policy, remove=remove)
    found += expired_records(home, store, remove=remove)
    found += expired_shared_records(home, store, remove=remove)
    if as_json:
        show_json([dataclasses.asdict(entry) for entry in found])
        return
    rows = [(entry.kind, entry.name, human_bytes(entry.bytes)) for entry in found]
    show_table(("kind", "name", "size"), rows, empty="nothing to remove")
    if rows:
        total = human_bytes(sum(entry.bytes for entry in found))
        show(f"{total} removed" if remove else f"{total} can be removed: add --remove")


def find_bundle(store: Store, model: str, version: str) -> Bundle:
    """A version by MODEL VERSION or MODEL:VERSION; the newest when none is named."""
    if ":" in model and not version:
        model, _, version = model.partition(":")
    if version:
        return store.bundle(model, version)
    versions = store.versions(model)
    if not versions:
        raise NotFound(kind="model", name=model, known=store.models())
    return store.bundle(model, versions[-1])


def _lineage(value: object) -> str:
    """Returns a source as table, path, size and time; anything else unchanged."""
    return " ".join(str(part) for part in value.values()) if isinstance(value, dict) else str(value)


def _metrics(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items())) or "-"
