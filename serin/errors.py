"""Every error Serin raises on purpose.

SerinError                      what happened, where, what to do next; fields for programs
├── SpecError                   a spec or an argument is wrong; carries every problem found (exit code 2)
├── NameInvalid                 a model, table or run name that cannot be one (exit code 2)
├── DataError                   the tables do not hold what the spec says
│   ├── SourceMissing           a file, glob or URL that matches nothing
│   ├── SourceUnreadable        a file that is there and cannot be read
│   ├── TableEmpty              a table without rows, or none left after joins and drops
│   ├── TableTooLarge           a table to be joined that fits into no memory, and cannot be cut
│   ├── ColumnMissing           a column that is not there; names the nearest
│   ├── ColumnClash             two tables bring the same column name
│   ├── JoinNotManyToOne        a key that matches more than one row
│   ├── TimeUnparsable          a time column that does not parse
│   ├── TargetUnusable          a target with one class, or of the wrong kind for its task
│   ├── CheckFailed             a check of the spec does not hold
│   ├── LeakFound               a column that knows the answer, or one thing on both sides of the split
│   └── RowsUnfit               rows to be scored that do not fit the model's schema (exit code 2)
├── ExtraMissing                a package that only some pipelines need is not installed (exit code 2)
├── EngineFailed                the machines that compute a dataset do not answer or died (retryable)
│   ├── ClusterNotUp            no cluster of GPUs came up in time; the ETL goes on with one GPU
│   └── GpuUnusable             a GPU that cupy cannot use
├── StoreError                  the store cannot do what was asked
│   ├── NotFound                no such dataset, model, version, alias or run
│   ├── StoreNotWritable        full disk, no permission
│   └── BundleBroken            a bundle or dataset that is not what its manifest says
├── LeaseUnavailable            no GPU became free in time (retryable)
├── TrainingError
│   ├── TrainingRefused         a training that cannot start as asked: folder in use, other settings, no such GPU
│   ├── NetworkUnfit            a user's own network that cannot be made, or does not answer as promised
│   ├── ModelUnfit              a script that leaves no usable model, or an ONNX file that is none
│   ├── CodeChanged             a user's code that changed while its training waited for a GPU (retryable)
│   ├── WorkerFailed            a training process died (retryable)
│   ├── NotTrained              an export that was asked for before there are weights
│   ├── Preempted               stopped from outside after saving; run again (exit code 75, retryable)
│   ├── LossNotFinite           the loss became NaN or infinite
│   ├── SearchFailed            a search in which nothing that was tried could be trained
│   ├── SearchStopped           a search that was told to stop; run again (exit code 75, retryable)
│   └── CheckpointBroken        a checkpoint that does not match its digest
├── ExportError
│   ├── ExportFailed            a network or a feature that does not become a graph
│   ├── GateFailed              the exported graph does not answer as the trained model does
│   └── ChampionRefused         the candidate is worse than the live model, or the two cannot be compared
├── ServingError
│   ├── TritonMissing           no Triton to be found on this machine
│   ├── TritonInstallFailed     Triton's own environment could not be made
│   ├── BackendRefused            a way of serving that this server, machine or bundle cannot honour
│   ├── GpuMemoryShort          a release that fits on no GPU now (retryable)
│   ├── ReleaseNotReady         a release that did not come up
│   ├── VerificationFailed      a release that does not answer its golden rows
│   ├── TuningFailed            measured serving settings that cannot be made or read
│   ├── GatewayRejected         Envoy did not take a configuration
│   ├── EnvoyFileUnfit          Envoy settings of a user's own that cannot be added (exit code 2)
│   ├── TlsUnfit                a certificate and key that cannot be used (exit code 2)
│   ├── KeyRefused              an API key that cannot be made or revoked as asked (exit code 2)
│   ├── KeyFileBroken           the file of API keys is lost or cannot be trusted: the gateway is closed
│   └── PredictionFailed        a request that was answered with an error
├── RolloutError
│   ├── RolloutRefused          a command that cannot be honoured now
│   ├── RolloutFailed           a rollout that ended in a rollback
│   ├── RolloutUnfinished       a rollout that outlasted its follower; it goes on by itself
│   ├── ControllerSilent        no controller answered a command (retryable)
│   ├── JournalHeld             another controller decides for this model
│   └── JournalUnknown          a journal of another format or version
├── StageFailed                 a stage that was run elsewhere failed; names the run
├── StageLost                   a stage's run elsewhere crashed or was lost (retryable)
├── StageStopped                a stage ended early, because its run was cancelled
└── StackError
    ├── AlreadyUp               a stack runs in this folder
    ├── NotUp                   no stack runs in this folder
    ├── PortTaken               a port that was asked for is in use
    ├── ProcessFailed           a part of the stack did not come up
    ├── PipelineFailed          a run on the stack's workers did not complete
    ├── RunNotResumable         a run that has completed, or is still under way (exit code 2)
    ├── SupervisorGone          the stack's supervisor does not answer
    ├── SupervisorRefused       the stack's supervisor cannot do what it was asked
    ├── PrefectGone             the Prefect server does not answer
    └── PrefectRefused          the Prefect server answered with an error
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' when something known is close, else what is known, ready to be put behind a message."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    shown = ", ".join(options[:12]) + (", ..." if len(options) > 12 else "")
    return f"; known: {shown}" if options else ""


class SerinError(Exception):
    """The base: a sentence for people, `fields` for programs. Survives pickling with its fields."""

    retryable: ClassVar[bool] = False
    outcome: ClassVar[bool] = False  # a decision, or a refusal in full: runs log it without a traceback
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(kind: type[SerinError], message: str, fields: dict[str, Any]) -> SerinError:
    error = kind.__new__(kind, message)
    SerinError.__init__(error, message, **fields)
    return error


class SpecError(SerinError):
    """All problems at once. Each is a (key, what is wrong and how to mend it) pair."""

    outcome = True
    exit_code = 2

    def __init__(self, *, where: str, problems: Iterable[tuple[str, str]]) -> None:
        found = list(problems)
        lines = [f"{where}: {len(found)} problem{'s' if len(found) != 1 else ''}"]
        lines += [f"  {key}: {text}" if key else f"  {text}" for key, text in found]
        super().__init__("\n".join(lines), where=where, problems=found)


class NameInvalid(SerinError):
    outcome = True
    exit_code = 2

    def __init__(self, *, kind: str, name: str, rule: str) -> None:
        super().__init__(f"{name!r} is no {kind} name: {rule}", kind=kind, name=name)


class DataError(SerinError):
    outcome = True


class SourceMissing(DataError):
    def __init__(self, *, table: str, path: str) -> None:
        super().__init__(
            f"data.tables.{table}: nothing at {path}; put the file there or correct the path in the spec "
            "(paths are relative to the spec's file)",
            table=table,
            path=path,
        )


class SourceUnreadable(DataError):
    def __init__(self, *, table: str, path: str, reason: str) -> None:
        super().__init__(
            f"data.tables.{table}: {path} cannot be read: {reason}", table=table, path=path, reason=reason
        )


class TableEmpty(DataError):
    def __init__(self, *, table: str, why: str) -> None:
        super().__init__(f"table {table!r} has no rows: {why}", table=table, why=why)


class TableTooLarge(DataError):
    """`needed` and `room` in bytes."""

    def __init__(self, *, table: str, needed: int, room: int, advice: str) -> None:
        size = f"about {needed / 1e6:,.0f} MB, and {room / 1e6:,.0f} MB may be used for it"
        message = f"table {table!r} is too large to be joined: it takes {size}; {advice}"
        super().__init__(message, table=table, needed=needed, room=room)


class ColumnMissing(DataError):
    def __init__(self, *, column: str, table: str, used_by: str, known: Iterable[str]) -> None:
        columns = sorted(known)
        super().__init__(
            f"{used_by}: column {column!r} is not in {table!r}{nearest(column, columns)}",
            column=column,
            table=table,
            used_by=used_by,
        )


class ColumnClash(DataError):
    def __init__(self, *, column: str, tables: tuple[str, str]) -> None:
        super().__init__(
            f"column {column!r} comes from both {tables[0]!r} and {tables[1]!r}; rename it in the join: "
            f"columns: {{{column}: {tables[1]}_{column}}}",
            column=column,
            tables=list(tables),
        )


class JoinNotManyToOne(DataError):
    def __init__(self, *, table: str, on: Iterable[str], key: str, matches: int) -> None:
        columns = list(on)
        super().__init__(
            f"join with {table!r} on {columns}: key {key} stands {matches} times in {table!r}; a join must find "
            "at most one row: make the key unique there or add a column to `on`",
            table=table,
            on=columns,
            key=key,
            matches=matches,
        )


class TimeUnparsable(DataError):
    def __init__(self, *, column: str, example: str, path: str, row: int | None = None) -> None:
        place = f" ({path})" if row is None else f" (row {row} of the table, in {path})"
        super().__init__(
            f"data.time: column {column!r} does not parse as a time: {example!r}{place}; store it as a timestamp "
            "or as ISO text such as 2013-01-31T05:00:00Z",
            column=column,
            example=example,
            path=path,
            row=row,
        )


class TargetUnusable(DataError):
    def __init__(self, *, expression: str, reason: str) -> None:
        super().__init__(f"data.target: {expression!r} {reason}", expression=expression, reason=reason)


class CheckFailed(DataError):
    """`column`: None when it is about the whole table."""

    def __init__(self, *, column: str | None, rule: str, found: str, examples: Iterable[str] = ()) -> None:
        shown = list(examples)
        more = f"; for example {', '.join(shown)}" if shown else ""
        what = "the table" if column is None else f"column {column!r}"
        super().__init__(
            f"data.checks: {what} breaks {rule}: {found}{more}",
            column=column,
            rule=rule,
            found=found,
            examples=shown,
        )


class LeakFound(DataError):
    """All leaks at once: (column, what was found) pairs."""

    def __init__(self, *, leaks: Iterable[tuple[str, str]]) -> None:
        found = list(leaks)
        names = ", ".join(dict.fromkeys(column for column, _ in found))
        lines = [f"  column {column!r} {why}" for column, why in found]
        super().__init__(
            "the data gives the answer away:\n"
            + "\n".join(lines)
            + "\n  leave these columns out, or, when they are "
            f"truly known before the answer is, let them pass by name: data.allow_leaks: [{names}]",
            leaks=found,
            columns=[column for column, _ in found],
        )


class RowsUnfit(DataError):
    exit_code = 2

    def __init__(self, *, column: str, reason: str) -> None:
        what = f"column {column!r}" if column else "the table"
        super().__init__(f"rows to score: {what} {reason}", column=column, reason=reason)


class ExtraMissing(SerinError):
    exit_code = 2

    def __init__(self, *, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed here; run: pip install 'serin[{extra}]'",
            package=package,
            extra=extra,
        )


class EngineFailed(SerinError):
    retryable = True

    def __init__(self, *, engine: str, reason: str) -> None:
        super().__init__(f"etl.engine {engine}: {reason}", engine=engine, reason=reason)


class GpuUnusable(EngineFailed):
    """With etl.engine: auto, the ETL goes on without it."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(engine="cuda", reason=f"cupy cannot use the GPU that is here ({reason})")


class ClusterNotUp(EngineFailed):
    """The ETL goes on with one GPU, in its own process."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(engine="dask-cuda", reason=f"no cluster of GPUs came up; {reason}")


class StoreError(SerinError):
    pass


class NotFound(StoreError):
    outcome = True

    def __init__(self, *, kind: str, name: str, known: Iterable[str] = ()) -> None:
        super().__init__(f"no {kind} {name!r}{nearest(name, known)}", kind=kind, name=name)


class StoreNotWritable(StoreError):
    def __init__(self, *, path: str, reason: str) -> None:
        super().__init__(
            f"cannot write to {path}: {reason}; free space or choose another place with SERIN_HOME or SERIN_STORE. "
            "Nothing was published.",
            path=path,
            reason=reason,
        )


class BundleBroken(StoreError):
    def __init__(self, *, path: str, reason: str) -> None:
        super().__init__(f"{path} is not what its manifest says: {reason}", path=path, reason=reason)


class LeaseUnavailable(SerinError):
    retryable = True

    def __init__(
        self, *, wanted: int, present: int, holders: Iterable[str] = (), memory_bytes: int = 0
    ) -> None:
        held = list(holders)
        who = f"; held by {', '.join(held)}" if held else ""
        room = f" with {memory_bytes / 1e9:.1f} GB each" if memory_bytes else ""
        super().__init__(
            f"{wanted} GPU(s){room} wanted, {present} here{who}",
            wanted=wanted,
            present=present,
            holders=held,
            memory_bytes=memory_bytes,
        )


class TrainingError(SerinError):
    pass


class TrainingRefused(TrainingError):
    outcome = True

    def __init__(self, *, folder: Path | str, reason: str) -> None:
        super().__init__(f"training in {folder} refused: {reason}", folder=str(folder), reason=reason)


class NetworkUnfit(TrainingError):
    def __init__(self, *, module: str, reason: str) -> None:
        super().__init__(
            f"model.module {module} cannot be trained: {reason}; it takes (numeric, sizes, outputs, **options) and "
            f"answers forward(num, cat) with float32[rows, outputs]",
            module=module,
            reason=reason,
        )


class ModelUnfit(TrainingError):
    """`what`: the key of the spec and the file it names."""

    def __init__(self, *, what: str, reason: str) -> None:
        super().__init__(f"{what} gives no usable model: {reason}", what=what, reason=reason)


class CodeChanged(TrainingError):
    retryable = True

    def __init__(self, *, folder: Path | str) -> None:
        super().__init__(
            f"the model's code changed while the training waited; {folder} is named by the code before: run it again",
            folder=str(folder),
        )


class WorkerFailed(TrainingError):
    retryable = True

    def __init__(self, *, rank: int, exit_code: int, log: Path | str, reason: str = "") -> None:
        why = f" ({reason})" if reason else ""
        super().__init__(
            f"training worker {rank} exited with code {exit_code}{why}; read {log}",
            rank=rank,
            code=exit_code,
            log=str(log),
            reason=reason,
        )


class NotTrained(TrainingError):
    def __init__(self, *, spec: str) -> None:
        super().__init__(
            f"{spec!r} has not been trained as its spec says now; run `serin train` on it first", spec=spec
        )


class Preempted(TrainingError):
    retryable = True
    exit_code = 75

    def __init__(self, *, step: int, folder: Path | str) -> None:
        super().__init__(
            f"training was asked to stop and saved step {step}; run the same command again to go on ({folder})",
            step=step,
            folder=str(folder),
        )


class SearchFailed(TrainingError):
    def __init__(self, *, folder: Path | str, reason: str) -> None:
        super().__init__(
            f"no settings could be tried to the end: {reason} ({folder})", folder=str(folder), reason=reason
        )


class SearchStopped(TrainingError):
    retryable = True
    exit_code = 75

    def __init__(self, *, folder: Path | str, begun: int) -> None:
        super().__init__(
            f"the search was asked to stop after {begun} trial(s) were begun; run the same command again to go on "
            f"({folder})",
            folder=str(folder),
            begun=begun,
        )


class LossNotFinite(TrainingError):
    outcome = True

    def __init__(self, *, step: int, value: str, folder: Path | str) -> None:
        super().__init__(
            f"the loss became {value} at step {step}; lower training.learning_rate or look for extreme values in the "
            f"features (clip them); the last good checkpoint is in {folder}",
            step=step,
            value=value,
            folder=str(folder),
        )


class CheckpointBroken(TrainingError):
    def __init__(self, *, path: Path | str, reason: str) -> None:
        super().__init__(f"checkpoint {path} cannot be used: {reason}", path=str(path), reason=reason)


class ExportError(SerinError):
    pass


class ExportFailed(ExportError):
    def __init__(self, *, what: str, reason: str) -> None:
        super().__init__(
            f"export of {what} failed: {reason}; nothing was published", what=what, reason=reason
        )


class GateFailed(ExportError):
    """`column` and `row` (the id in the main table) say where the first difference lies, when it lies somewhere."""

    outcome = True

    def __init__(
        self, *, stage: str, what: str, found: str, column: str | None = None, row: int | None = None
    ) -> None:
        super().__init__(
            f"export gate, {stage}: {what}: {found}; nothing was published",
            stage=stage,
            what=what,
            found=found,
            column=column,
            row=row,
        )


class ChampionRefused(ExportError):
    """`compared`: False when the comparison itself could not be made."""

    outcome = True

    def __init__(self, *, model: str, live: int, reason: str, compared: bool) -> None:
        why = "is worse than" if compared else "cannot be compared with"
        super().__init__(
            f"the candidate for {model!r} {why} the live version {live}: {reason}; nothing was published. To "
            "publish it all the same, somebody must answer for it by name: --override NAME",
            model=model,
            live=live,
            reason=reason,
            compared=compared,
        )


class ServingError(SerinError):
    pass


class TritonMissing(ServingError):
    def __init__(self, *, looked_in: Iterable[str]) -> None:
        places = list(looked_in)
        super().__init__(
            f"no Triton server found (looked in {', '.join(places)}); run `serin install triton`",
            looked_in=places,
        )


class TritonInstallFailed(ServingError):
    def __init__(self, *, step: str, reason: str) -> None:
        super().__init__(
            f"Triton could not be installed; {step} failed: {reason}; run `serin install triton` again when mended, "
            "or name another Triton with SERIN_TRITON",
            step=step,
            reason=reason,
        )


class BackendRefused(ServingError):
    """What was asked of serving cannot be honoured by this server, this machine or this bundle."""

    def __init__(self, *, model: str, asked: str, reason: str, instead: str) -> None:
        super().__init__(
            f"{model} cannot be served with {asked}: {reason}; {instead}",
            model=model,
            asked=asked,
            reason=reason,
            instead=instead,
        )


class GpuMemoryShort(ServingError):
    retryable = True

    def __init__(self, *, release: str, wanted_mb: int, room: Iterable[str]) -> None:
        rooms = list(room)
        super().__init__(
            f"release {release} needs {wanted_mb:,} MB on a GPU and no GPU has that free ({'; '.join(rooms)}); stop a "
            "release or a training, lower serving.max_batch_rows or serving.gpu_memory_mb, or set serving.device: cpu",
            release=release,
            wanted_mb=wanted_mb,
            room=rooms,
        )


class ReleaseNotReady(ServingError):
    def __init__(self, *, release: str, reason: str, log: Path | str) -> None:
        super().__init__(
            f"release {release} did not come up: {reason}; read {log}",
            release=release,
            reason=reason,
            log=str(log),
        )


class VerificationFailed(ServingError):
    def __init__(self, *, release: str, reason: str) -> None:
        super().__init__(
            f"release {release} does not answer its golden rows: {reason}", release=release, reason=reason
        )


class GatewayRejected(ServingError):
    retryable = True

    def __init__(self, *, what: str, reason: str) -> None:
        super().__init__(f"the gateway did not take {what}: {reason}", what=what, reason=reason)


class EnvoyFileUnfit(ServingError):
    exit_code = 2

    def __init__(self, *, path: Path | str, reason: str) -> None:
        super().__init__(f"{path} cannot be added to the gateway: {reason}", path=str(path), reason=reason)


class TlsUnfit(ServingError):
    exit_code = 2

    def __init__(self, *, certificate: Path | str, key: Path | str, reason: str) -> None:
        super().__init__(
            f"the certificate {certificate} and the key {key} cannot be used: {reason}",
            certificate=str(certificate),
            key=str(key),
            reason=reason,
        )


class KeyRefused(ServingError):
    exit_code = 2

    def __init__(self, *, name: str, reason: str) -> None:
        super().__init__(f"API key {name!r}: {reason}", name=name, reason=reason)


class KeyFileBroken(ServingError):
    def __init__(self, *, path: Path | str, reason: str) -> None:
        super().__init__(
            f"the gateway is closed: {path} {reason}; restore that file, or remove it and make new keys with "
            "`serin keys create`; `serin keys require --off` lets everybody in",
            path=str(path),
            reason=reason,
        )


class TuningFailed(ServingError):
    def __init__(self, *, model: str, reason: str) -> None:
        super().__init__(f"serving settings of {model!r}: {reason}", model=model, reason=reason)


class PredictionFailed(ServingError):
    def __init__(self, *, model: str, status: str, reason: str) -> None:
        super().__init__(
            f"model {model!r} answered {status}: {reason}", model=model, status=status, reason=reason
        )


class RolloutError(SerinError):
    pass


class RolloutRefused(RolloutError):
    outcome = True

    def __init__(self, *, model: str, command: str, reason: str) -> None:
        super().__init__(
            f"rollout {command} of {model!r} refused: {reason}", model=model, command=command, reason=reason
        )


class RolloutFailed(RolloutError):
    outcome = True

    def __init__(self, *, release: str, model: str, reason: str) -> None:
        super().__init__(
            f"release {release} was rolled back: {reason}; `serin rollout report {model}` writes the whole story",
            release=release,
            model=model,
            reason=reason,
        )


class RolloutUnfinished(RolloutError):
    outcome = True

    def __init__(self, *, release: str, phase: str) -> None:
        super().__init__(
            f"release {release} is still {phase}; the rollout goes on without this run: "
            "`serin rollout watch` shows it, `serin rollout promote` or `abort` decides it",
            release=release,
            phase=phase,
        )


class ControllerSilent(RolloutError):
    retryable = True

    def __init__(self, *, model: str, command: str, waited_s: float) -> None:
        super().__init__(
            f"no rollout controller answered `{command}` of {model!r} within {waited_s:g} s and the command was taken "
            "back; `serin status` shows whether the stack is up",
            model=model,
            command=command,
            waited_s=waited_s,
        )


class JournalHeld(RolloutError):
    def __init__(self, *, path: Path | str) -> None:
        super().__init__(
            f"{path} is being written by another rollout controller; end that one first (`serin status` names it)",
            path=str(path),
        )


class JournalUnknown(RolloutError):
    def __init__(self, *, path: Path | str, found: str) -> None:
        super().__init__(
            f"{path} is no journal this version can read (it begins with {found}); it was left as it is",
            path=str(path),
            found=found,
        )


class StageFailed(SerinError):
    outcome = True

    def __init__(self, *, stage: str, run: str, reason: str) -> None:
        super().__init__(f"{stage} failed in run {run!r}: {reason}", stage=stage, run=run, reason=reason)


class StageLost(SerinError):
    retryable = True

    def __init__(self, *, stage: str, run: str, reason: str) -> None:
        super().__init__(f"{stage} was lost with run {run!r}: {reason}", stage=stage, run=run, reason=reason)


class StageStopped(SerinError):
    outcome = True

    def __init__(self, *, stage: str) -> None:
        super().__init__(
            f"{stage} was stopped with its run; `serin run --resume` does it from its beginning", stage=stage
        )


class StackError(SerinError):
    pass


class AlreadyUp(StackError):
    def __init__(self, *, home: Path | str, pid: int) -> None:
        super().__init__(
            f"a stack is up in {home} already (process {pid}); `serin status` shows it, `serin down` ends it",
            home=str(home),
            pid=pid,
        )


class NotUp(StackError):
    def __init__(self, *, home: Path | str) -> None:
        super().__init__(f"no stack is up in {home}; start one with `serin up`", home=str(home))


class PortTaken(StackError):
    def __init__(self, *, port: int, option: str) -> None:
        super().__init__(
            f"port {port} is taken; name another with {option}, or leave {option} out to get a free one",
            port=port,
            option=option,
        )


class ProcessFailed(StackError):
    def __init__(self, *, name: str, reason: str, log: Path | str, tail: str = "") -> None:
        end = f"\n{tail}" if tail else ""
        super().__init__(
            f"{name} did not come up: {reason}; read {log}{end}", name=name, reason=reason, log=str(log)
        )


class SupervisorGone(StackError):
    def __init__(self, *, socket: Path | str, reason: str) -> None:
        super().__init__(f"no supervisor answers at {socket}: {reason}", socket=str(socket), reason=reason)


class SupervisorRefused(StackError):
    def __init__(self, *, call: str, code: int, reason: str) -> None:
        super().__init__(f"the supervisor refuses {call}: {reason}", call=call, code=code, reason=reason)


class PrefectGone(StackError):
    def __init__(self, *, url: str, reason: str) -> None:
        super().__init__(
            f"the Prefect server at {url} does not answer: {reason}; `serin status` shows the stack",
            url=url,
            reason=reason,
        )


class PrefectRefused(StackError):
    def __init__(self, *, call: str, code: int, reason: str) -> None:
        super().__init__(f"Prefect answered {code} to {call}: {reason}", call=call, code=code, reason=reason)


class RunNotResumable(StackError):
    exit_code = 2

    def __init__(self, *, run: str, state: str) -> None:
        super().__init__(
            f"run {run!r} is {state}; only one that failed, crashed or was cancelled can go on",
            run=run,
            state=state,
        )


class PipelineFailed(StackError):
    def __init__(self, *, spec: str, url: str) -> None:
        super().__init__(
            f"the run of {spec} did not complete; the lines above say where it stopped, {url} shows all of it",
            spec=spec,
            url=url,
        )
