"""JSON requests as clients and attackers write them, and what the gateway must make of each, by Python's json."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

NULLS = {"FP32": "NaN", "FP64": "NaN", "INT64": "-9223372036854775808", "INT8": "-1", "BYTES": '""'}
BITS = {"INT64": 63, "INT32": 31, "INT16": 15, "INT8": 7}
_NUMBERS = (
    "0", "-0", "1", "-7", "2007.0", "2007.5", "-0.0", "0.0", "1e3", "1E+2", "10e-1", "15e-1", "1e400", "-1e-400",
    "0e99999999999", "1e-99999999999", "9223372036854775807", "9223372036854775808", "-9223372036854775808",
    "-9223372036854775809", "9.223372036854775807e18", "922337203685477580.8e1", "-9223372036854775808.000", "127.0",
    "128", "128.0", "-128.00", "-129e0", "100000000000000000000000000000.0e-10", "1000000000000000000000e-20", "1.0e18",
    "0.5", "3.4e38", "1e39", "12345678901234567890123", "NaN", "Infinity", "-Infinity",
)  # fmt: skip
_TEXTS = ('"a"', '""', '"null"', '"x\\"null,"', '"\\\\"', '"\\u00e9\\n"', '"ü 🐤"', '"[1,null]"', '"]"')
_OTHERS = (
    "null",
    "null",
    "null",
    "true",
    "false",
    "{}",
    '{"data": [null]}',
    "[]",
    "nul",
    "01",
    "+1",
    "1.",
    ".5",
    "",
)
_KEYS = ('"name"', '"datatype"', '"data"', '"shape"', '"parameters"')
_TYPES = (*NULLS, "INT32", "INT16", "INT64", "INT8", "BOOL", "UINT8", "fp32", "")
_NAMES = ("temp", "year", "the place", "rückbuchung", "q'uote")
_SPACES = ("", "", "", " ", "\n", "\t ", "\r\n")


Rewrite = Callable[[Sequence[bytes]], Sequence[str]]
"""What the filter makes of bodies, as `run_reader`'s last line says it."""


class Token(str):
    """A number or constant as it is written."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """The members of an object, repeated names included."""


class Odd(Exception):
    """The body is not what the protocol asks for: it must not be changed."""


class Refused(Exception):
    """The input and the place that must be named."""


@dataclass(slots=True)
class Compared:
    """`changed`, `same`, `refused`: bodies that Python can read; `unreadable`: others. `wrong`: with the body."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def read(body: bytes) -> Any:
    """The document with numbers as they are written; ValueError when Python cannot read it."""
    hooks = {"parse_int": Token, "parse_float": Token, "parse_constant": Token, "object_pairs_hook": Pairs}
    return json.JSONDecoder(strict=False, **hooks).decode(body.decode())  # type: ignore[arg-type]


def written_out(document: Any) -> tuple[Any, int]:
    """The document with its nulls written out, and how many bytes longer it is. Raises Odd or Refused."""
    grown: list[int] = []
    top = _object(document)
    if [key for key, _ in top].count("inputs") > 1:
        raise Odd
    return Pairs((key, _inputs(value, grown) if key == "inputs" else value) for key, value in top), sum(grown)


def _object(value: Any) -> Pairs:
    if not isinstance(value, Pairs):
        raise Odd
    return value


def _inputs(value: Any, grown: list[int]) -> list[Any]:
    if not isinstance(value, list) or isinstance(value, Pairs):
        raise Odd
    return [_input(_object(each), grown) for each in value]


def _input(members: Pairs, grown: list[int]) -> Pairs:
    for key in ("name", "datatype", "data"):
        found = [value for name, value in members if name == key]
        if len(found) > 1 or (found and key != "data" and type(found[0]) is not str):
            raise Odd
    known = dict(members)
    kind = known.get("datatype", "")
    if kind not in NULLS and kind not in BITS:
        return members
    name = re.sub(r"[\x00-\x1f\x7f]", "?", known.get("name", ""))
    changed = Pairs()
    for key, value in members:
        lists = key == "data" and isinstance(value, list) and not isinstance(value, Pairs)
        changed.append((key, _data(value, kind, f"input '{name}', data", grown) if lists else value))
    return changed


def _data(values: list[Any], kind: str, place: str, grown: list[int]) -> list[Any]:
    found = []
    for index, value in enumerate(values):
        here = f"{place}[{index}]"
        if isinstance(value, list) and not isinstance(value, Pairs):
            found.append(_data(value, kind, here, grown))
        else:
            found.append(_element(value, kind, here, grown))
    return found


def _element(value: Any, kind: str, place: str, grown: list[int]) -> Any:
    if value is None:
        if kind not in NULLS:
            raise Refused(place)
        grown.append(len(NULLS[kind]) - 4)
        return Token(NULLS[kind]) if kind != "BYTES" else ""
    if kind == "BYTES":
        if type(value) is not str:
            raise Refused(place)
        return value
    if not isinstance(value, Token):
        raise Refused(place)
    if kind.startswith("FP"):
        return value
    digits = _integer(value, BITS[kind])
    if digits is None:
        raise Refused(place)
    plain = value.lstrip("-").isdigit()
    grown.append(0 if plain else len(digits) - len(value))
    return value if plain else Token(digits)


def _integer(token: str, bits: int) -> str | None:
    number = re.fullmatch(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?", token)
    if number is None:  # NaN, Infinity
        return None
    sign, whole, part, exponent = (each or "" for each in number.groups())
    text, power = (whole + part).lstrip("0"), int(exponent or 0) - len(part)
    while power < 0 and text.endswith("0"):
        text, power = text[:-1], power + 1
    if not text:
        return "0"
    if power < 0 or len(text) + power > 19:
        return None
    exact = int(text + "0" * power) * (-1 if sign else 1)
    return str(exact) if -(2**bits) <= exact < 2**bits else None


def bodies(number: int, count: int) -> Iterator[bytes]:
    """Bodies drawn from a seed: most of them JSON, some of them damaged."""
    draw = random.Random(number)
    for _ in range(count):
        body = _body(draw).encode()
        yield _damaged(draw, body) if draw.random() < 0.25 else body


def _body(draw: random.Random) -> str:
    members = [f'"inputs"{_space(draw)}:{_list(draw, [_tensor(draw) for _ in range(draw.randrange(4))])}']
    if draw.random() < 0.3:
        members.append('"id":"null"')
    if draw.random() < 0.2:
        members.insert(0, '"parameters": {"data": [null, 2007.0], "inputs": null}')
    if draw.random() < 0.1:
        members.append(draw.choice(['"inputs":[]', '"inputs":null', '"outputs":[{"name":"score"}]']))
    draw.shuffle(members)
    return _space(draw) + "{" + ",".join(members) + "}" + _space(draw)


def _tensor(draw: random.Random) -> str:
    kind = draw.choice(_TYPES)
    members = {
        '"name"': json.dumps(draw.choice(_NAMES), ensure_ascii=False),
        '"datatype"': f'"{kind}"',
        '"shape"': "[1, 1]",
        '"data"': _values(draw, kind, 0),
    }
    pairs = list(members.items())
    if draw.random() < 0.06:
        pairs.append((draw.choice(_KEYS), draw.choice(["null", "[]", '"INT8"', "[null]", "3"])))
    if draw.random() < 0.05:
        pairs.pop(draw.randrange(len(pairs)))
    draw.shuffle(pairs)
    return "{" + ",".join(f"{_space(draw)}{key}{_space(draw)}:{value}" for key, value in pairs) + "}"


def _values(draw: random.Random, kind: str, depth: int) -> str:
    size = draw.randrange(5)
    if depth < draw.choice([1, 1, 2, 3, 40]) and draw.random() < 0.4:
        return _list(draw, [_values(draw, kind, depth + 1) for _ in range(min(size, 2))])
    fitting = _TEXTS if kind == "BYTES" else [each for each in _NUMBERS if _fits(each, kind)]
    every = [*_NUMBERS, *_TEXTS, *_OTHERS]
    return _list(
        draw,
        [
            draw.choice(every) if draw.random() < 0.03 else draw.choice(["null", *fitting])
            for _ in range(size)
        ],
    )


def _fits(token: str, kind: str) -> bool:
    return kind not in BITS or _integer(token, BITS[kind]) is not None


def _list(draw: random.Random, values: Sequence[str]) -> str:
    return "[" + ",".join(_space(draw) + value + _space(draw) for value in values) + "]"


def _space(draw: random.Random) -> str:
    return draw.choice(_SPACES)


def _damaged(draw: random.Random, body: bytes) -> bytes:
    damaged = bytearray(body)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(damaged) + 1)
        match draw.randrange(4):
            case 0:
                del damaged[at : at + draw.choice([1, 1, 5])]
            case 1:
                damaged[at:at] = draw.choice(
                    [b",", b"[", b"]", b'"', b"\\", b"null", b"\x00", b"\xff", b"}", b"{", b":", b" ", b"1e9"]
                )
            case 2 if at < len(damaged):
                damaged[at] = draw.randrange(256)
            case _:
                del damaged[at:]
        if not damaged:
            break
    return bytes(damaged)


def compare(rewrite: Rewrite, number: int, count: int, into: Compared | None = None) -> Compared:
    """Compares what the filter makes of bodies with what Python's json reads."""
    done = into or Compared()
    texts = list(bodies(number, count))
    for body, line in zip(texts, rewrite(texts), strict=True):
        if (problem := _problem(body, line, done.counts)) is not None:
            done.wrong.append(f"{problem}: {body!r} -> {line[:200]!r}")
    return done


def _problem(body: bytes, line: str, counts: Counter[str]) -> str | None:
    """What is wrong with a line, or None."""
    refused, result = line.startswith("!"), None if line.startswith("!") else bytes.fromhex(line)
    try:
        document = read(body)
    except (ValueError, RecursionError):
        counts["unreadable"] += 1
        return "made readable" if result and _readable(result) else None
    try:
        expected, grown = written_out(document)
    except Odd:
        counts["odd"] += 1
        return "an odd body was changed" if result else None
    except Refused as error:
        counts["refused"] += 1
        return None if refused and line[1:].startswith(f"{error}: ") else f"should name {error}"
    if refused:
        return "refused"
    if expected == document:
        counts["same"] += 1
        return "changed without need" if result else None
    counts["changed"] += 1
    if not result:
        return "not changed"
    good = read(result) == expected and len(result) == len(body) + grown
    return None if good else "another document"


def _readable(body: bytes) -> bool:
    try:
        read(body)
    except (ValueError, RecursionError):
        return False
    return True
