"""The command `serin search`: finds better settings for a spec by trials, without an orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serin.commands.output import Json, show, show_json

SpecFile = Annotated[
    Path, typer.Argument(help="The pipeline's YAML file, with a section `search`.", metavar="SPEC")
]


def register(app: typer.Typer) -> None:
    app.command()(search)


def search(
    spec: SpecFile,
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
        build_dataset(data, loaded.features, loaded.etl, name=loaded.name).value
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
