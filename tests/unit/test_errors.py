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


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if hasattr(kind, "template")], ids=lambda kind: kind.__name__
)
def test_a_message_is_made_of_the_fields_alone(kind: type[SerinError]) -> None:
    values = {
        name: _example(hint)
        for name, hint in errors.get_type_hints(kind).items()
        if name in errors._fields_of(kind)
    }
    error = kind(**values)
    assert str(error).strip()
    assert "{" not in str(error).replace("columns: {", "")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_unknown_or_missing_field_is_refused() -> None:
    with pytest.raises(TypeError, match="WorkerFailed takes the fields"):
        WorkerFailed(rank=0, exit_code=1, log="log")
    with pytest.raises(TypeError, match="takes the fields"):
        WorkerFailed(rank=0)


def _example(hint: object) -> object:
    if hint in (int, float, bool):
        return 3
    text = str(hint)
    if "tuple[str, str]" in text:
        return ("a", "b") if text.startswith("tuple") else [("a", "b")]
    return ["a"] if "Iterable" in text else "a"


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


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("wieght", "; did you mean 'weight'?"),
        ("WEIGHT", "; did you mean 'weight'?"),
        ("sise", "; did you mean 'Size'?"),
        ("wait", "; known: Size, carrier, weight"),
        ("target", "; known: Size, carrier, weight"),
    ],
)
def test_only_a_close_word_is_suggested_and_else_all_are_named(word: str, says: str) -> None:
    assert nearest(word, ["weight", "Size", "carrier"]) == says
