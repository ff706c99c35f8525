import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serin.expressions import ExpressionError, Masked, _Parser, evaluate, parse


def column(values: list[object], dtype: str = "float64") -> Masked:
    null = np.array([value is None for value in values])
    return Masked(np.array([0 if value is None else value for value in values], dtype), null)


COLUMNS = {
    "a": column([1, 2, None, -4]),
    "b": column([2, 0, 5, None]),
    "n": column([1, 2, 3, 4], "int64"),
    "s": column(["x", "y", "z", "x"], "object"),
    "odd name": column([1, 1, 1, 1]),
}


def result(text: str) -> list[object]:
    values, null = evaluate(parse(text), COLUMNS)
    return [None if missing else value for value, missing in zip(values.tolist(), null.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a > 1", [False, True, None, False]),
        ("a + b * 2", [5, 2, None, None]),
        ("(a + b) * 2", [6, 4, None, None]),
        ("a / b", [0.5, None, None, None]),
        ("n % 2 == 0", [False, True, False, True]),
        ("-n + 1", [0, -1, -2, -3]),
        ("- (n - 2)", [1, 0, -1, -2]),
        ("a > 0 and b > 0", [True, False, None, False]),
        ("a > 0 or b > 0", [True, True, True, None]),
        ("not a > 0", [False, False, None, True]),
        ("is_null(a) or is_null(b)", [False, False, True, True]),
        ("s in ('x', 'z')", [True, False, True, True]),
        ('s == "y"', [False, True, False, False]),
        ("n = 2", [False, True, False, False]),
        ("max(n, 2) - min(n, 3)", [1, 0, 0, 1]),
        ("abs(a)", [1, 2, None, 4]),
        ("`odd name` == 1 and true", [True] * 4),
        ("a == null", [None] * 4),
    ],
)
def test_an_expression_gives_one_value_per_row(text: str, expected: list[object]) -> None:
    assert result(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("a >", "character 4"),
        ("a b", "after the end"),
        ("a > 1)", "after the end"),
        ("(a > 1", r"'\)' expected"),
        ("foo(a)", "unknown function 'foo'"),
        ("abs(a, b)", "takes 1"),
        ("a in (b)", "numbers and strings only"),
        ("a; import os", "unexpected ';'"),
        ("__import__('os')", "unknown function"),
        ("a.b", "unexpected '.'"),
        ("(" * 100 + "a" + ")" * 100, "too deeply"),
    ],
)
def test_an_invalid_expression_is_refused_with_its_position(text: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"), [("s > 1", "compared"), ("s + 1", "calculated"), ("z > 1", "no column 'z'")]
)
def test_columns_that_do_not_fit_are_refused(text: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says):
        evaluate(parse(text), COLUMNS)


def test_columns_are_named_once_in_order() -> None:
    assert parse("b > a and `odd name` < b").columns == ("b", "a", "odd name")


@given(st.text(alphabet="ab1 +-*/%()<>='\"`,.notrdiu_", max_size=30))
def test_any_text_parses_or_is_refused_cleanly(text: str) -> None:
    try:
        parse(text)
    except ExpressionError:
        return


@pytest.mark.parametrize("count", [1, 2, 3, 1_200, 5_000])
@pytest.mark.parametrize(("word", "wanted"), [("or", True), ("and", False)])
def test_any_number_of_conditions_may_be_joined(word: str, wanted: bool, count: int) -> None:
    """As many comparisons as a long list of values gives, with one that decides."""
    terms = [f"n {'==' if word == 'or' else '!='} {value + 100}" for value in range(count - 1)]
    text = f" {word} ".join([*terms, f"n {'>' if word == 'or' else '<'} 0"])
    assert result(text) == [wanted] * 4
    assert parse(text).columns == ("n",)
    assert parse(text).root.depth < 20


@given(st.lists(st.sampled_from(["a > 0", "b > 0", "is_null(a)", "null", "n > 2"]), min_size=1, max_size=12),
       st.sampled_from(["and", "or"]))  # fmt: skip
def test_joined_conditions_mean_what_they_mean_one_after_the_other(terms: list[str], word: str) -> None:
    text = terms[0]
    for term in terms[1:]:
        text = f"({text}) {word} {term}"
    assert result(f" {word} ".join(terms)) == result(text)


@pytest.mark.parametrize(
    "text",
    [
        "+".join(["n"] * 10_000),
        "*".join(["n"] * 10_000),
        "-" * 10_000 + "n" + " - n" * 1_000,
        "(" * 10_000 + "n" + ")" * 10_000,
        "not " * 3_000 + "(" * 100 + "n" + ")" * 100,
        "abs(" * 500 + "n" + ")" * 500,
        "n " * 100_000,
        "n" + " " * 300_000 + "$",
    ],
    ids=["sum", "product", "signs", "parentheses", "not", "calls", "words", "spaces"],
)
def test_an_expression_that_is_too_long_or_too_deep_is_refused_in_a_short_sentence(text: str) -> None:
    with pytest.raises(ExpressionError) as refusal:
        parse(text)
    assert len(str(refusal.value)) < 500


def test_a_sum_of_many_columns_is_computed() -> None:
    assert result("+".join(["n"] * 150)) == [150, 300, 450, 600]


def test_the_time_to_read_an_expression_grows_with_its_length() -> None:
    """Each character is looked at a bounded number of times: slices of the rest would make it quadratic."""

    class Counted(str):
        __slots__ = ()
        taken = 0

        def __getitem__(self, key: object) -> str:
            found = super().__getitem__(key)  # type: ignore[index]
            Counted.taken += len(found)
            return found

    text = Counted(" or ".join(f"n == {value}" for value in range(2_000)))
    _Parser(text)
    assert Counted.taken < 2 * len(text)
