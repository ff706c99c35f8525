"""The only module that reads environment variables. Everything else is given values.

SERIN_HOME       where all state of the local stack lies            (./.serin)
SERIN_STORE      datasets and model versions: a folder or the URL of a bucket (<home>/store)
SERIN_CACHE_BYTES  the most that copies of an object store's files take here (a fifth of the disk)
SERIN_SCRATCH    a folder that all hosts see, for datasets that they compute together into an object store (unset)
SERIN_HOST       the name of this host where several share a store    (the machine's host name)
SERIN_EVENTS     the Valkey that keeps events of online windows for several hosts: valkeys://host:6380/0 (unset: LMDB)
SERIN_EVENTS_PASSWORD_FILE  a file with its password                  (unset: none)
SERIN_EVENTS_CA  certificates of the authority of its certificate     (unset: the system's)
SERIN_SIGNING_KEY     a file with the private key that signs new versions (unset: they are not signed)
SERIN_TRUSTED_KEYS    a folder with the public keys of which one must have signed a version (<home>/trusted-keys)
SERIN_TRITON     an environment or folder that holds Triton          (beside the virtual environment)
SERIN_INVENTORY  a JSON file that replaces the machine's GPUs        (unset: ask the driver)
SERIN_SERVING_MEMORY  of each GPU's memory, what leases leave to served models, in bytes (0)
SERIN_GPU_MEMORY the most that a dataset takes of each GPU's memory while it is built, in bytes (what its stage leased)
SERIN_GATEWAY_MEMORY  the most memory that the gateway takes, in bytes (a quarter of the machine's, 256 MB to 8 GB)
SERIN_METRICS    where Prometheus may ask for metrics: host:port      (127.0.0.1, port 9464 or a free one)
SERIN_CONSOLE    a YAML file with the console's settings              (unset: the defaults)
SERIN_RELEASE_TEMPLATE  a YAML file with the Kubernetes objects of a release (unset: only with `--fleet kubernetes`)
SERIN_RELEASE_NAMESPACE the Kubernetes namespace of releases          (serin-releases)
SERIN_DASK       the address of a Dask scheduler to use where the ETL would start a cluster of processes (unset)
SERIN_PACKAGE    the digest of the package that this process's run was sent as (unset: none)
SERIN_SCHEDULER  who decides the outcome of a run that is stopped: slurm (unset: the run itself)
SERIN_ADDRESS    where other hosts reach this one: an IPv4 address    (that of its name, or of its route)
SERIN_IMAGE      the image of this Job, set by Serin's worker for Kubernetes (unset: not in such a Job)
SERIN_MACHINES   how many machines train together: N or MIN:MAX      (1)
SERIN_RENDEZVOUS where they meet: host:port of one of them           (unset: in the store)
PREFECT_API_URL  a Prefect server to use instead of the stack's      (unset: the stack's)
PREFECT__FLOW_RUN_ID    the Prefect run that this process belongs to  (unset: none)
AWS_CA_BUNDLE    certificates of the authority of an S3 server        (unset: the system's)
SERIN_SEARCH_STORAGE    an SQLAlchemy URL that keeps searches; in no spec, for it may hold a password
                        (SQLite in the search's folder)
SERIN_RECEIVER_URL      of a receiver that is added (`serin alerts receivers add`): arguments are visible to others
SERIN_PRICE_PER_HOUR    of one GPU, or of the machine without: for the cost in receipts (unset: no cost)
MLFLOW_TRACKING_URI     an MLflow server that gets metrics and versions as well (unset: none)
XDG_CACHE_HOME   the user's cache, with what a first start prepared once (~/.cache)
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from serin.errors import SpecError

_SECRET_NAME = re.compile(
    r"PASSWORD(?!_FILE)|PASSWD|SECRET|TOKEN|CREDENTIAL|AUTH_STRING|API_?KEY|ACCESS_KEY(?!_ID)|PRIVATE_KEY|RECEIVER_URL",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"://[^/@\s:]*:([^/@\s]+)@")
_LEAST_GATEWAY_BYTES = 64 << 20  # two requests of the largest size
_LEAST_GPU_BYTES = 1 << 28  # some thousands of rows and what cuDF needs to read them
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (a private folder is made in it)
_SECRET_LENGTH = 6  # a shorter one occurs in a log by chance
_OF_BUCKETS = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_")


def text(variable: str) -> str | None:
    """The value of one of the variables above, or of one that a spec names; None: not set. It may be a secret."""
    return os.environ.get(variable) or None


def path(variable: str) -> Path | None:
    """The file or folder that one of the variables above names; None: not set."""
    value = text(variable)
    return Path(value).expanduser().absolute() if value else None


def home() -> Path:
    return Path(os.environ.get("SERIN_HOME") or ".serin").expanduser().resolve()  # one stack, one name


def supervised() -> bool:
    """Returns whether a stack's supervisor started this process (host/exec_wrapper.py)."""
    return "SERIN_PROCESS" in os.environ


def store_url() -> str:
    return os.environ.get("SERIN_STORE") or str(home() / "store")


def bucket_settings() -> tuple[tuple[str, str], ...]:
    """The variables that decide how buckets are reached, and as whom. They hold secrets: for comparisons only."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_OF_BUCKETS)))


def aws_variables_suffice() -> bool:
    """Returns whether the keys are in variables and no file can say more, such as the region."""
    config = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return all(os.environ.get(key) for key in keys) and not config.is_file()


def shared_store_url() -> str | None:
    """The store that SERIN_STORE names, which other hosts may use too; None: the one in SERIN_HOME."""
    return os.environ.get("SERIN_STORE") or None


def events_place() -> tuple[str, Path | None, Path | None] | None:
    """(URL, file with the password, file with certificates) of what keeps events for several hosts; None: not set."""
    url = text("SERIN_EVENTS")
    return None if url is None else (url, path("SERIN_EVENTS_PASSWORD_FILE"), path("SERIN_EVENTS_CA"))


def host() -> str:
    """The name of this host where several share a store."""
    return os.environ.get("SERIN_HOST") or socket.gethostname()


def metrics_address() -> tuple[str, int] | None:
    """None: not set."""
    value = text("SERIN_METRICS")
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise SpecError(
            where="SERIN_METRICS", problems=[("", f"{value!r} is not host:port, such as 127.0.0.1:9464")]
        )
    return host.strip("[]"), int(port)


def gateway_memory_bytes() -> int | None:
    """None: not set."""
    return number_of_bytes("SERIN_GATEWAY_MEMORY", at_least=_LEAST_GATEWAY_BYTES)


def gpu_memory_bytes() -> int | None:
    """None: not set."""
    return number_of_bytes("SERIN_GPU_MEMORY", at_least=_LEAST_GPU_BYTES)


def release_namespace() -> str:
    return os.environ.get("SERIN_RELEASE_NAMESPACE") or "serin-releases"


def number_of_bytes(variable: str, at_least: int = 0) -> int | None:
    """None: not set. Anything else is an error: a typing mistake must not release memory."""
    value = os.environ.get(variable)
    if not value:
        return None
    if not value.isdigit() or int(value) < at_least:
        least = f" of at least {at_least}" if at_least else ""
        raise SpecError(where=variable, problems=[("", f"{value!r} is not a number of bytes{least}")])
    return int(value)


def prefect_credentials() -> dict[str, str]:
    """The caller's credentials for their own Prefect server."""
    names = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def secrets() -> frozenset[str]:
    """Returns the values of variables whose names mark them as secret: no log may show them."""
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    passwords = {match[1] for value in os.environ.values() if (match := _URL_PASSWORD.search(value))}
    whole = found | passwords
    parts = {part for value in found if value.count(":") == 1 for part in value.split(":")[1:]}
    return frozenset(value for value in whole | parts if len(value) >= _SECRET_LENGTH)


def price_per_hour() -> float | None:
    """Returns the price; None when it is not set or invalid, because a wrong cost is worse than none."""
    try:
        return float(os.environ["SERIN_PRICE_PER_HOUR"])
    except (KeyError, ValueError):
        return None


def mlflow_experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "serin"


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it was set from outside: what a container or scheduler gave us. None: not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@contextmanager
def showing_devices(ids: Sequence[str], memory_bytes: int = 0) -> Iterator[None]:
    """Within the block this process and its children see these GPUs alone; none when none is named. `memory_bytes`: the
    most that a dataset takes of each; 0: as before.

    Holds for libraries that have not initialised CUDA before.
    """
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(ids)}
    if memory_bytes:
        most = min(memory_bytes, gpu_memory_bytes() or memory_bytes)
        shown["SERIN_GPU_MEMORY"] = str(max(most, _LEAST_GPU_BYTES))
    with having(shown):
        yield


@contextmanager
def working_in(folder: Path, *, imports: Sequence[Path] = (), package: str | None = None) -> Iterator[None]:
    """Within the block this process and its children work in `folder`, where relative paths begin, and import from
    `imports` first. The home and the store stay what they were. `package`: the digest of what is in the folder."""
    store, changes = shared_store_url(), {"SERIN_HOME": str(home())}
    if store is not None and "://" not in store:
        changes["SERIN_STORE"] = str(Path(store).expanduser().absolute())
    if package is not None:
        changes["SERIN_PACKAGE"] = package
    came_from = Path.cwd()
    with having(changes), importing_from(imports):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(came_from)


@contextmanager
def importing_from(folders: Sequence[Path]) -> Iterator[None]:
    """Within the block this process and its children import from these folders first."""
    before, path = list(sys.path), os.environ.get("PYTHONPATH")
    sys.path[:] = [*map(str, folders), *(str(Path(each).absolute()) for each in before)]
    try:
        with having({"PYTHONPATH": os.pathsep.join([*map(str, folders), *([path] if path else [])])}):
            yield
    finally:
        sys.path[:] = before


@contextmanager
def having(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables have these values during the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def user() -> str:
    """Returns the name of the acting user, for journals and leases."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or account()


def account() -> str:
    """Returns the name of the account that this process runs as, whatever its variables say."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container that runs under a number without an account
        return f"uid {os.getuid()}"


def actor() -> str:
    """Returns who acts, for journals: the user, at this host."""
    return f"{user()}@{host()}"


def torchrun_place() -> tuple[int, int, int, int]:
    """(rank, rank on this machine, number of ranks, of those on this machine) as torchrun gave them to this worker;
    (0, 0, 1, 1) outside of torchrun."""
    get = os.environ.get
    size = get("WORLD_SIZE", "1")
    return int(get("RANK", "0")), int(get("LOCAL_RANK", "0")), int(size), int(get("LOCAL_WORLD_SIZE", size))


def meet_in(file: Path) -> None:
    """Has the ranks that this process starts meet in a file. Each attempt of torchrun's has another one."""
    os.environ["SERIN_RANKS_MEET"] = str(file)


def meeting_file() -> Path | None:
    """The file in which the ranks of this worker's attempt meet; None: they meet as torchrun's variables say."""
    file = os.environ.get("SERIN_RANKS_MEET")
    return Path(f"{file}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}") if file else None


def machines() -> tuple[str, str | None]:
    """(how many train together, where they meet)"""
    return os.environ.get("SERIN_MACHINES") or "1", os.environ.get("SERIN_RENDEZVOUS") or None


def dask_scheduler() -> str | None:
    """The address of a Dask scheduler that replaces a cluster of processes on this machine."""
    address = os.environ.get("SERIN_DASK") or None
    if address is not None and "://" not in address:
        raise SpecError(
            where="SERIN_DASK", problems=[("", f"{address!r} is not an address, such as tls://host:8786")]
        )
    return address


def slurm_place() -> tuple[int, int, int, str]:
    """(job, restarts before, nodes, this node) as Slurm gave them to this process. KeyError outside of a job."""
    get = os.environ.get
    return (
        int(os.environ["SLURM_JOB_ID"]),
        int(get("SLURM_RESTART_COUNT") or 0),
        int(get("SLURM_JOB_NUM_NODES") or 1),
        get("SLURMD_NODENAME") or socket.gethostname(),
    )


def slurm_share() -> tuple[int | None, int | None]:
    """(cores, bytes of memory) that Slurm gave to this job on this node; None: not in a job, or not limited."""
    get = os.environ.get
    cores, node, core = (
        get(name, "") for name in ("SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU")
    )
    count = int(cores) if cores.isdigit() else None
    if node.isdigit() and int(node):  # in megabytes; 0: all of the node
        return count, int(node) << 20
    return count, int(core) * count << 20 if core.isdigit() and count else None


def script_variables() -> dict[str, str] | None:
    """What a training script was given (serin/training/launch/script.py); None outside of one."""
    if "SERIN_OUTPUT" not in os.environ:
        return None
    return {name: value for name, value in os.environ.items() if name.startswith("SERIN_")}


def search_path() -> str:
    return os.environ.get("PATH", os.defpath)


def child_environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with `changes` applied; None removes a variable."""
    environment = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def replace(variables: Mapping[str, str]) -> None:
    """From here on this process has exactly these variables, and so have its children."""
    os.environ.clear()
    os.environ.update(variables)


def prefer(name: str, value: str) -> None:
    """Sets a variable that a library is about to read, unless somebody has set it."""
    os.environ.setdefault(name, value)


def import_from(folder: Path) -> None:
    """Modules in `folder` can be imported here and in processes that are started."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{before}{os.pathsep}{folder}" if before else str(folder)


def stop_importing_below(folder: Path) -> None:
    """Undoes `import_from` of a parent process for all folders below this one."""
    sys.path[:] = [each for each in sys.path if not Path(each).is_relative_to(folder)]
    if inherited := os.environ.get("PYTHONPATH"):
        left = [each for each in inherited.split(os.pathsep) if not Path(each).is_relative_to(folder)]
        os.environ["PYTHONPATH"] = os.pathsep.join(left)


def runtime_folder(of: Path) -> Path:
    """A short folder in memory where there is one, so that a full disk does not matter to it; only its owner may enter
    it. For unix sockets (their paths are limited to 107 bytes) and small files that are lost with the machine."""
    digest = hashlib.sha256(str(of.absolute()).encode()).hexdigest()[:12]
    place = Path(os.environ.get("XDG_RUNTIME_DIR") or _SHARED_MEMORY)
    usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    folder = (place if usable else Path(tempfile.gettempdir())) / f"serin-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(
            f"{folder} belongs to another user or is open to others; remove it and try again"
        )
    return folder


def cache_folder() -> Path:
    """The folder of this user for what can be made again; it may not exist."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (found if found.is_absolute() else Path("~/.cache").expanduser()) / "serin"


def application_folder() -> Path:
    """What holds flows/, tasks/, deployments/ and triton_models/: serin/app in a wheel, else the checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "app"
    return inside if inside.is_dir() else package.parent
