import inspect
import pickle

import pytest

from serin import errors
from serin.errors import JoinNotManyToOne, Preempted, SerinError, SpecError, WorkerFailed, nearest

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SerinError)]


def test_an_error_survives_pickling_with_its_fields() -> None:
    error = JoinNotManyToOne(table="weather", on=["origin"], key="EWR", matches=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is JoinNotManyToOne
    assert (str(again), again.fields) == (str(error), error.fields)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_tree_in_the_docstring_names_every_error(kind: type[SerinError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_exit_codes_tell_a_bad_spec_from_a_failure_from_a_preemption() -> None:
    codes = (SpecError.exit_code, WorkerFailed.exit_code, Preempted.exit_code)
    assert codes == (2, 1, 75)


def test_the_nearest_known_word_is_offered() -> None:
    assert nearest("normalise", ["normalize", "clip"]) == "; did you mean 'normalize'?"
    assert nearest("zzz", ["a", "b"]) == "; known: a, b"
    assert nearest("zzz", []) == ""
