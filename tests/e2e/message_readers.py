"""What protobuf reads in a message, and what a reader of the gateway makes of the same: equal, refused or wrong."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from tests.e2e.fuzz_messages import drawn_messages

TOO_LARGE = "an input's shape claims more elements than the request can hold"
UNREADABLE = "the message cannot be read"
_REFUSALS = (TOO_LARGE, UNREADABLE)

# Of each message: what is read in it as a ModelInferRequest, and as a ModelReadyRequest.
Reader = Callable[[Sequence[bytes]], list[tuple[str, str]]]


def believed_by_protobuf(message: bytes, *, tensors: bool = True) -> str:
    """One line, as the filter's own test programs write it; what is wrong with it where protobuf cannot read it."""
    kind = service_pb2.ModelInferRequest if tensors else service_pb2.ModelReadyRequest
    try:
        parsed = kind.FromString(message)
    except DecodeError:
        return UNREADABLE
    if not tensors:
        return f"{_hex(parsed.name)} {_hex(parsed.version)}"
    inputs = [(_hex(each.name), _hex(each.datatype), list(each.shape)) for each in parsed.inputs]
    if not all(_fits(shape, len(message)) for _, _, shape in inputs):
        return TOO_LARGE
    parts = [f"{name}/{dtype}/{','.join(map(str, shape))}" for name, dtype, shape in inputs]
    raw = ",".join(str(len(each)) for each in parsed.raw_input_contents)
    return f"{_hex(parsed.model_name)} {_hex(parsed.model_version)} {';'.join(parts)} {raw}"


def plainly_written(message: bytes) -> bytes:
    """The same as protobuf itself writes it, without what it does not know: no filter may refuse that."""
    parsed = service_pb2.ModelInferRequest.FromString(message)
    parsed.DiscardUnknownFields()
    return bytes(parsed.SerializeToString())


def _hex(text: str) -> str:
    return text.encode().hex()


def _fits(shape: list[int], limit: int) -> bool:
    count = 1
    for size in shape:
        if not 0 <= size <= limit or count * size > limit:
            return False
        count *= size
    return True


@dataclass(slots=True)
class Compared:
    """Of messages that a reader and protobuf were given; `plain`: written by protobuf itself and taken by both."""

    messages: int = 0
    equal: int = 0
    refused: int = 0
    plain: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"messages={self.messages} equal={self.equal} refused={self.refused}"
        return f"{counts} plain={self.plain} wrong={len(self.wrong)}"

    def add(self, message: bytes, found: tuple[str, str]) -> None:
        """A reader may refuse what protobuf reads, but not read it otherwise."""
        self.messages += 1
        meant = believed_by_protobuf(message), believed_by_protobuf(message, tensors=False)
        for one, other in zip(found, meant, strict=True):
            if one not in (other, UNREADABLE):
                self._note(message, one, other)
        self.equal += found[0] == meant[0] and found[0] not in _REFUSALS
        self.refused += found[0] in _REFUSALS

    def add_plain(self, message: bytes, found: str) -> None:
        """What protobuf itself writes must be taken, unless a shape is too large."""
        meant = believed_by_protobuf(message)
        if found != meant:
            self._note(message, found, meant)
        self.plain += found not in _REFUSALS

    def _note(self, message: bytes, found: str, meant: str) -> None:
        self.wrong.append(f"{message.hex()}: read as {found!r}, by protobuf as {meant!r}")


def compare(read: Reader, *, number: int, count: int) -> Compared:
    """`count` drawn messages, and those that protobuf can read as it writes them again."""
    found = Compared()
    messages = list(drawn_messages(number, count))
    plain = [plainly_written(each) for each in messages if believed_by_protobuf(each) != UNREADABLE]
    lines = read([*messages, *plain])
    for message, line in zip(messages, lines[:count], strict=True):
        found.add(message, line)
    for message, line in zip(plain, lines[count:], strict=True):
        found.add_plain(message, line[0])
    return found


def packed(messages: Sequence[bytes]) -> bytes:
    """As the filter's test programs read them: each behind its length."""
    return b"".join(struct.pack("<I", len(each)) + each for each in messages)
