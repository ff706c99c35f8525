"""From a table to a model: init, check, run through Prefect; etl, train, export, search one at a time without it."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.api.progress import showing_progress
from serin.commands.output import Json, show, show_json, show_table, write_file
from serin.errors import SourceMissing, SpecError
from serin.machine import environment

if TYPE_CHECKING:
    from serin.spec.load import WrittenSpec
    from serin.spec.pipeline import PipelineSpec

SpecFile = Annotated[
    Path, typer.Argument(help="The pipeline's YAML file, or the folder of pipeline.yaml.", metavar="SPEC")
]
SearchSpec = Annotated[
    Path, typer.Argument(help="The pipeline's YAML file, with a section `search`.", metavar="SPEC")
]

SentSpec = Annotated[
    str | None,
    typer.Argument(
        help="The pipeline's YAML file, or the folder of pipeline.yaml; or package:DIGEST of an earlier run; none "
        "with --resume.",
        metavar="SPEC",
    ),
]

ApprovedBy = Annotated[
    str | None,
    typer.Option(
        help="Publish although it is worse than the live version or cannot be compared. Your name is recorded."
    ),
]

AsOf = Annotated[
    str | None,
    typer.Option(
        help="Read Delta tables as they were at this time, such as 2026-01-31T12:00:00Z.", metavar="TIME"
    ),
]


_SCHEMA_FILE = "spec.schema.json"
_MODELINE = f"# yaml-language-server: $schema={_SCHEMA_FILE}\n"
"""The first line of a spec beside its schema: editors with a YAML language server read it."""


class Stage(StrEnum):
    ETL = "etl"
    TRAIN = "train"
    EXPORT = "export"


def register(app: typer.Typer) -> None:
    for command in (init, check, run, etl, train, export, search, schema):
        app.command()(command)


def init(
    folder: Annotated[
        Path, typer.Argument(help="Where to write pipeline.yaml and, for editors, spec.schema.json.")
    ] = Path(),
    table: Annotated[
        str | None, typer.Option(help="The table to learn from. [default: the one in FOLDER or FOLDER/data]")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help='What to predict: a column, or an expression over columns such as "arr_delay > 15". May be given '
            "several times. [default: guessed]"
        ),
    ] = None,
) -> None:
    """A commented spec from a table: types, target and features guessed and explained. The model is called like FOLDER,
    or like the table in this folder."""
    from serin.draft.guess import draft_table, model_name

    path = folder / "pipeline.yaml"
    if path.exists():
        raise SpecError(
            where=str(path), problems=[("", "is there already; name another folder, or remove it")]
        )
    source = table or str(_only_table(folder))
    beside = source if "://" in source else os.path.relpath(source, folder)
    try:
        name = model_name(str(folder.resolve())) if folder != Path() else None
        draft = draft_table(source, target or None, path_in_spec=beside, name=name)
    except SourceMissing as error:
        problem = f"nothing at {source}; name a file, a folder of files or a URL"
        raise SpecError(where="serin init", problems=[("--table", problem)]) from error
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(_MODELINE + draft.text, encoding="utf-8")
    (folder / _SCHEMA_FILE).write_text(_schema_text(), encoding="utf-8")
    for notice in draft.notices:
        show(f"  {notice}")
    show(f"wrote {path}; read it, change what was guessed wrong, then: serin check {path}")


def check(
    spec: SpecFile,
    data: Annotated[
        bool, typer.Option(help="Compare it with its tables. --no-data needs neither tables nor a store.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Everything that is wrong with a spec, alone and compared with its tables; what clients of the model will send."""
    from serin.pipeline.check import check_alone, check_spec

    if not data:
        alone = check_alone(spec)
        if as_json:
            show_json({"name": alone.name, "digest": alone.digest(), "inputs": None})
        else:
            show(f"{alone.name} is good by itself; its tables were not read")
        return
    checked = check_spec(spec)
    _check_image(checked.spec)
    if not as_json:
        show(str(checked))
        return
    inputs = [{"name": c.name, "kind": c.kind, "dtype": c.dtype, "null": c.null} for c in checked.inputs]
    show_json({"name": checked.spec.name, "digest": checked.spec.digest(), "inputs": inputs})


def run(
    spec: SentSpec = None,
    placed: Annotated[bool, typer.Option("--placed", help="Run each stage on a suitable worker.")] = False,
    fresh: Annotated[list[Stage] | None, typer.Option(help="Run this stage again. Can be repeated.")] = None,
    serve: Annotated[bool, typer.Option(help="Roll the new version out.")] = True,
    resume: Annotated[
        str | None,
        typer.Option(help="Resume this run at, and inside, the stage that failed.", metavar="RUN"),
    ] = None,
    approved_by: ApprovedBy = None,
    follow: Annotated[bool, typer.Option(help="Show progress until the run has ended.")] = True,
    as_of: AsOf = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent, and what would not; start nothing.")
    ] = False,
) -> None:
    """Run the pipeline on the stack, or on the workers of the Prefect server that PREFECT_API_URL names.

    What the run needs is sent to the store by content: the spec, your code with all local modules it imports and, to
    workers on other machines, the small files that the spec names. With --follow (the default), exit code 0 means that
    it completed.
    """
    from serin.prefect.flow_run import resume_run, run_pipeline

    if resume is not None:
        if spec is not None or placed or fresh or approved_by is not None:
            problem = "resumes a run with its own parameters; use it alone"
            raise SpecError(where="serin run", problems=[("--resume", problem)])
        resume_run(environment.home(), resume, follow=follow)
        return
    if spec is None:
        raise SpecError(
            where="serin run", problems=[("SPEC", "name the pipeline's file, or a run: --resume RUN")]
        )
    written = _written(spec, as_of)  # a bad spec is reported here, not in a worker's log
    if dry_run:
        _show_package(written)
        return
    run_pipeline(
        environment.home(),
        written,
        placed=placed,
        fresh=[stage.value for stage in fresh or []],
        serve=serve,
        approved_by=approved_by,
        follow=follow,
    )


def etl(
    spec: SpecFile,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Build it again from the tables, even if it exists.")
    ] = False,
    as_of: AsOf = None,
    as_json: Json = False,
) -> None:
    """Build a dataset from raw tables. An existing one from the same tables is reused."""
    from serin.pipeline.run_stage import run_etl

    loaded = _load(spec, as_of)
    with showing_progress(f"dataset of {loaded.name}"):
        dataset = run_etl(loaded, fresh=fresh).value
    if as_json:
        show_json({"path": dataset.path, "digest": dataset.digest, "rows": dataset.rows})
        return
    rows = ", ".join(f"{split} {count:,}" for split, count in dataset.rows.items())
    show(f"dataset {dataset.digest[:12]} ({rows}) in {dataset.path}")


def train(
    spec: SpecFile,
    machines: Annotated[
        str | None,
        typer.Option(
            help="How many machines train together (N, or MIN:MAX); run this command on each. "
            "[default: SERIN_MACHINES, or 1]",
            metavar="N",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="The rendezvous of the machines: host:port of one of them. [default: SERIN_RENDEZVOUS, or the store]"
        ),
    ] = None,
    as_of: AsOf = None,
    as_json: Json = False,
) -> None:
    """Train weights on a dataset. Resumes an interrupted training; exit code 75 means: run it again."""
    from serin.pipeline.run_stage import run_train
    from serin.training.launch.machines import machines_told

    loaded = _load(spec, as_of)
    together = machines_told(count=machines, rendezvous=rendezvous)
    with showing_progress(f"training of {loaded.name}"):
        checkpoint = run_train(loaded, machines=together).value
    if as_json:
        show_json({"path": checkpoint.path, "step": checkpoint.step, "metrics": checkpoint.metrics})
        return
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(checkpoint.metrics.items()))
    show(f"trained, best at step {checkpoint.step:,} ({metrics}) in {checkpoint.path}")


def export(
    spec: SpecFile,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Publish another version even if one exists.")
    ] = False,
    approved_by: ApprovedBy = None,
    as_of: AsOf = None,
    as_json: Json = False,
) -> None:
    """Export trained weights to a validated model version that is not worse than the live one, and publish it.

    An existing version from the same weights and the same spec is reused.
    """
    from serin.pipeline.run_stage import run_export

    loaded = _load(spec, as_of)
    with showing_progress(f"export of {loaded.name}"):
        bundle = run_export(loaded, fresh=fresh, approved_by=approved_by).value
    if as_json:
        show_json(
            {"model": bundle.model, "version": bundle.version, "path": bundle.path, "metrics": bundle.metrics}
        )
        return
    show(f"{bundle.model} version {bundle.version} in {bundle.path}")
    show(f"next: serin rollout start {bundle.model}:{bundle.version}")


def search(
    spec: SearchSpec,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the chosen spec. [default: SPEC with -chosen]")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="The total number of trials. [default: the spec's search.trials]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try the settings that `search.space` allows and write the spec with the best ones. Resumes an interrupted
    search."""
    from serin.pipeline.etl import build_dataset
    from serin.pipeline.search import search_settings
    from serin.spec.load import load_search_spec, spec_file
    from serin.training.search.search import write_chosen

    loaded = load_search_spec(spec)
    assert loaded.search is not None
    if trials is not None:
        loaded = loaded.model_copy(update={"search": loaded.search.model_copy(update={"trials": trials})})
    datasets = [
        build_dataset(data, loaded.features, loaded.etl, name=loaded.name, priority=loaded.priority).value
        for data in loaded.fold_data()
    ]
    found = search_settings(loaded, datasets)
    spec = spec_file(spec)
    target = out or spec.with_name(f"{spec.stem}-chosen{spec.suffix}")
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(found.metrics.items()))
    remark = (
        f"The best of {found.complete + found.pruned + found.failed} trials, by the valid rows: {metrics}"
    )
    write_chosen(spec, found.settings, target, remark=remark)
    if as_json:
        show_json(
            {
                "spec": str(target),
                "folder": found.folder,
                "settings": found.settings,
                "metrics": found.metrics,
            }
        )
        return
    show(f"{remark} ({found.pruned} stopped early, {found.failed} failed)")
    for path, value in found.settings.items():
        show(f"  {path:<32} {value}")
    show(f"importance of settings: {found.folder}/importance.svg, every trial: {found.folder}/trials.csv")
    show(f"next: serin train {target}")


def schema(
    out: Annotated[Path | None, typer.Option(help="Write to this file. [default: standard output]")] = None,
) -> None:
    """The JSON schema of the spec: every key with its type, default and description, for YAML editors."""
    if out is None:
        show(_schema_text().rstrip("\n"))
        return
    write_file(out, _schema_text())
    show(f"wrote {out}")


def _schema_text() -> str:
    """The JSON schema as it is written to a file."""
    from serin.spec.json_schema import editor_schema

    return json.dumps(editor_schema(), indent=1, ensure_ascii=False) + "\n"


def _check_image(spec: PipelineSpec) -> None:
    """SpecError when the workers that a run would have here refuse the spec's image."""
    if spec.environment is None or spec.environment.image is None:
        return
    from serin.prefect.flow_run import refuse_image
    from serin.prefect.login import find_server

    if (server := find_server(environment.home())) is not None:
        refuse_image(server, spec.environment, where=spec.name)


def _load(path: Path, as_of: str | None = None) -> PipelineSpec:
    from serin.spec.load import read_spec

    return read_spec(path).as_of(as_of).resolved()


def _written(spec: str, as_of: str | None) -> str | WrittenSpec:
    """A reference to a package stays one."""
    from serin.spec.load import read_spec
    from serin.store.packages import REFERENCE

    if not spec.startswith(REFERENCE):
        return read_spec(spec).as_of(as_of)
    if as_of is not None:
        raise SpecError(
            where=spec, problems=[("--as-of", "a package has its tables' versions; leave it out")]
        )
    return spec


def _show_package(spec: str | WrittenSpec) -> None:
    from serin.prefect.flow_run import pack_for
    from serin.prefect.login import find_server

    if isinstance(spec, str):
        show(f"{spec} is in the store; nothing is sent")
        return
    package = pack_for(find_server(environment.home()), spec)
    show_table(
        ("sent", "bytes", "sha256"),
        [(name, file.size, file.sha256[:12]) for name, file in package.manifest.files.items()],
        empty="nothing",
    )
    for path, why in package.stays:
        show(f"not sent: {path} ({why})")
    show(f"{package.reference} ({package.manifest.size:,} bytes)")


def _only_table(folder: Path) -> Path:
    from serin.etl.sources.files import format_of

    places = [folder, folder / "data"]
    found = sorted(
        path
        for place in places
        if place.is_dir()
        for path in place.iterdir()
        if format_of(path.name) and not path.name.endswith(".schema.json")
    )
    if len(found) == 1:
        return found[0]
    what = (
        f"holds {len(found)} tables ({', '.join(path.name for path in found)})" if found else "holds no table"
    )
    raise SpecError(where=str(folder), problems=[("", f"{what}; name one with --table")])
