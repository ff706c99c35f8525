"""The scenarios of tests/parity that no other test plays on one machine; `make parity` runs all of them, and elsewhere.
The last of this folder: what they train and serve is left in the stack."""

import pytest

from tests.e2e.whole_stack import Stack
from tests.parity.place import Machine
from tests.parity.run import Cell, run
from tests.parity.scenarios import SCENARIOS

# Of these another test shows more, with the same parts on one machine.
ELSEWHERE = {
    "release": "tests/e2e/stack/test_stack_uses.py",
    "external server": "tests/e2e/test_objectives.py",
    "tune": "tests/e2e/test_serving_doors.py",
    "reason for a recorded answer": "tests/e2e/test_lookups.py",
    "lookups refreshed": "tests/e2e/test_lookups.py",
    "copy of a version, rolled out": "tests/e2e/stack/test_stack_copy.py",
    "drift alarm": "tests/e2e/stack/test_stack_watch.py",
    "sent run, own code and packages": "tests/flows/test_sent.py",
}
HERE = [name for name in SCENARIOS if name not in ELSEWHERE]


@pytest.fixture(scope="module")
def cells(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    """All at once: those that wait run beside the others."""
    place = Machine(stack, tmp_path_factory.mktemp("parity"))
    return run(place, HERE, lambda name, cell: print(f"{cell.seconds:6.1f} s  {name}: {cell.outcome}"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("scenario", HERE)
def test_a_machine_passes_the_scenario(cells: dict[str, Cell], scenario: str) -> None:
    assert (cells[scenario].outcome, cells[scenario].why) == ("passed", "")
