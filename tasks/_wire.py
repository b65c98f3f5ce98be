"""The protocol of the children of `_sandbox`: plain values as JSON, one message per line. Standard library only."""

import collections
import datetime
import decimal
import fractions
import json
import os
from collections.abc import Callable
from typing import Any

PLAIN = (type(None), bool, str)
MOST_BYTES = 8 << 20  # of one message


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A plain value as JSON. Instances of subclasses become their plain base; `keep` gives other objects a number."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, int):
        return ["i", hex(int.__int__(value))]
    if isinstance(value, float):
        return ["f", float.hex(float.__float__(value))]
    if isinstance(value, str):
        return str.__str__(value)
    base: Any
    for name, base in (("l", list), ("t", tuple), ("s", set), ("z", frozenset), ("q", collections.deque)):
        if isinstance(value, base):
            return [name, [encode(item, keep) for item in base.__iter__(value)]]
    if isinstance(value, dict):
        return ["d", [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]]
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "a", bytes(value).hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is range:
        return ["r", hex(value.start), hex(value.stop), hex(value.step)]
    if kind is fractions.Fraction:
        return ["F", hex(value.numerator), hex(value.denominator)]
    if kind is decimal.Decimal:
        return ["D", str(value)]
    if kind is datetime.timedelta:
        return ["m", value.days, value.seconds, value.microseconds]
    if kind in (datetime.date, datetime.datetime, datetime.time):
        return ["T", kind.__name__, value.isoformat()]
    return ["h", keep(value)]


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """The value that `encode` wrote; `kept` returns the object with a number. Other data may raise any exception."""
    if type(data) in PLAIN:
        return data
    name, *rest = data
    match name:
        case "i":
            return int(rest[0], 16)
        case "f":
            return float.fromhex(rest[0])
        case "l" | "t" | "s" | "z" | "q":
            base = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}[name]
            return base([decode(item, kept) for item in rest[0]])
        case "d":
            return {decode(key, kept): decode(item, kept) for key, item in rest[0]}
        case "b" | "a":
            return (bytes if name == "b" else bytearray).fromhex(rest[0])
        case "c":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "r":
            return range(*(int(part, 16) for part in rest))
        case "F":
            return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))
        case "D":
            return decimal.Decimal(rest[0])
        case "m":
            return datetime.timedelta(*(int(part) for part in rest))
        case "T":
            return {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}[rest[0]].fromisoformat(
                rest[1]
            )
        case "h":
            return kept(int(rest[0]))
    raise ValueError(f"no value: {name!r}")


class Line:
    """A connection of two pipes that carries JSON messages, one per line."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")

    def send(self, message: Any) -> None:
        self._write.write(json.dumps(message).encode() + b"\n")
        self._write.flush()

    def receive(self) -> Any:
        line = self._read.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the other side is gone, or says too much")
        return json.loads(line)
