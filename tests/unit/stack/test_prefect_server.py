from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A transaction waits for the write lock, and a cursor of its connection is garbage:
# the thread that collects it waits too.
PROGRAM = """
import gc, sqlite3, sys, threading, time
from serin.stack.prefect import server

class Cycle:
    pass

def connect():
    return sqlite3.connect(sys.argv[1], timeout=8, isolation_level=None, check_same_thread=False)

holder, waiter, ended = connect(), connect(), []
holder.execute("CREATE TABLE numbers (number)")
holder.execute("INSERT INTO numbers VALUES (1), (2)")
{collect}
left = Cycle()
left.self, left.cursor = left, waiter.execute("VALUES (1), (2)")  # a row is left: the statement is active
holder.execute("BEGIN IMMEDIATE")

def wait():
    try:
        waiter.execute("INSERT INTO numbers VALUES (3)")
        ended.append("written")
    except sqlite3.OperationalError as error:
        ended.append(str(error))

writing = threading.Thread(target=wait)
writing.start()
time.sleep(1)  # it is in SQLite's busy handler; too short a wait hides the stall and fails nothing
del left
{garbage}
time.sleep(3)
holder.execute("COMMIT")
writing.join()
print(ended[0])
"""


def run(tmp_path: Path, *, collect: str, garbage: str) -> str:
    program = PROGRAM.format(collect=collect, garbage=garbage)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "db")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_the_server_s_garbage_does_not_stop_its_loop(tmp_path: Path) -> None:
    assert run(tmp_path, collect="server.collect_beside()", garbage="") == "written"


def test_garbage_that_the_loop_collects_does(tmp_path: Path) -> None:
    assert run(tmp_path, collect="", garbage="gc.collect()") == "database is locked"
