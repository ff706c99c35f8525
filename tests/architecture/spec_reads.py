"""Finds which fields of the spec's sections the sources read, by the names that hold a section.

A name holds a section when it is annotated with it, assigned or iterated from something that holds it, or is itself a
field of a section. Reads in validators and in `problems` methods of serin/spec do not count: a key that is only
checked does nothing.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from serin.spec.pipeline import PipelineSpec
from serin.spec.section import Section
from serin.spec.steps.operators import operators

Holders = Mapping[str, set[str]]  # the names of sections that a name may hold
_PASSING = {
    "enumerate",
    "reversed",
    "sorted",
    "list",
    "tuple",
    "zip",
    "items",
    "values",
    "replace",
    "model_copy",
}
_TELLING = (
    ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign, ast.Assign, ast.NamedExpr, ast.For, ast.Call,
    ast.comprehension,
)  # fmt: skip


def all_sections() -> dict[str, type[Section]]:
    """Every section that a spec can hold, by the name of its class."""
    found: dict[str, type[Section]] = {}
    waiting: list[Any] = [PipelineSpec, *operators().values()]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, Section) and kind.__name__ not in found:
            found[kind.__name__] = kind
            waiting += [field.annotation for field in kind.model_fields.values()]
            waiting += [base for base in kind.__bases__ if base is not Section]
        else:
            waiting += get_args(kind)
    return found


def fields_read(trees: Iterable[ast.AST], sections: Mapping[str, type[Section]]) -> set[tuple[str, str]]:
    """(section, field) of every field that is read somewhere in `trees`."""
    trees = list(trees)
    telling = [[node for node in ast.walk(tree) if isinstance(node, _TELLING)] for tree in trees]
    everywhere: defaultdict[str, set[str]] = defaultdict(set)
    for section in sections.values():
        for name, field in section.model_fields.items():
            everywhere[name] |= {inner for inner in sections if inner in str(field.annotation)}
    locally = [defaultdict[str, set[str]](set) for _ in trees]
    for _ in range(4):  # assignments of assignments
        for nodes, local in zip(telling, locally, strict=True):
            _learn(nodes, local, everywhere, sections)
    return {
        read
        for tree, local in zip(trees, locally, strict=True)
        for read in _reads(tree, local, everywhere, sections)
    }


def _learn(
    nodes: Iterable[ast.AST],
    local: defaultdict[str, set[str]],
    everywhere: defaultdict[str, set[str]],
    sections: Mapping[str, type[Section]],
) -> None:
    for node in nodes:
        match node:
            case ast.arg(arg=name, annotation=ast.AST() as annotation):
                local[name] |= _sections_named(annotation, sections)
            case (
                ast.FunctionDef(name=name, returns=ast.AST() as returns)
                | ast.AsyncFunctionDef(name=name, returns=ast.AST() as returns)
            ):
                everywhere[name] |= _sections_named(returns, sections)
            case ast.AnnAssign(target=target, annotation=annotation):
                everywhere[_last(target)] |= _sections_named(annotation, sections)
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                _bind(target, value, local, everywhere)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                held = set[str]().union(*(_held(each, local, everywhere) for each in _passed(value)))
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        local[each.id] |= held
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.AST() as value, kinds]):
                local[_last(value)] |= _sections_named(kinds, sections)


def _bind(
    target: ast.AST, value: ast.AST, local: defaultdict[str, set[str]], everywhere: defaultdict[str, set[str]]
) -> None:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            _bind(one, other, local, everywhere)
        return
    held = set[str]().union(*(_held(each, local, everywhere) for each in _passed(value)))
    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
        (everywhere if isinstance(each, ast.Attribute) else local)[_last(each)] |= held


def _reads(
    tree: ast.AST, local: Holders, everywhere: Holders, sections: Mapping[str, type[Section]]
) -> Iterator[tuple[str, str]]:
    for node, inside in _walk(tree, sections):
        if not isinstance(node, ast.Attribute | ast.Call):
            continue
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Load()) if inside:
                held = {inside}
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
                held = _held(value, local, everywhere)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str() as attr), *_]):
                held = _held(value, local, everywhere)
            case _:
                continue
        yield from ((kind, attr) for kind in held if attr in sections[kind].model_fields)


def _walk(tree: ast.AST, sections: Mapping[str, type[Section]]) -> Iterator[tuple[ast.AST, str | None]]:
    """Every node with the section whose method it is in; what only checks a section is left out."""
    waiting: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.ClassDef):
            inside = node.name if node.name in sections else None
        elif isinstance(node, ast.FunctionDef) and inside and _only_checks(node):
            continue
        yield node, inside
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]


def _only_checks(node: ast.FunctionDef) -> bool:
    decorators = {_last(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list}
    return bool(decorators & {"field_validator", "model_validator"}) or "problems" in node.name


def _held(value: ast.AST, local: Holders, everywhere: Holders) -> set[str]:
    name = _last(value)
    own = set() if isinstance(value, ast.Attribute) else local.get(name, set())
    return own | everywhere.get(name, set()) | (local.get(name, set()) if name.startswith("_") else set())


def _passed(value: ast.AST) -> Iterator[ast.AST]:
    """What `value` gives on: x of `x or y`, of `enumerate(x)` and of `x.items()`."""
    match value:
        case ast.Call(func=ast.Name(id=name), args=args) if name in _PASSING:
            for each in args:
                yield from _passed(each)
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _PASSING:
            yield from _passed(inner)
        case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
            for each in values:
                yield from _passed(each)
        case ast.IfExp(body=body, orelse=other):
            yield from (body, other)
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
            yield from _passed(inner)
        case ast.Call(func=inner):
            yield inner
        case _:
            yield value


def _sections_named(annotation: ast.AST, sections: Mapping[str, type[Section]]) -> set[str]:
    return {
        name
        for node in ast.walk(annotation)
        if (
            name := node.id
            if isinstance(node, ast.Name)
            else node.attr
            if isinstance(node, ast.Attribute)
            else ""
        )
        in sections
    }


def _last(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last(inner)
    return ""
