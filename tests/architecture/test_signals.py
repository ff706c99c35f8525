"""A process may end at any moment before it is signalled: every caller says what happens then."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import ROOT, python_files, tree

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
