"""House rules that a reader of the sources could check by eye, and would forget to: form, words and signals."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import ROOT, nodes, python_files, repository_files, tree

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
LISTS_NOT_LOGIC = {"serin/errors.py"}  # one class after the other: splitting it would hide the tree

PRODUCT = ("serin", "flows", "tasks")


def test_a_file_is_no_longer_than_one_job_needs() -> None:
    lengths = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in python_files()}
    lengths = {name: lines for name, lines in lengths.items() if name not in LISTS_NOT_LOGIC}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long, "split these by responsibility"


def test_a_function_fits_on_a_screen() -> None:
    long = {}
    for name in python_files(*PRODUCT, "benchmarks", "deployments", "docs", "examples", "triton_models"):
        for node in nodes(name):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{name}:{node.name}"] = lines
    assert not long


def test_package_files_are_empty() -> None:
    packages = [name for name in python_files() if Path(name).name == "__init__.py"]
    full = [name for name in packages if (ROOT / name).read_text(encoding="utf-8").strip()]
    assert full == ["serin/__init__.py"], "the front door alone holds code"


def test_every_module_says_its_one_job_first() -> None:
    modules = [name for name in python_files(*PRODUCT, "triton_models") if Path(name).name != "__init__.py"]
    assert [name for name in modules if not ast.get_docstring(tree(name))] == []


def test_only_environment_py_reads_environment_variables() -> None:
    readers = ("environ", "environb", "getenv", "putenv")
    found = []
    for name in python_files(*PRODUCT):
        if name == "serin/machine/environment.py":
            continue
        for node in nodes(name):
            if isinstance(node, ast.Attribute) and node.attr in readers:
                found.append(f"{name}:{node.lineno}: {node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                found += [
                    f"{name}:{node.lineno}: {alias.name}" for alias in node.names if alias.name in readers
                ]
    assert not found


def test_only_durable_py_and_writers_of_open_files_call_fsync() -> None:
    calls = {
        name
        for name in python_files(*PRODUCT)
        for node in nodes(name)
        if isinstance(node, ast.Attribute) and node.attr == "fsync"
    }
    assert calls == {"serin/machine/durable.py", "serin/formats/rows.py"}


def test_only_the_command_and_the_watcher_catch_everything() -> None:
    """A bug in one of the watcher's duties, or in a library that sends alerts, must not stop the others."""
    found = []
    for name in python_files(*PRODUCT, "benchmarks", "examples", "triton_models"):
        if name in ("serin/cli.py", "serin/watcher/duty.py", "serin/monitoring/alerts/delivery.py"):
            continue
        handlers = (node for node in nodes(name) if isinstance(node, ast.ExceptHandler))
        found += [f"{name}:{handler.lineno}" for handler in handlers if _catches_everything(handler)]
    assert not found


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    """A handler that tidies up and raises again catches nothing."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if handler.type is None:
        return True
    return any(getattr(part, "id", None) in ("Exception", "BaseException") for part in ast.walk(handler.type))


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    folders = re.compile(r"(?<![\w./-])/(?:root|work|home|farm|Users|opt/(?:pypi|wheels))/[\w.-]+")
    hosts = re.compile(
        r"--(?:extra-)?index-url|--find-links|https?://[\w.-]*(?:artifactory|nexus|mirror|pypi-proxy)"
    )
    found = []
    for name in repository_files():
        if name.startswith(("docker/", "deployments/")) or name == "tests/architecture/test_sources.py":
            continue  # containers have folders of their own
        data = (ROOT / name).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if folders.search(line) or hosts.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found


def test_every_pin_is_exact_and_neutral_to_the_platform() -> None:
    pin = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not pin.fullmatch(line)] == []
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins]
    assert [name for name in names if names.count(name) > 1] == []


# Not read: the log, which is history, and sources that are compiled, which a changed comment would build again.
READ = re.compile(
    r"(serin|flows|tasks|deployments|triton_models|benchmarks|examples)/.*\.(py|yaml|md|lua|pbtxt)"
    r"|(README|SECURITY|CONTRIBUTING)\.md|docs/(?!log\.md).*\.md|docker/.*|Makefile|pyproject\.toml"
)
COMPARED = (
    "longer|more|worse|less|better|faster|slower|different|larger|smaller|other|further|newer|older|later"
)
PRIVATE = [  # a part of each match, which is quick to look for; the pattern; what to write instead
    ("mend", r"\bmend(s|ed|ing)?\b", "fix"),
    ("anew", r"\banew\b", "again"),
    ("leavings", r"\bleavings\b", "leftovers"),
    ("meanwhile", r"\bmeanwhile\b", "in the meantime"),
    ("ever", r"\bwho(so)?ever\b", "anyone who"),
    ("for ever", r"\bfor ever\b", "forever"),
    (" on", r"\b(go|goes|went|going) on\b(?! to\b)", "continue, resume"),
    (" told", r"\b(is|are|was|were|be) told\b", "is reported, is asked"),
    (" own", r"\bof (its|our|one's|your|their|his) own\b(?=[,.;:)]|$)", "its own ..., a separate ..."),
    (" no ", rf"(?<!there )\b(is|are|was) no (?!({COMPARED})\b)(?=[a-z])", "is not a ..."),
    (" word", r"\bwithout a word\b|\blast words\b", "exited without output, last lines"),
    ("nothing", r"\b(came|comes?) to nothing\b", "failed"),
    ("me", r"\bbec(a|o)mes? of\b", "the outcome of"),
    ("whole number", r"\bwhole numbers?\b", "integers"),
    ("under way", r"\bunder way\b", "in flight, running"),
    (" against", r"\bheld against\b|\bholds? \w+ against\b", "is compared with"),
    (" back", r"\b(sent|sends?) (it )?back\b", "is rolled back"),
    ("lie", r"\blies? (in|there|at|beside|on|here|under|outside|inside)\b", "is in, is stored in"),
    ("all the same", r"\ball the same\b", "nevertheless"),
    ("h", r"\b(he|his|him)\b", "they"),
]


def test_prose_uses_no_private_idiom() -> None:
    private = [(part, re.compile(pattern), better) for part, pattern, better in PRIVATE]
    found = [
        f"{name}:{number}: {line.strip()}  <- write: {better}"
        for name in repository_files()
        if READ.fullmatch(name)
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        for part, pattern, better in private
        if part in line.lower() and pattern.search(line.lower())
    ]
    assert found == []


SENDS = {"os.kill", "os.killpg", "signal.pidfd_send_signal"}
# subprocess.Popen and multiprocessing.Process ignore a process that has ended; asyncio and anyio raise.
ASYNC_SENDS = {"kill", "terminate", "send_signal"}
MAY_SEND = re.compile(r"\b(killpg|pidfd_send_signal|kill|terminate|send_signal)\(")  # the rest is not parsed
EXPECTED = {"ProcessLookupError", "OSError"}


def test_code_that_signals_a_process_expects_that_it_has_ended() -> None:
    sources = [name for name in python_files() if MAY_SEND.search((ROOT / name).read_text(encoding="utf-8"))]
    found = [f"{name}:{line}" for name in sources for line in careless(tree(name))]
    assert not found, "use tests/signals.py, or suppress ProcessLookupError"


def test_the_careless_are_found() -> None:
    source = """
os.kill(os.getpid(), 9)
os.kill(pid, 9)
with suppress(ProcessLookupError):
    os.kill(pid, 9)
try:
    os.killpg(pid, 9)
except OSError:
    os.killpg(pid, 9)
except ProcessLookupError:
    pass
def ends(process):
    process.kill()
async def ends(process):
    process.kill()
    with contextlib.suppress(ProcessLookupError, ValueError):
        process.kill()
try:
    signal.pidfd_send_signal(handle, 9)
except ValueError:
    pass
"""
    assert list(careless(ast.parse(source))) == [3, 9, 15, 19]


def careless(node: ast.AST, *, expected: bool = False, awaits: bool = False) -> Iterator[int]:
    """Lines that signal a process outside of a block that expects that there is none."""
    if isinstance(node, ast.Call) and _sends(node, awaits) and not expected:
        yield node.lineno
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        awaits = isinstance(node, ast.AsyncFunctionDef)
    inside = node.body if isinstance(node, ast.Try | ast.With) and _is_ready(node) else []
    for child in ast.iter_child_nodes(node):
        yield from careless(child, expected=expected or child in inside, awaits=awaits)


def _sends(call: ast.Call, awaits: bool) -> bool:
    name = ast.unparse(call.func)
    itself = bool(call.args) and ast.unparse(call.args[0]) == "os.getpid()"
    return (name in SENDS and not itself) or (awaits and name.rpartition(".")[2] in ASYNC_SENDS)


def _is_ready(block: ast.Try | ast.With) -> bool:
    if isinstance(block, ast.Try):
        return any(_expects(handler.type) for handler in block.handlers)
    return any(_suppresses(item.context_expr) for item in block.items)


def _suppresses(context: ast.expr) -> bool:
    return (
        isinstance(context, ast.Call)
        and ast.unparse(context.func).rpartition(".")[2] == "suppress"
        and any(_expects(argument) for argument in context.args)
    )


def _expects(kinds: ast.expr | None) -> bool:
    return kinds is None or any(ast.unparse(each) in EXPECTED for each in getattr(kinds, "elts", [kinds]))
