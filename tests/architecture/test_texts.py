"""Texts from data are never numpy's fixed-width texts: they make every row as wide as the longest one, so a client that
sends one long string takes a terabyte of memory."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import python_files, tree

MAKERS = {
    "array",
    "asarray",
    "asanyarray",
    "ascontiguousarray",
    "unique",
    "concatenate",
    "stack",
    "fromiter",
    "full",
}
FIXED = re.compile(r"[<>=|]?[USa]\d*|str|bytes|unicode")


def fixed_width(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The calls in a source that make such texts: by their type, or from a list of texts without a type."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and each.attr == "char" and is_numpy(each.value):
            yield each.lineno, ast.unparse(each)
        if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute):
            continue
        name, numpy = each.func.attr, is_numpy(each.func.value) and each.func.attr in MAKERS
        if not numpy and name not in ("astype", "view"):
            continue
        kinds = [word.value for word in each.keywords if word.arg == "dtype"]
        kinds += each.args[1:3] if numpy else each.args[:1]
        untyped = numpy and not kinds and makes_texts(each.args[0])
        if untyped or any(map(is_fixed_type, kinds)):
            yield each.lineno, ast.unparse(each)


def is_numpy(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("np", "numpy")


def is_fixed_type(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FIXED.fullmatch(node.value) is not None
    return ast.unparse(node) in ("str", "bytes", "np.str_", "np.bytes_", "numpy.str_", "numpy.bytes_")


def makes_texts(node: ast.expr) -> bool:
    """Whether the elements are texts, or may be: Arrow's lists of values without a type."""
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return is_text(node.elt)
    if isinstance(node, ast.List | ast.Tuple):
        return any(
            makes_texts(each.value) if isinstance(each, ast.Starred) else is_text(each) for each in node.elts
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "to_pylist"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "sorted", "tuple", "set", "map"):
        return any(ast.unparse(each) == "str" or makes_texts(each) for each in node.args)
    return False


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("str", "repr") or (
            isinstance(node.func, ast.Attribute) and node.func.attr in ("decode", "as_py", "format", "join")
        )
    return isinstance(node, ast.JoinedStr)


def test_no_text_from_data_becomes_as_wide_as_the_longest() -> None:
    files = python_files("serin", "flows", "tasks", "triton_models", "deployments")
    found = [f"{name}:{line}: {text}" for name in files for line, text in fixed_width(tree(name))]
    assert len(files) > 600
    assert not found, "keep texts in Arrow, or as objects (dtype=object)"


@pytest.mark.parametrize(
    "source",
    [
        "values.astype(str)",
        "values.astype('U')",
        "values.astype('<U32')",
        "values.astype(dtype=np.str_)",
        "values.astype(np.bytes_).astype(object)",
        "np.asarray(texts, dtype=str)",
        "np.array(texts, 'S')",
        "np.full(3, text, np.str_)",
        "np.array(column.to_pylist())",
        "np.asarray([*column.to_pylist(), ''])",
        "np.unique([str(value) for value in values])",
        "np.array(list(map(str, values)))",
        "np.asarray([value.decode() for value in values])",
        "np.array([f'{a}-{b}' for a, b in pairs])",
        "np.char.add(left, right)",
    ],
)
def test_each_way_to_make_such_texts_is_found(source: str) -> None:
    assert list(fixed_width(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "values.astype(object)",
        "values.astype(np.int64)",
        "values.astype('<u4')",
        "np.array(column.to_pylist(), dtype=object)",
        "np.array([places.get(name, -1) for name in column.to_pylist()], np.int64)",
        "np.unique(codes)",
    ],
)
def test_other_arrays_are_left_alone(source: str) -> None:
    assert not list(fixed_width(ast.parse(source)))
