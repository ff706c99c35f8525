"""Every scenario of tests/parity on one machine; `make parity` runs them elsewhere. The last of this folder: what they
train and serve is left in the stack."""

import pytest

from tests.e2e.whole_stack import Stack
from tests.parity.place import Machine
from tests.parity.run import Cell, run
from tests.parity.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def cells(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    """All at once: those that wait run beside the others."""
    place = Machine(stack, tmp_path_factory.mktemp("parity"))
    return run(place, SCENARIOS, lambda name, cell: print(f"{cell.seconds:6.1f} s  {name}: {cell.outcome}"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_machine_passes_every_scenario(cells: dict[str, Cell], scenario: str) -> None:
    assert (cells[scenario].outcome, cells[scenario].why) == ("passed", "")
