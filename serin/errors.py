"""Every error Serin raises on purpose.

SerinError                      what happened, where, what to do next; fields for programs
├── SpecError                   a spec or an argument is wrong; carries every problem found (exit code 2)
├── NameInvalid                 a model, table or run name that cannot be one (exit code 2)
├── FileBroken                  a file of Serin's own that is damaged or cannot be read: names it and the way out
├── DataError                   the tables do not hold what the spec says
│   ├── SourceMissing           a file, glob or URL that matches nothing (exit code 2)
│   ├── SourceUnreadable        a file that is there and cannot be read
│   ├── DatabaseFailed          a database that cannot be reached, or refuses what it is asked
│   ├── TableEmpty              a table without rows, or none left after joins and drops
│   ├── TableTooLarge           a table to be joined that fits into no memory, and cannot be cut
│   ├── ColumnMissing           a column that is not there; names the nearest (exit code 2)
│   ├── ColumnUnusable          a column whose type or values cannot be used as the spec asks (exit code 2)
│   ├── TableUnusable           a table that no spec can be drafted from (exit code 2)
│   ├── OperatorFailed          a user's feature operator returned something it must not
│   ├── ColumnClash             two tables bring the same column name (exit code 2)
│   ├── JoinNotManyToOne        a key that matches more than one row
│   ├── TimeUnparsable          a time column that does not parse
│   ├── TargetUnusable          a target with one class, or of the wrong kind for its task (exit code 2)
│   ├── CheckFailed             a check of the spec does not hold
│   ├── LookupRefused           a table of a lookup that cannot take the place of the one in service
│   ├── LeakFound               a column that knows the answer, or one thing on both sides of the split
│   ├── EventRefused            an event that cannot be counted: its time, or a column that is missing (exit code 2)
│   ├── EventsUnfit             events of a model without online windows, or of a table that cannot be read here
│   ├── ScoringRefused          a target of scheduled scoring, or new files for it, that cannot be used as asked
│   ├── RowsUnfit               rows to be scored that do not fit the model's schema (exit code 2)
│   └── LabelsUnfit             labels that do not fit the model: column, type, class or key (exit code 2)
├── ExtraMissing                a package that only some pipelines need is not installed (exit code 2)
├── EnvironmentRefused          packages for a user's code that cannot be had beside those of the worker (exit code 2)
├── EnvironmentFailed           packages for a user's code that could not be fetched or stored (retryable)
├── EngineFailed                the machines that compute a dataset do not answer or died (retryable)
│   ├── ClusterNotUp            no cluster of GPUs came up in time; the ETL continues with one GPU
│   └── GpuUnusable             a GPU that cupy cannot use
├── StoreError                  the store cannot do what was asked
│   ├── NotFound                no such dataset, model, version, alias or run (exit code 2)
│   ├── StoreNotWritable        full disk, no permission
│   ├── StoreUnreachable        an object store that does not answer, or refuses the caller (retryable)
│   ├── StoreNotConditional     an object store without conditional writes (exit code 2)
│   ├── ObjectExists            an object that another process created first
│   ├── ObjectChanged           an object that another process wrote in the meantime
│   ├── VersionInUse            a version that cannot be deleted now
│   ├── BundleBroken            a bundle or dataset that is not what its manifest says
│   ├── TablesNeeded            pushed tables that a package or a version names
│   ├── PackageRefused          a package of a run that is not in the store, or is not what its digest says
│   ├── BundleUntrusted         a version that no trusted key has signed, where signatures are required
│   ├── PolicyRefused           a version that the policy of a store refuses: who has signed it, or its checks
│   ├── VersionTaken            a version that cannot be copied: another one has its number there
│   ├── SigningKeyUnfit         a key that cannot sign, or cannot be trusted (exit code 2)
│   └── RingBroken              a ring of recorded requests that cannot be read
├── LeaseUnavailable            no GPU became free in time (retryable)
├── TrainingError
│   ├── TrainingRefused         a training that cannot start as asked: folder in use, other settings, no such GPU
│   ├── NetworkUnfit            a user's network that cannot be built, or does not answer as promised
│   ├── ModelUnfit              a script that leaves no usable model, or an ONNX file that cannot be used
│   ├── CodeChanged             a user's code that changed while its training waited for a GPU (retryable)
│   ├── HostsMissing            too few hosts came to train together (retryable)
│   ├── WorkerFailed            a training process died (retryable)
│   ├── NotTrained              an export that was requested before there are weights
│   ├── Preempted               stopped from outside after saving; run again (exit code 75, retryable)
│   ├── LossNotFinite           the loss became NaN or infinite
│   ├── SearchFailed            a search in which nothing that was tried could be trained
│   ├── SearchStopped           a search that was asked to stop; run again (exit code 75, retryable)
│   └── CheckpointBroken        a checkpoint that does not match its digest
├── ExportError
│   ├── ExportFailed            a network or a feature that does not become a graph
│   ├── GateFailed              the exported graph does not answer as the trained model does
│   ├── ChampionRefused         the candidate is worse than the live model, or the two cannot be compared
│   └── ExplanationRefused      a version whose scores cannot be explained, with the reason
├── ServingError
│   ├── TritonMissing           no Triton to be found on this machine
│   ├── TritonInstallFailed     Triton's environment could not be made
│   ├── DecoderMissing          the library that decodes recorded requests was not built
│   ├── BackendRefused          a way of serving that this server, machine or bundle cannot honour
│   ├── GpuMemoryShort          a release that fits on no GPU now (retryable)
│   ├── ReleaseNotReady         a release that did not come up
│   ├── ReleaseFailed           a release that its agent could not start, or that answers wrongly
│   ├── VerificationFailed      a release that does not answer its golden rows
│   ├── TuningFailed            measured serving settings that cannot be made or read
│   ├── GatewayRejected         Envoy did not take a configuration
│   ├── EnvoyFileUnfit          a user's Envoy settings that cannot be added (exit code 2)
│   ├── TlsUnfit                a certificate and key that cannot be used (exit code 2)
│   ├── KeyRefused              an API key that cannot be made or revoked as asked (exit code 2)
│   ├── KeyFileBroken           the file of API keys is lost or cannot be trusted: the gateway is closed
│   ├── IssuerRefused           an issuer of tokens that cannot be added or removed as asked (exit code 2)
│   ├── IssuerUnusable          a provider of tokens whose public keys cannot be read
│   ├── ClientIdRefused         a caller's id that logs and recorded requests would not keep (exit code 2)
│   ├── PredictionFailed        a request that was answered with an error
│   ├── StateUnavailable        the kept events of online windows cannot be read or written (retryable)
│   └── ServedElsewhere         a version that Serin does not run, where its graph is needed (exit code 2)
├── RolloutError
│   ├── RequestsDiffer          a version whose clients must send or expect something else than the live one's
│   ├── RolloutRefused          a command that cannot be honoured now
│   ├── CommandRefused          the controller refused a command, for the reason it gives
│   ├── RolloutFailed           a rollout that ended in a rollback
│   ├── ReplayEnded             nobody sends recorded requests any more; it is tried again
│   ├── RolloutUnfinished       a rollout that outlasted its follower; it continues by itself
│   ├── ControllerSilent        no controller answered a command (retryable)
│   ├── JournalHeld             another controller decides in this home
│   ├── LeadershipLost          another controller leads now; this one steps down
│   └── JournalUnknown          a decision of another format or version
├── MonitoringError
│   ├── AlertRefused            an alert that is not open (exit code 2)
│   ├── WatcherSilent           no watcher of several hosts leads (retryable)
│   ├── ReceiverRefused         a receiver of alerts that cannot be added or removed as asked (exit code 2)
│   ├── NotRecorded             a model without recorded requests, with the reason
│   ├── RequestUnknown          a request that has no record, or not this row, with the reason (exit code 2)
│   └── NotWatched              a model without a watch on drift, with the reason
├── StageFailed                 a stage that was run elsewhere failed; names the run
├── StageLost                   a stage's run elsewhere crashed or was lost (retryable)
├── StageStopped                a stage ended early, because its run was cancelled
└── StackError
    ├── AlreadyUp               a stack runs in this folder
    ├── HostNameTaken           another agent reports under the name of this one
    ├── NotUp                   no stack runs in this folder
    ├── StackUnusable           a file, folder or process that keeps the stack from working
    ├── PortTaken               a requested port is in use
    ├── ProcessFailed           a part of the stack did not start
    ├── PipelineFailed          a run on the stack's workers did not complete
    ├── BackupRefused           a backup that cannot be made or restored as asked (exit code 2)
    ├── BackupBroken            a file that is not a complete backup
    ├── RunNotCancellable       a run that has ended already (exit code 2)
    ├── RunNotResumable         a run that has completed, or is still running (exit code 2)
    ├── SupervisorGone          the stack's supervisor does not answer
    ├── SupervisorRefused       the stack's supervisor cannot do what it was asked
    ├── KubernetesGone          Kubernetes' API does not answer (retryable)
    ├── KubernetesRefused       Kubernetes' API refused a request
    ├── ObjectNotOurs           an object in the cluster that has a release's name and is not Serin's
    ├── TemplateUnfit           the file with the objects of a release cannot be used (exit code 2)
    ├── PrefectGone             the Prefect server does not answer
    ├── PrefectRefused          the Prefect server answered with an error
    │   └── PrefectLoginRefused     it does not accept the login
    ├── SlurmSilent             Slurm's controller does not answer (retryable)
    └── SlurmRefused            Slurm does not accept a job or a command
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar, TypeVar, cast

Family = TypeVar("Family", bound="SerinError")

_CLOSE = 0.7  # share of letters in common: a swapped or missing letter in a word of four


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' when something known is close, else what is known, ready to be put behind a message."""
    options = sorted(known)
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=_CLOSE)
    if close:
        return f"; did you mean {folded[close[0]]!r}?"
    shown = ", ".join(options[:24]) + (", ..." if len(options) > 24 else "")
    return f"; known: {shown}" if options else ""


def file_trouble(error: OSError) -> str:
    """What the operating system refused, as a message."""
    what = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{what}; check the file, the permissions of its folder and the space on its disk"


class SerinError(Exception):
    """The base of all errors. A subclass has the template of its message, which names fields and properties.

    Fields are keyword arguments, attributes and, as plain values, entries of `fields`. They survive pickling. A field
    that the template does not name, that has a default or that other code reads is annotated."""

    template: ClassVar[str]
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, **fields: Any) -> None:
        kind: Any = type(self)
        names = fields_of(kind)
        absent = [name for name in names if name not in fields and not hasattr(kind, name)]
        if absent or fields.keys() - set(names):
            raise TypeError(f"{kind.__name__} takes the fields {names}, not {tuple(fields)}")
        self.fields: dict[str, Any] = {
            name: _plain(fields.get(name, getattr(kind, name, None))) for name in names
        }
        vars(self).update(self.fields)
        self.message: str = self.template.format_map(_Attributes(self))
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self.fields), ()


@functools.cache
def fields_of(kind: type[SerinError]) -> tuple[str, ...]:
    """The names of an error's fields, those of base classes first."""
    names: dict[str, None] = {}
    for each in reversed(kind.__mro__):
        template = vars(each).get("template", "")
        named = [re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name]
        annotated = [
            name for name, hint in vars(each).get("__annotations__", {}).items() if "ClassVar" not in hint
        ]
        names |= dict.fromkeys([*annotated, *(name for name in named if not hasattr(kind, name))])
    return tuple(names)


def _plain(value: Any) -> Any:
    """A value that JSON and other processes understand."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return list(value)
    return value


class _Attributes(dict[str, Any]):
    """What a template may name: fields and properties of the error."""

    def __init__(self, error: SerinError) -> None:
        super().__init__()
        self._error = error

    def __missing__(self, name: str) -> Any:
        return getattr(self._error, name)


def _kind(family: type[Family], code: str, template: str, **facts: Any) -> type[Family]:
    """A message of a family that no code of Serin's catches by name. `facts`: `exit_code`, `retryable`, `__doc__`."""
    return cast(
        "type[Family]", type(code, (family,), {"template": template, "__module__": __name__, **facts})
    )


class SpecError(SerinError):
    """All problems at once. Each is a (key, what is wrong and how to fix it) pair."""

    template = "{where}: {count}{lines}"
    exit_code = 2
    problems: Iterable[tuple[str, str]]

    @property
    def count(self) -> str:
        number = len(self.fields["problems"])
        return f"{number} problem{'s' if number != 1 else ''}"

    @property
    def lines(self) -> str:
        return "".join(f"\n  {key}: {text}" if key else f"\n  {text}" for key, text in self.problems)


class NameInvalid(SerinError):
    template = "{name!r} is not a valid {kind} name: {rule}"
    exit_code = 2


class FileBroken(SerinError):
    """It is left as it is. `advice`: what the person can do."""

    template = "{path} cannot be used ({problem}); {advice}"
    path: Path | str
    problem: str


class DataError(SerinError):
    pass


class SourceMissing(DataError):
    template = (
        "data.tables.{table}: nothing at {path}; put the file there or correct the path in the spec "
        "(paths are relative to the spec's file)"
    )
    exit_code = 2


class SourceUnreadable(DataError):
    template = "data.tables.{table}: {path} cannot be read: {reason}"


class DatabaseFailed(DataError):
    template = "database {connection}: {reason}"
    reason: str


TableEmpty = _kind(DataError, "TableEmpty", "table {table!r} has no rows: {why}")


class TableTooLarge(DataError):
    """`needed` and `room` in bytes."""

    template = "table {table!r} is too large to be joined: it takes {size}; {advice}"
    needed: int
    room: int

    @property
    def size(self) -> str:
        return f"about {self.needed / 1e6:,.0f} MB, and {self.room / 1e6:,.0f} MB may be used for it"


class ColumnMissing(DataError):
    template = "{used_by}: column {column!r} is not in {table!r}{hint}"
    exit_code = 2
    column: str
    table: str
    known: Iterable[str]
    advice: str | None = None

    @property
    def hint(self) -> str:
        return nearest(self.column, self.known) if self.advice is None else f"; {self.advice}"


class ColumnUnusable(DataError):
    template = "{problem}"
    exit_code = 2
    column: str


TableUnusable = _kind(DataError, "TableUnusable", "{table}: {problem}", exit_code=2)
OperatorFailed = _kind(DataError, "OperatorFailed", "own operator {operator!r} {problem}")
ColumnClash = _kind(
    DataError,
    "ColumnClash",
    "column {column!r} comes from both {tables[0]!r} and {tables[1]!r}; rename it in the join: "
    "columns: {{{column}: {tables[1]}_{column}}}",
    exit_code=2,
)
JoinNotManyToOne = _kind(
    DataError,
    "JoinNotManyToOne",
    "join with {table!r} on {on}: key {key} occurs {matches} times in {table!r}; a join must find "
    "at most one row: make the key unique there or add a column to `on`",
)


class TimeUnparsable(DataError):
    template = (
        "column {column!r} does not parse as a time: {example!r} ({place}); store it as a timestamp or as ISO "
        "text such as 2013-01-31T05:00:00Z; for another format in CSV files, set date_formats of the table"
    )
    path: str
    row: int | None = None

    @property
    def place(self) -> str:
        return self.path if self.row is None else f"row {self.row} of the table, in {self.path}"


class TargetUnusable(DataError):
    template = "data.target: {expression!r} {reason}"
    exit_code = 2


class CheckFailed(DataError):
    """`column`: None when it is about the whole table."""

    template = "data.checks: {what} breaks {rule}: {found}{more}"
    column: str | None
    examples: Iterable[str] = ()

    @property
    def what(self) -> str:
        return "the table" if self.column is None else f"column {self.column!r}"

    @property
    def more(self) -> str:
        return f"; for example {', '.join(self.examples)}" if self.examples else ""


class LookupRefused(DataError):
    template = "the lookup in {table!r} is not refreshed: {reason}; what is live stays as it is"


class LeakFound(DataError):
    """All leaks at once: (column, what was found) pairs."""

    template = (
        "the data gives the answer away:\n{lines}\n  leave these columns out, or, when they are truly known before "
        "the answer is, let them pass by name: data.allow_leaks: [{names}]"
    )
    leaks: Iterable[tuple[str, str]]

    @property
    def columns(self) -> list[str]:
        return [column for column, _ in self.leaks]

    @property
    def names(self) -> str:
        return ", ".join(dict.fromkeys(self.columns))

    @property
    def lines(self) -> str:
        return "\n".join(f"  column {column!r} {why}" for column, why in self.leaks)


class RowsUnfit(DataError):
    template = "rows to score: {what} {reason}"
    exit_code = 2
    reason: str
    column: str

    @property
    def what(self) -> str:
        return f"column {self.column!r}" if self.column else "the table"


class ScoringRefused(DataError):
    template = "scores in {target}: {reason}"


class EventRefused(DataError):
    template = "event in row {row}: {reason}"
    exit_code = 2
    row: int
    reason: str


EventsUnfit = _kind(DataError, "EventsUnfit", "events of {model!r}: {reason}")


class LabelsUnfit(DataError):
    template = "labels for {model}: {what} {reason}"
    exit_code = 2
    reason: str
    column: str

    @property
    def what(self) -> str:
        return f"column {self.column!r}" if self.column else "the table"


ExtraMissing = _kind(
    SerinError,
    "ExtraMissing",
    "{package} is not installed here; run: pip install 'serin[{extra}]'",
    exit_code=2,
)
EnvironmentRefused = _kind(
    SerinError, "EnvironmentRefused", "the spec's environment is refused: {reason}", exit_code=2
)
EnvironmentFailed = _kind(
    SerinError, "EnvironmentFailed", "the spec's environment cannot be made: {reason}", retryable=True
)


class EngineFailed(SerinError):
    template = "etl.engine {engine}: {reason}"
    retryable = True


class GpuUnusable(EngineFailed):
    """With etl.engine: auto, the ETL continues without it."""

    template = "etl.engine {engine}: cupy cannot use the GPU that is here ({reason})"
    engine: str = "cuda"


class ClusterNotUp(EngineFailed):
    """The ETL continues with one GPU, in its own process."""

    template = "etl.engine {engine}: no cluster of GPUs came up; {reason}"
    engine: str = "dask-cuda"


class StoreError(SerinError):
    pass


class NotFound(StoreError):
    template = "no {kind} {name!r}{hint}"
    exit_code = 2
    name: str
    known: Iterable[str] = ()

    @property
    def hint(self) -> str:
        return nearest(self.name, self.known)


class StoreNotWritable(StoreError):
    template = (
        "cannot write to {path}: {reason}; check the space there and your right to write, or choose another place with "
        "SERIN_HOME or SERIN_STORE. Nothing was published."
    )


class StoreUnreachable(StoreError):
    template = "the store {url} cannot be used: {reason}"
    retryable = True


class StoreNotConditional(StoreError):
    template = (
        "several hosts cannot share the store {url}: it has no conditional writes; use s3://, gs://, az:// or a "
        "folder that all of them mount"
    )
    exit_code = 2


class ObjectExists(StoreError):
    template = "{key} in {url} was created by another process"
    key: str


class ObjectChanged(StoreError):
    template = "{key} in {url} was changed by another process in the meantime"


VersionInUse = _kind(StoreError, "VersionInUse", "version {version} of {model!r} cannot be deleted: {reason}")
TablesNeeded = _kind(
    StoreError,
    "TablesNeeded",
    "the tables {digest} cannot be removed: {users} would read them again; remove those first (`serin models delete`, "
    "`serin gc`)",
)


class BundleBroken(StoreError):
    template = "{path} is not what its manifest says: {reason}"


class PackageRefused(StoreError):
    """`place`: the store's URL."""

    template = "package {digest} in {place} cannot be used: {reason}"


class BundleUntrusted(StoreError):
    template = (
        "{release} cannot be loaded: {reason}; sign it with `serin models sign`, or trust its key with "
        "`serin trust add`"
    )
    release: str


PolicyRefused = _kind(StoreError, "PolicyRefused", "the policy of {url} refuses {release}: {reason}")
VersionTaken = _kind(
    StoreError,
    "VersionTaken",
    "{release} is not copied: in {url} another version has its number ({other}). Copy the versions of a model from one "
    "store, or take these files there as a new version: `serin models import FOLDER`",
)


class SigningKeyUnfit(StoreError):
    template = "{path} {reason}"
    exit_code = 2


class RingBroken(StoreError):
    template = "{path} is not a ring of recorded requests: {reason}; the requests in it are lost"


class LeaseUnavailable(SerinError):
    template = "{wanted} GPU(s){each} wanted, {present} here{who}"
    retryable = True
    holders: Iterable[str] = ()
    memory_bytes: int = 0

    @property
    def each(self) -> str:
        return f" with {self.memory_bytes / 1e9:.1f} GB each" if self.memory_bytes else ""

    @property
    def who(self) -> str:
        return f"; held by {', '.join(self.holders)}" if self.holders else ""


class TrainingError(SerinError):
    pass


class TrainingRefused(TrainingError):
    template = "training in {folder} refused: {reason}"


class NetworkUnfit(TrainingError):
    template = (
        "model.module {module} cannot be trained: {reason}; it takes (numeric, sizes, outputs, **options) and "
        "answers forward(num, cat) with float32[rows, outputs]"
    )


ModelUnfit = _kind(
    TrainingError,
    "ModelUnfit",
    "{what} gives no usable model: {reason}",
    __doc__="`what`: the key of the spec and the file it names.",
)
CodeChanged = _kind(
    TrainingError,
    "CodeChanged",
    "the model's code changed while the training waited; {folder} is named by the code before: run it again",
    retryable=True,
)


class HostsMissing(TrainingError):
    template = (
        "{there_text} of at least {wanted} hosts came to train together within {seconds:.0f} s; start the same command "
        "on the others, or set SERIN_MACHINES=MIN:MAX"
    )
    retryable = True
    there: list[str]

    @property
    def there_text(self) -> str:
        return f"{len(self.there)} ({', '.join(self.there)})"


class WorkerFailed(TrainingError):
    """`code`: the exit code of the process, negative when a signal ended it."""

    template = "training worker {rank} exited with code {code}{why}; read {log}"
    retryable = True
    reason: str = ""

    @property
    def why(self) -> str:
        return f" ({self.reason})" if self.reason else ""


NotTrained = _kind(
    TrainingError,
    "NotTrained",
    "{spec!r} has not been trained as its spec says now; run `serin train` or Pipeline.train() first",
)


class Preempted(TrainingError):
    template = (
        "training was asked to stop and saved step {step}; run the same command again to continue ({folder})"
    )
    retryable = True
    exit_code = 75


SearchFailed = _kind(
    TrainingError, "SearchFailed", "no settings could be tried to the end: {reason} ({folder})"
)
SearchStopped = _kind(
    TrainingError,
    "SearchStopped",
    "the search was asked to stop after {begun} trial(s) had started; run the same command again to continue "
    "({folder})",
    retryable=True,
    exit_code=75,
)


class LossNotFinite(TrainingError):
    template = (
        "the loss became {value} at step {step}; lower training.learning_rate or look for extreme values in the "
        "features (clip them); the last good checkpoint is in {folder}"
    )


class CheckpointBroken(TrainingError):
    template = "checkpoint {path} cannot be used: {reason}"


class ExportError(SerinError):
    pass


class ExportFailed(ExportError):
    template = "export of {what} failed: {reason}; nothing was published"


class GateFailed(ExportError):
    """`column` and `row` (the id in the main table) say where the first difference is, when it has a place."""

    template = "export gate, {stage}: {what}: {found}; nothing was published"
    column: str | None = None
    row: int | None = None


class ChampionRefused(ExportError):
    """`compared`: False when the comparison itself could not be made."""

    template = (
        "the candidate for {model!r} {why} the live version {live}: {reason}; nothing was published. To "
        "publish it anyway, a person must approve it by name: --approved-by NAME"
    )
    compared: bool

    @property
    def why(self) -> str:
        return "is worse than" if self.compared else "cannot be compared with"


ExplanationRefused = _kind(
    ExportError, "ExplanationRefused", "the scores of {release} cannot be explained: {reason}"
)


class ServingError(SerinError):
    pass


class TritonMissing(ServingError):
    template = "no Triton server found (looked in {places}); run `serin install triton`"
    looked_in: Iterable[str]

    @property
    def places(self) -> str:
        return ", ".join(self.looked_in)


class TritonInstallFailed(ServingError):
    template = (
        "Triton could not be installed; {step} failed: {reason}; fix that and run `serin install triton` again, "
        "or name another Triton with SERIN_TRITON"
    )


class DecoderMissing(ServingError):
    template = "this version's decoder of recorded requests was not built; run `serin install gateway`"


class BackendRefused(ServingError):
    """What was asked of serving cannot be honoured by this server, this machine or this bundle."""

    template = "{model} cannot be served with {asked}: {reason}; {instead}"


class GpuMemoryShort(ServingError):
    template = (
        "release {release} needs {wanted_mb:,} MB on a GPU and no GPU has that free ({rooms}); stop a "
        "release or a training, lower serving.max_batch_rows or serving.gpu_memory, or set serving.device: cpu"
    )
    retryable = True
    room: Iterable[str]

    @property
    def rooms(self) -> str:
        return "; ".join(self.room)


class ReleaseNotReady(ServingError):
    template = "release {release} did not come up: {reason}; read {log}"


ReleaseFailed = _kind(ServingError, "ReleaseFailed", "{problem}", __doc__="As its agent says.")


class VerificationFailed(ServingError):
    template = "release {release} does not answer its golden rows: {reason}"


class GatewayRejected(ServingError):
    template = "the gateway did not take {what}: {reason}"
    retryable = True


EnvoyFileUnfit = _kind(
    ServingError, "EnvoyFileUnfit", "{path} cannot be added to the gateway: {reason}", exit_code=2
)


class TlsUnfit(ServingError):
    template = "the certificate {certificate} and the key {key} cannot be used: {reason}"
    exit_code = 2


KeyRefused = _kind(ServingError, "KeyRefused", "API key {name!r}: {reason}", exit_code=2)


class KeyFileBroken(ServingError):
    template = (
        "the gateway is closed: {path} {reason}; restore that file, or remove it and make new keys with "
        "`serin keys create`; `serin keys require --off` lets everybody in"
    )


IssuerRefused = _kind(ServingError, "IssuerRefused", "issuer {name!r}: {reason}", exit_code=2)


class IssuerUnusable(ServingError):
    template = "issuer {name!r}: {reason}"


TuningFailed = _kind(ServingError, "TuningFailed", "serving settings of {model!r}: {reason}")
ServedElsewhere = _kind(
    ServingError,
    "ServedElsewhere",
    "{what} needs the graph of {model} version {version}, which is served elsewhere: its bundle has the address of its "
    "server alone. Do it where the model was made, or import its graph (`serin models import`)",
    exit_code=2,
)
ClientIdRefused = _kind(
    ServingError,
    "ClientIdRefused",
    "client_id {client_id!r} would not be kept: use 1 to {most} printable ASCII characters, without a space at "
    "either end",
    exit_code=2,
)


class StateUnavailable(ServingError):
    template = "the events of online windows cannot be used: {reason}"
    retryable = True
    reason: str


class PredictionFailed(ServingError):
    template = "model {model!r} answered {status}: {reason}"


class RolloutError(SerinError):
    pass


RequestsDiffer = _kind(
    RolloutError,
    "RequestsDiffer",
    "{release} cannot share clients with {stable}: {reason}. To switch all clients at once, set rollout.steps: "
    "[100]; to serve both, give the model another name",
)
RolloutRefused = _kind(RolloutError, "RolloutRefused", "rollout {command} of {model!r} refused: {reason}")


class CommandRefused(RolloutError):
    template = "{reason}"
    model: str
    command: str


RolloutFailed = _kind(
    RolloutError,
    "RolloutFailed",
    "release {release} was rolled back: {reason}; `serin rollout report {model}` writes the full report",
)
ReplayEnded = _kind(
    RolloutError, "ReplayEnded", "recorded requests are not replayed: {reason}", retryable=True
)
RolloutUnfinished = _kind(
    RolloutError,
    "RolloutUnfinished",
    "release {release} is not live yet ({phase}); the rollout continues without this run: "
    "`serin rollout watch` shows it, `serin rollout promote` or `abort` decides it",
)
ControllerSilent = _kind(
    RolloutError,
    "ControllerSilent",
    "no rollout controller answered `{command}` of {model!r} within {waited_s:g} s and the command was taken "
    "back; `serin status` shows whether the stack is up",
    retryable=True,
)


class JournalHeld(RolloutError):
    template = (
        "{path} is being written by another rollout controller; end that one first (`serin status` names it)"
    )


class LeadershipLost(RolloutError):
    template = "another rollout controller leads now ({leader}); this one steps down"


JournalUnknown = _kind(
    RolloutError,
    "JournalUnknown",
    "{path} is not a decision that this version can read (it begins with {found}); it was left as it is. Restore it "
    "from a backup, or, if another Serin wrote it, finish the rollout with that one; then move it away",
)
StageFailed = _kind(SerinError, "StageFailed", "{stage} failed in run {run!r}: {reason}")
StageLost = _kind(SerinError, "StageLost", "{stage} was lost with run {run!r}: {reason}", retryable=True)
StageStopped = _kind(
    SerinError,
    "StageStopped",
    "{stage} was stopped with its run; `serin run --resume` does it from its beginning",
)


class MonitoringError(SerinError):
    pass


NotRecorded = _kind(MonitoringError, "NotRecorded", "nothing is recorded of {model!r}: {reason}")
RequestUnknown = _kind(
    MonitoringError,
    "RequestUnknown",
    "there is no record of request {request!r} of {model!r}: {reason}",
    exit_code=2,
)
NotWatched = _kind(MonitoringError, "NotWatched", "the drift of {model!r} is not watched: {reason}")


class AlertRefused(MonitoringError):
    template = "no alert {key!r} is open{hint}"
    exit_code = 2
    key: str
    known: Iterable[str]

    @property
    def hint(self) -> str:
        return nearest(self.key, self.known)


class WatcherSilent(MonitoringError):
    template = "no watcher of the hosts that share {url} answers: nothing was changed; is one up? (`serin hosts list`)"
    retryable = True


class ReceiverRefused(MonitoringError):
    """Never with the URL: it may contain a secret."""

    template = "receiver {name!r}: {reason}"
    exit_code = 2


class StackError(SerinError):
    pass


AlreadyUp = _kind(
    StackError,
    "AlreadyUp",
    "a stack is up in {home} already (process {pid}); `serin status` shows it, `serin down` ends it",
)


class HostNameTaken(StackError):
    template = (
        "another agent, with the gateway {address}, reports as host {host}; set SERIN_HOST to another name"
    )


NotUp = _kind(StackError, "NotUp", "no stack is up in {home}; start one with `serin up`")
StackUnusable = _kind(StackError, "StackUnusable", "{problem}")
PortTaken = _kind(
    StackError,
    "PortTaken",
    "port {port} is taken; name another with {option}, or leave {option} out to get a free one",
)


class ProcessFailed(StackError):
    template = "{name} did not come up: {reason}; read {log}{end}"
    tail: str = ""

    @property
    def end(self) -> str:
        return f"\n{self.tail}" if self.tail else ""


BackupRefused = _kind(StackError, "BackupRefused", "{what}: {reason}", exit_code=2)
BackupBroken = _kind(
    StackError, "BackupBroken", "{path} is not a complete backup: {reason}; nothing was restored"
)


class SupervisorGone(StackError):
    template = "no supervisor answers at {socket}: {reason}"


class SupervisorRefused(StackError):
    template = "the supervisor refuses {call}: {reason}"
    code: int


KubernetesGone = _kind(
    StackError, "KubernetesGone", "Kubernetes' API at {url} does not answer: {reason}", retryable=True
)


class KubernetesRefused(StackError):
    template = "Kubernetes refused to {action}: {reason}"
    status: int


ObjectNotOurs = _kind(
    StackError,
    "ObjectNotOurs",
    "{kind} {name!r} in namespace {namespace!r} was not made by Serin (it has no label {label}), so it is left as "
    "it is; rename it, or give releases another namespace",
)
TemplateUnfit = _kind(
    StackError,
    "TemplateUnfit",
    "{path}: {reason}; deployments/kubernetes/base/release has one that works",
    exit_code=2,
)


class PrefectGone(StackError):
    template = "the Prefect server at {url} does not answer: {reason}; `serin status` shows the stack"


class PrefectRefused(StackError):
    template = "Prefect answered {code} to {call}: {reason}"


PrefectLoginRefused = _kind(
    PrefectRefused,
    "PrefectLoginRefused",
    "the Prefect server at {url} does not accept the login: {reason}; set PREFECT_API_AUTH_STRING to its "
    "user:password, or PREFECT_API_KEY",
)


class SlurmSilent(StackError):
    template = "{command} got no answer from Slurm: {reason}; check `scontrol ping` and SLURM_CONF"
    retryable = True


class SlurmRefused(StackError):
    template = "{command} was refused: {reason}"


RunNotResumable = _kind(
    StackError,
    "RunNotResumable",
    "run {run!r} is {state}; only one that failed, crashed or was cancelled can be resumed",
    exit_code=2,
)
RunNotCancellable = _kind(
    StackError,
    "RunNotCancellable",
    "run {run!r} is {state}; only one that has not ended can be cancelled",
    exit_code=2,
)


class PipelineFailed(StackError):
    """`state`: how the run ended: failed, crashed or cancelled. `reason`: empty when nobody knows it."""

    template = "the run of {spec} {ended}{why}\n{url} shows all of it"
    state: str = "failed"
    reason: str = ""

    @property
    def ended(self) -> str:
        return "was cancelled" if self.state == "cancelled" else self.state

    @property
    def why(self) -> str:
        return f": {self.reason}" if self.reason else ""
