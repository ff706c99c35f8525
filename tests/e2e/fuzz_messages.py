"""Messages of gRPC that two readers could take differently, drawn by structure.

`drawn_messages` knows how a ModelInferRequest is written. It writes one, changes its fields (repeats, reorders, merges,
retypes, adds), writes some numbers longer than needed or wrong, and now and then cuts or glues the bytes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.unit.serving.bundles import MODEL

OTHER = "other"  # a model that is served, too

NUMBER, EIGHT_BYTES, LENGTH, GROUP, GROUP_END, FOUR_BYTES = range(6)
_MODELS = [MODEL] * 6 + [OTHER] * 3 + ["", "Ü", "a,b", f"{MODEL},{OTHER}", "x" * 64, f"{MODEL}\0"]
_VERSIONS = ["", "1", "1", "2", "01", "-1", "none", "9" * 20]
_NAMES = ["temp", "carrier", "größe", "", "雪", "x" * 130]
_TYPES = ["FP32", "BYTES", "INT64", "", "fp32"]
_SIZES = [0, 1, 1, 1, 2, 2, 3, 4, 127, 128, 300, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -1, -2, -(2**63)]
_NUMBERS = [0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 9, 15, 16, 17, 100, 2047, 2048, 19_000, 2**29 - 1]
_NOT_TEXT = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82",
    b"a\x80",
    b"\xf0\x80\x80\x80",
]


@dataclass(slots=True)
class Field:
    """One field as it is written. `value`: a number, bytes, or the fields of a message. The rest is what is wrong."""

    number: int
    wire: int
    value: Any
    longer_tag: int = 0  # bytes more than it needs
    longer_length: int = 0
    longer_value: int = 0
    too_large: int = 0  # added to the tag, or to a length
    lies: int = 0

    def write(self) -> bytes:
        tag = varint((self.number << 3 | self.wire) + self.too_large, self.longer_tag)
        if self.wire == NUMBER:
            return tag + varint(self.value % 2**64, self.longer_value)
        if self.wire != LENGTH:
            return tag + bytes(self.value)
        content = written(self.value) if isinstance(self.value, list) else self.value
        return tag + varint(max(len(content) + self.lies, 0), self.longer_length) + content


def varint(value: int, longer: int = 0) -> bytes:
    """`longer`: so many bytes more than it needs; they say nothing."""
    found = bytearray()
    while value >= 128:
        found.append(128 | value & 127)
        value >>= 7
    found.append(value)
    if longer:
        found[-1] |= 128
        found += b"\x80" * (longer - 1) + b"\0"
    return bytes(found)


def written(fields: list[Field]) -> bytes:
    return b"".join(each.write() for each in fields)


def drawn_messages(number: int, count: int) -> Iterator[bytes]:
    """With the same `number` the same ones."""
    draw = random.Random(number)
    for _ in range(count):
        fields = _request(draw)
        for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
            _change(draw, fields)
        message = written(fields)
        if draw.random() < 0.1:
            message = _spoiled(draw, message)
        yield message


# how a request is written


def _request(draw: random.Random) -> list[Field]:
    fields = [Field(1, LENGTH, draw.choice(_MODELS).encode())]
    if draw.random() < 0.5:
        fields.append(Field(2, LENGTH, draw.choice(_VERSIONS).encode()))
    if draw.random() < 0.2:
        fields.append(Field(3, LENGTH, b"some id"))
    fields += [Field(4, LENGTH, _entry(draw)) for _ in range(draw.choice([0, 0, 0, 1, 2]))]
    fields += [Field(5, LENGTH, _input(draw)) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    if draw.random() < 0.2:
        fields.append(Field(6, LENGTH, [Field(1, LENGTH, b"score"), Field(2, LENGTH, _entry(draw))]))
    fields += [Field(7, LENGTH, bytes(draw.choice([0, 4, 300]))) for _ in range(draw.randrange(3))]
    return fields


def _input(draw: random.Random) -> list[Field]:
    fields = [Field(1, LENGTH, draw.choice(_NAMES).encode()), Field(2, LENGTH, draw.choice(_TYPES).encode())]
    fields += _shape(draw, [draw.choice(_SIZES[:9]) for _ in range(draw.choice([0, 1, 2, 2, 3]))])
    if draw.random() < 0.15:
        fields.append(Field(4, LENGTH, _entry(draw)))
    if draw.random() < 0.3:
        fields.append(Field(5, LENGTH, _contents(draw)))
    return fields


def _shape(draw: random.Random, sizes: list[int]) -> list[Field]:
    """Packed, one by one, or some of both, which protobuf joins."""
    cut = draw.choice([0, len(sizes), draw.randrange(len(sizes) + 1)])
    packed = b"".join(varint(size % 2**64) for size in sizes[:cut])
    fields = [Field(3, LENGTH, packed)] if cut or draw.random() < 0.1 else []
    return fields + [Field(3, NUMBER, size) for size in sizes[cut:]]


def _entry(draw: random.Random) -> list[Field]:
    value = draw.choice(
        [Field(1, NUMBER, 1), Field(2, NUMBER, -5), Field(3, LENGTH, b"x"), Field(4, EIGHT_BYTES, bytes(8))]
    )
    return [Field(1, LENGTH, draw.choice([b"priority", b"x", "ü".encode()])), Field(2, LENGTH, [value])]


def _contents(draw: random.Random) -> list[Field]:
    packed = {
        1: b"\1\0",
        2: varint(2**64 - 1),
        3: b"\5\xff\1",
        4: b"\7",
        5: varint(2**64 - 2),
        6: bytes(8),
        7: bytes(8),
    }
    alone = {
        6: Field(6, FOUR_BYTES, bytes(4)),
        7: Field(7, EIGHT_BYTES, bytes(8)),
        8: Field(8, LENGTH, b"\xff\0"),
    }
    number = draw.randrange(1, 9)
    if number == 8 or draw.random() < 0.4:
        return [alone.get(number, Field(number, NUMBER, draw.choice([0, 1, 2**31, -1])))] * draw.randrange(
            1, 3
        )
    return [Field(number, LENGTH, packed[number])]


# what is changed


def _change(draw: random.Random, fields: list[Field]) -> None:
    """One thing, somewhere in the message or in a message inside."""
    inside = [each.value for each in fields if isinstance(each.value, list)]
    if inside and draw.random() < 0.45:
        _change(draw, draw.choice(inside))
        return
    at = draw.randrange(len(fields)) if fields else 0
    change = draw.choice(
        [_repeat, _repeat, _add, _add, _retype, _miswrite, _miswrite, _resize, _join, _shuffle, _text]
    )
    change(draw, fields, at)


def _repeat(draw: random.Random, fields: list[Field], at: int) -> None:
    """A name or a version again, at the end or before; or any field."""
    if draw.random() < 0.5 or not fields:
        again = Field(draw.choice([1, 2]), LENGTH, draw.choice([*_MODELS, *_VERSIONS]).encode())
    else:
        again = fields[at]
    fields.insert(draw.choice([0, len(fields), draw.randrange(len(fields) + 1)]), again)


def _add(draw: random.Random, fields: list[Field], at: int) -> None:
    """A field of any number and type: unknown ones, and known ones of another type."""
    number, wire = (
        draw.choice(_NUMBERS),
        draw.choice([NUMBER, EIGHT_BYTES, LENGTH, LENGTH, GROUP, FOUR_BYTES, 6, 7]),
    )
    hidden = written([Field(1, LENGTH, OTHER.encode())])
    added = [Field(number, wire, draw.choice([hidden, b"", b"\x80", draw.randbytes(4)]))]
    if wire == NUMBER:
        added = [Field(number, wire, draw.choice(_SIZES))]
    elif wire in (EIGHT_BYTES, FOUR_BYTES):
        added = [Field(number, wire, draw.randbytes(8 if wire == EIGHT_BYTES else 4))]
    elif wire == GROUP:
        added = [Field(number, GROUP, hidden), Field(number + (draw.random() < 0.1), GROUP_END, b"")]
    place = draw.choice([0, at, len(fields)])
    fields[place:place] = added


def _retype(draw: random.Random, fields: list[Field], at: int) -> None:
    """The same bytes under another number, or as another type."""
    if fields:
        old = fields[at]
        value = written(old.value) if isinstance(old.value, list) else old.value
        value = varint(value % 2**64) if isinstance(value, int) else value
        fields[at] = Field(draw.choice([old.number, *_NUMBERS]), LENGTH, value)


def _miswrite(draw: random.Random, fields: list[Field], at: int) -> None:
    if not fields:
        return
    wrong = draw.choice(["longer_tag", "longer_length", "longer_value", "too_large", "lies"])
    some = {"too_large": [2**32, 2**35, 2**40, 2**63], "lies": [-1, 1, 5, 2**31, 2**32, 2**63]}
    changed = Field(fields[at].number, fields[at].wire, fields[at].value)
    setattr(changed, wrong, draw.choice(some.get(wrong, [1, 1, 2, 3, 4, 5, 8, 9, 12])))
    fields[at] = changed


def _resize(draw: random.Random, fields: list[Field], at: int) -> None:
    fields += _shape(draw, [draw.choice(_SIZES) for _ in range(draw.randrange(1, 4))])


def _join(draw: random.Random, fields: list[Field], at: int) -> None:
    """Another message behind this one: of what may be there once protobuf takes the last, or merges."""
    fields += _request(draw) if draw.random() < 0.6 else _input(draw)


def _shuffle(draw: random.Random, fields: list[Field], at: int) -> None:
    draw.shuffle(fields)


def _text(draw: random.Random, fields: list[Field], at: int) -> None:
    texts = [
        place for place, each in enumerate(fields) if isinstance(each.value, bytes) and each.wire == LENGTH
    ]
    if texts:
        place = draw.choice(texts)
        fields[place] = Field(fields[place].number, LENGTH, fields[place].value + draw.choice(_NOT_TEXT))


def _spoiled(draw: random.Random, message: bytes) -> bytes:
    at = draw.randrange(len(message) + 1)
    match draw.randrange(4):
        case 0:
            return message[:at]
        case 1:
            return message[:at] + draw.randbytes(draw.randrange(1, 12)) + message[at:]
        case 2:
            return message[:at] + bytes([draw.randrange(256)]) + message[at + 1 :]
        case _:
            return message + message
