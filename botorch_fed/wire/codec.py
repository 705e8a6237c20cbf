r"""Encode and decode frozen dataclasses, and nothing else.

The layout is MessagePack (https://msgpack.org), read and written by the `msgpack` library::

    [format version, class name, [field, field, …]]        a message
    [field, field, …]                                      a dataclass inside it
    [class name, [field, field, …]]                        one of several dataclasses inside it
    [dtype, [dim, …], bin]                                 a tensor: little endian, row major

The data never choose a type: the caller of `decode` lists the classes that it may build, and the
annotations of their fields define the layout. Data that do not fit raise `MessageError`; no object
is built. Every number must be finite. Objects that are equal bit for bit have equal bytes, and
other bytes for the same object are refused, so that a broadcast can be addressed by its hash.

Allowed annotations: `bool`, `int` (64 bits, signed), `float`, `str`, `bytes`, `Tensor` (float64,
int64, uint8, bool), `Literal` of strings, `tuple[X, ...]`, `tuple[X, Y]`, `Mapping[str, X]`, frozen
dataclasses that do not contain themselves, unions of such dataclasses with different names, and
`X | None` of these. A class with any other annotation raises `TypeError` before any byte is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from numpy.typing import NDArray
from torch import Tensor

from botorch_fed.errors import MessageError

FORMAT_VERSION = 1
MAX_BYTES = 16 * 2**20
MAX_ITEMS = 200_000  # numbers, strings, tensors and containers of one message
MAX_DIMS = 8
MAX_ELEMENTS = 2**48
_DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "f8": (torch.float64, np.dtype("<f8")),
    "i8": (torch.int64, np.dtype("<i8")),
    "u1": (torch.uint8, np.dtype("u1")),
    "b1": (torch.bool, np.dtype("?")),
}
# MessagePack's formats, by their first byte: number of bytes that follow, or of the length.
_SCALARS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SCALARS |= {0xCA: 4, 0xCB: 8}  # floats
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # width, items of each
_CODES = {dtype: code for code, (dtype, _) in _DTYPES.items()}


def encode(message: Any, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a frozen dataclass.

    Args:
        message: An instance of a frozen dataclass with allowed annotations. A tensor is encoded
            without its device and its `requires_grad`.
        max_bytes: The largest result that is allowed.

    Raises:
        MessageError: A value does not fit its annotation, or the result is too large.
        TypeError: The class cannot be a message.
    """
    cls: Any = type(message)
    record = _record(cls)
    try:
        body = [FORMAT_VERSION, record.name, record.pack(message, _Budget())]
    except _Misfit as misfit:
        raise MessageError(misfit.text(record.name)) from misfit
    try:
        data: bytes = msgpack.packb(body, use_bin_type=True)
    except (ValueError, OverflowError) as error:  # e.g. a lone surrogate in a string
        raise MessageError(f"{record.name} cannot be encoded: {type(error).__name__}.") from error
    if len(data) > max_bytes:
        raise MessageError(
            f"{record.name} takes {len(data):,} bytes, the limit is {max_bytes:,}: send fewer "
            "numbers, or raise max_bytes on both sides."
        )
    return data


def decode(data: bytes, *expected: type, max_bytes: int = MAX_BYTES, own: bool = False) -> Any:
    """The object in some bytes, which must be of one of the expected classes.

    Args:
        data: Bytes from `encode`, or from an untrusted sender.
        expected: The frozen dataclasses that are accepted, of different names.
        max_bytes: The longest data that are read.
        own: Whether this program has made the bytes, as their hash says, so that they need not be
            compared with the one form that `encode` gives.

    Raises:
        MessageError: The data are too long, malformed, of another version or class, or hold a
            value that their class does not allow.
        TypeError: An expected class cannot be a message.
    """
    records = {cls.__name__: _record(cls) for cls in expected}
    if len(records) < len(expected):
        raise TypeError("The expected classes must have different names.")
    if not isinstance(data, bytes):
        raise MessageError(f"Expected bytes, got {type(data).__name__}.")
    if len(data) > max_bytes:
        raise MessageError(f"Expected at most {max_bytes:,} bytes, got {len(data):,}.")
    body = _read(data)
    if type(body) is not list or len(body) != 3:
        raise MessageError("The bytes are no message: expected version, class name and fields.")
    version, name, fields = body
    if version != FORMAT_VERSION or type(version) is not int:
        raise MessageError(
            f"The message has format {_shown(version)}, this release reads {FORMAT_VERSION}: both "
            "sides need the same release of botorch_fed."
        )
    record = records.get(name) if type(name) is str else None
    if record is None:
        wanted = " or ".join(records) or "nothing"
        raise MessageError(f"Expected {wanted} here, got {_shown(name)}.")
    try:
        result = record.unpack(fields, _Budget())
    except _Misfit as misfit:
        raise MessageError(misfit.text(record.name)) from misfit
    if not own and encode(result, max_bytes=len(data)) != data:
        raise MessageError(f"{record.name} is not in its one canonical form.")
    return result


def content_hash(data: bytes) -> str:
    """SHA-256 of some bytes in hexadecimal: the address of a broadcast."""
    return hashlib.sha256(data).hexdigest()


def _read(data: bytes) -> Any:
    limit = len(data)
    _check_count(data)
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=min(limit, MAX_ITEMS),
            max_map_len=min(limit, MAX_ITEMS),
            max_ext_len=0,
        )
    except MessageError:
        raise
    except (ValueError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"{limit:,} bytes are no message: {type(error).__name__}.") from error


def byte_strings(data: bytes, least: int) -> Iterator[tuple[int, int]]:
    """First and last byte of every string of at least `least` bytes, tensors included.

    Too many items raise `MessageError`; other malformed data are left to the decoder.
    """
    at, open_items, left = 0, 1, 2 * MAX_ITEMS + 16  # a tensor is a few items more than it pays for
    while open_items > 0 and at < len(data):
        kind = data[at]
        open_items, left, at = open_items - 1, left - 1, at + 1
        if left < 0:
            raise MessageError(f"The message has more than {MAX_ITEMS:,} items.")
        if kind in _SCALARS:
            at += _SCALARS[kind]
        elif 0xA0 <= kind <= 0xBF:  # a short string
            at += kind & 0x1F
        elif kind in _STRINGS:
            width = _STRINGS[kind]
            start = at + width
            at = start + int.from_bytes(data[at:start], "big")
            if start + least <= at <= len(data):
                yield start, at
        elif 0x80 <= kind <= 0x9F:  # a short map or list
            open_items += (kind & 0x0F) * (2 if kind < 0x90 else 1)
        elif kind in _CONTAINERS:
            width, each = _CONTAINERS[kind]
            open_items += each * int.from_bytes(data[at : at + width], "big")
            at += width


def _check_count(data: bytes) -> None:
    """Refuse data with too many items before any object is built.

    A million empty lists take a megabyte on the wire and seventy in memory.
    """
    for _ in byte_strings(data, len(data)):
        pass


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MessageError("A mapping names a key twice.")
    if any(type(key) is not str for key in result):
        raise MessageError("The keys of a mapping must be strings.")
    return result


def _shown(value: object) -> str:
    """An untrusted value for an error text: a short string, or the type of anything else."""
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


class _Misfit(Exception):
    """A value that does not fit its annotation, with the path to it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def at(self, step: str) -> _Misfit:
        self.path.append(step)
        return self

    def text(self, name: str) -> str:
        return f"{name}{''.join(reversed(self.path))} {self.reason}."


class _Budget:
    """The number of items that a message may still hold."""

    def __init__(self) -> None:
        self.left = MAX_ITEMS

    def pay(self, items: int) -> None:
        self.left -= items
        if self.left < 0:
            raise _Misfit(f"makes the message exceed {MAX_ITEMS:,} items")


# ------------------------------------------------------------------ annotations


class _Kind(ABC):
    """One allowed annotation: it packs its values into plain ones, and unpacks them."""

    @abstractmethod
    def pack(self, value: Any, budget: _Budget) -> Any: ...

    @abstractmethod
    def unpack(self, value: Any, budget: _Budget) -> Any: ...


class _Scalar(_Kind):
    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def pack(self, value: Any, budget: _Budget) -> Any:
        if self.cls is float and type(value) is int:
            try:
                exact = float(value) == value
            except OverflowError:
                exact = False
            if not exact:
                raise _Misfit("must be a number that a float holds exactly")
            value = float(value)
        return self.unpack(value, budget)

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not self.cls:
            raise _Misfit(f"must be {self.cls.__name__}, got {type(value).__name__}")
        if self.cls is float and not math.isfinite(value):
            raise _Misfit("must be finite")
        if self.cls is int and not -(2**63) <= value < 2**63:
            raise _Misfit("must fit into 64 bits")
        return value


class _Choice(_Kind):
    def __init__(self, values: tuple[str, ...]) -> None:
        self.values = values

    def pack(self, value: Any, budget: _Budget) -> Any:
        return self.unpack(value, budget)

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not str or value not in self.values:
            raise _Misfit(f"must be one of {self.values}, got {_shown(value)}")
        return value


class _Optional(_Kind):
    def __init__(self, inner: _Kind) -> None:
        self.inner = inner

    def pack(self, value: Any, budget: _Budget) -> Any:
        return None if value is None else self.inner.pack(value, budget)

    def unpack(self, value: Any, budget: _Budget) -> Any:
        return None if value is None else self.inner.unpack(value, budget)


class _Tuple(_Kind):
    """A fixed number of items, or any number of one kind."""

    def __init__(self, items: list[_Kind], *, repeated: bool) -> None:
        self.items = items
        self.repeated = repeated

    def _kinds(self, count: int, budget: _Budget) -> list[_Kind]:
        budget.pay(count)
        if self.repeated:
            return self.items * count
        if count != len(self.items):
            raise _Misfit(f"must have {len(self.items)} items, got {count}")
        return self.items

    def _are_names(self, values: Any) -> bool:
        """Whether it is any number of strings, and these are: rosters have thousands."""
        kind = self.items[0] if self.repeated else None
        return type(kind) is _Scalar and kind.cls is str and {*map(type, values)} == {str}

    def pack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not tuple:
            raise _Misfit(f"must be a tuple, got {type(value).__name__}")
        if self._are_names(value):
            budget.pay(len(value))
            return list(value)
        return _each("pack", self._kinds(len(value), budget), value, budget)

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not list:
            raise _Misfit(f"must be a list, got {type(value).__name__}")
        if self._are_names(value):
            budget.pay(len(value))
            return tuple(map(sys.intern, value))  # the agents of a process have one roster
        return tuple(_each("unpack", self._kinds(len(value), budget), value, budget))


def _each(
    job: Literal["pack", "unpack"], kinds: list[_Kind], values: Any, budget: _Budget
) -> list[Any]:
    result = []
    for i, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        try:
            result.append(getattr(kind, job)(value, budget))
        except _Misfit as misfit:
            raise misfit.at(f"[{i}]") from None
    return result


class _Mapping(_Kind):
    def __init__(self, item: _Kind) -> None:
        self.item = item

    def _items(self, job: Literal["pack", "unpack"], value: Any, budget: _Budget) -> dict[str, Any]:
        budget.pay(2 * len(value))
        result = {}
        for key, item in value.items():
            try:
                result[key] = getattr(self.item, job)(item, budget)
            except _Misfit as misfit:
                raise misfit.at(f"[{_shown(key)}]") from None
        return result

    def pack(self, value: Any, budget: _Budget) -> Any:
        if not isinstance(value, Mapping):
            raise _Misfit(f"must be a mapping, got {type(value).__name__}")
        plain = dict(value)
        if any(type(key) is not str for key in plain):
            raise _Misfit("must have strings as keys")
        # Sorted: equal mappings have equal bytes.
        return self._items("pack", {key: plain[key] for key in sorted(plain)}, budget)

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not dict:
            raise _Misfit(f"must be a mapping, got {type(value).__name__}")
        return self._items("unpack", value, budget)  # unsorted keys are not canonical


class _Array(_Kind):
    """A tensor."""

    def pack(self, value: Any, budget: _Budget) -> Any:
        if not isinstance(value, Tensor):
            raise _Misfit(f"must be a tensor, got {type(value).__name__}")
        code = _CODES.get(value.dtype)
        if code is None:
            raise _Misfit(f"must be one of {sorted(map(str, _CODES))}, got {value.dtype}")
        if value.layout != torch.strided or value.is_meta:
            raise _Misfit("must be an ordinary dense tensor")
        budget.pay(3 + value.dim())
        shape = list(value.shape)
        self._check_shape(shape)
        try:
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise _Misfit("must be an ordinary dense tensor") from error
        array = plain.astype(_DTYPES[code][1], copy=False)
        data = array.tobytes()
        self._check_values(code, array, data)
        return [code, shape, data]

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not list or len(value) != 3:
            raise _Misfit("must be a tensor")
        code, shape, data = value
        if type(code) is not str or code not in _DTYPES:
            raise _Misfit(f"must have a type of {sorted(_DTYPES)}, got {_shown(code)}")
        if type(shape) is not list or type(data) is not bytes:
            raise _Misfit("must be a tensor with a shape and bytes")
        budget.pay(3 + len(shape))
        self._check_shape(shape)
        dtype, layout = _DTYPES[code]
        if math.prod(shape) * layout.itemsize != len(data):
            raise _Misfit(f"of shape {shape} does not fit its {len(data):,} bytes")
        array = np.frombuffer(data, dtype=layout).reshape(shape)
        self._check_values(code, array, data)
        native = array.astype(layout.newbyteorder("="), copy=True)
        return torch.from_numpy(native).to(dtype)

    @staticmethod
    def _check_shape(shape: list[Any]) -> None:
        if len(shape) > MAX_DIMS:
            raise _Misfit(f"must have at most {MAX_DIMS} dimensions, got {len(shape)}")
        if any(type(size) is not int or size < 0 for size in shape):
            raise _Misfit("must have sizes that are integers >= 0")
        # A size of zero counts as one: the other sizes would be unbounded otherwise.
        if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
            raise _Misfit(f"must have at most {MAX_ELEMENTS:,} elements")

    @staticmethod
    def _check_values(code: str, array: NDArray[Any], data: bytes) -> None:
        if code == "f8" and not bool(np.isfinite(array).all()):
            raise _Misfit("must be finite: it has NaN or infinite entries")
        if code == "b1" and data.strip(b"\x00\x01"):
            raise _Misfit("must hold 0 and 1 only")


class _Record(_Kind):
    """A frozen dataclass."""

    def __init__(self, cls: type, fields: dict[str, _Kind]) -> None:
        self.cls = cls
        self.name = cls.__name__
        self.fields = fields

    def pack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not self.cls:
            raise _Misfit(f"must be {self.name}, got {type(value).__name__}")
        budget.pay(1 + len(self.fields))
        result = []
        for name, kind in self.fields.items():
            try:
                result.append(kind.pack(getattr(value, name), budget))
            except _Misfit as misfit:
                raise misfit.at(f".{name}") from None
        return result

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not list or len(value) != len(self.fields):
            got = f"{len(value)} fields" if type(value) is list else type(value).__name__
            raise _Misfit(f"must have {len(self.fields)} fields, got {got}")
        budget.pay(1 + len(self.fields))
        arguments = {}
        for item, (name, kind) in zip(value, self.fields.items(), strict=True):
            try:
                arguments[name] = kind.unpack(item, budget)
            except _Misfit as misfit:
                raise misfit.at(f".{name}") from None
        try:
            return self.cls(**arguments)
        except (InputDataError, MessageError) as error:  # their texts hold no data
            raise _Misfit(f"is not valid: {str(error).rstrip('.')[:300]}") from error
        except Exception as error:  # other errors of the class's validation
            raise _Misfit(f"is not valid: {type(error).__name__}") from error


class _Union(_Kind):
    """One of a closed set of frozen dataclasses, distinguished by their names."""

    def __init__(self, records: list[_Record]) -> None:
        self.records = {record.name: record for record in records}
        self.words = " or ".join(self.records)

    def pack(self, value: Any, budget: _Budget) -> Any:
        name = type(value).__name__
        if name not in self.records:
            raise _Misfit(f"must be {self.words}, got {name}")
        budget.pay(2)
        return [name, self.records[name].pack(value, budget)]

    def unpack(self, value: Any, budget: _Budget) -> Any:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
            raise _Misfit(f"must be the name and the fields of {self.words}")
        name, fields = value
        if name not in self.records:
            raise _Misfit(f"must be {self.words}, got {_shown(name)}")
        budget.pay(2)
        return self.records[name].unpack(fields, budget)


@cache
def _record(cls: Any) -> _Record:
    """The fields of a top-level class, checked once."""
    return _compile_record(cls, ())


def _compile_record(cls: Any, inside: tuple[Any, ...]) -> _Record:
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{cls.__name__} is no frozen dataclass: it cannot be a message.")
    if cls in inside:
        raise TypeError(f"{cls.__name__} contains itself: it cannot be a message.")
    try:
        hints = get_type_hints(cls)
    except Exception as error:
        raise TypeError(f"The annotations of {cls.__name__} cannot be resolved.") from error
    names = [field.name for field in dataclasses.fields(cls)]
    if set(names) != set(inspect.signature(cls).parameters):
        raise TypeError(f"Every field of {cls.__name__} must be an argument of it, and only these.")
    fields = {
        name: _compile(hints[name], f"{cls.__name__}.{name}", (*inside, cls)) for name in names
    }
    return _Record(cls, fields)


def _compile(annotation: Any, where: str, inside: tuple[Any, ...]) -> _Kind:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (bool, int, float, str, bytes):
        return _Scalar(annotation)
    if annotation is Tensor:
        return _Array()
    if origin in (Union, types.UnionType):
        inner = [_compile(a, where, inside) for a in args if a is not type(None)]
        kind = inner[0] if len(inner) == 1 else _compile_union(inner, where)
        return kind if type(None) not in args else _Optional(kind)
    if origin is Literal and all(type(value) is str for value in args):
        return _Choice(args)
    if origin is tuple and (args or annotation == tuple[()]):
        repeated = len(args) == 2 and args[1] is Ellipsis
        kinds = [_compile(a, where, inside) for a in (args[:1] if repeated else args)]
        return _Tuple(kinds, repeated=repeated)
    if origin in (dict, Mapping) and len(args) == 2 and args[0] is str:
        return _Mapping(_compile(args[1], where, inside))
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _compile_record(annotation, inside)
    raise TypeError(f"{where}: {annotation} is not allowed in a message.")


def _compile_union(kinds: list[_Kind], where: str) -> _Union:
    records = [kind for kind in kinds if isinstance(kind, _Record)]
    if len(records) < len(kinds) or len({record.name for record in records}) < len(records):
        raise TypeError(f"{where}: a union in a message is of dataclasses of different names.")
    return _Union(records)
