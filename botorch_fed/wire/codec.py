r"""Encode and decode frozen dataclasses, and nothing else.

The layout is MessagePack (https://msgpack.org), read and written by the `msgpack` library::

    [format version, class name, [field, field, …]]        a message
    [field, field, …]                                      a dataclass inside it
    [dtype, [dim, …], bin]                                 a tensor: little endian, row major

Types are never named by the data: `decode` is told which classes it may build, and the annotations
of their fields say what must stand where. What does not fit raises `MessageError` and builds
nothing. Every number must be finite. Equal objects have equal bytes, and other bytes for the same
object are refused, so that a broadcast can be addressed by its hash.

Allowed annotations: `bool`, `int` (64 bits, signed), `float`, `str`, `bytes`, `None`, `Tensor`,
`Literal` of strings, frozen dataclasses, `tuple[X, ...]`, `tuple[X, Y]`, `Mapping[str, X]`,
`X | None`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import torch
from torch import Tensor

from botorch_fed.errors import MessageError

FORMAT_VERSION = 1
# Hostile bytes can make a reader hold some sixty times their length for a moment: a protocol that
# knows its messages passes a tighter limit.
MAX_BYTES = 4 * 2**20
MAX_ITEMS = 10**6
MAX_DIMS = 8
_DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "f8": (torch.float64, np.dtype("<f8")),
    "i8": (torch.int64, np.dtype("<i8")),
    "u1": (torch.uint8, np.dtype("u1")),
    "b1": (torch.bool, np.dtype("?")),
}
_CODES = {dtype: code for code, (dtype, _) in _DTYPES.items()}


def encode(message: Any, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a frozen dataclass.

    Args:
        message: An instance of a frozen dataclass with allowed annotations.
        max_bytes: Refuse to make more bytes than this.

    Raises:
        MessageError: A value does not fit its annotation, or the result is too large.
    """
    name = type(message).__name__
    cls: Any = type(message)
    _fields(cls)  # refuses what is no frozen dataclass
    body = [FORMAT_VERSION, name, _pack(message, cls, name)]
    try:
        data: bytes = msgpack.packb(body, use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"{name} cannot be encoded: {error}.") from error
    if len(data) > max_bytes:
        raise MessageError(
            f"{name} takes {len(data):,} bytes, the limit is {max_bytes:,}: send fewer numbers, or "
            "raise max_bytes on both sides."
        )
    return data


def decode(data: bytes, *expected: type, max_bytes: int = MAX_BYTES) -> Any:
    """The object in some bytes, which must be of one of the expected classes.

    Args:
        data: What `encode` made, or anything else: it may come from anybody.
        expected: The frozen dataclasses that are acceptable here.
        max_bytes: Refuse longer data before reading them.

    Raises:
        MessageError: The data are too long, malformed, of another version or class, or hold a
            value that its class does not allow.
    """
    if not isinstance(data, bytes):
        raise MessageError(f"Expected bytes, got {type(data).__name__}.")
    if len(data) > max_bytes:
        raise MessageError(f"A message of {len(data):,} bytes exceeds the limit of {max_bytes:,}.")
    limit = len(data)
    try:
        body = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except MessageError:
        raise
    except (ValueError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"{limit:,} bytes are no message: {type(error).__name__}.") from error
    if type(body) is not list or len(body) != 3:
        raise MessageError("The bytes are no message: expected version, class name and fields.")
    version, name, fields = body
    if version != FORMAT_VERSION or type(version) is not int:
        raise MessageError(
            f"The message has format {_shown(version)}, this release reads {FORMAT_VERSION}: both "
            "sides need the same release of botorch_fed."
        )
    for cls in expected:
        if cls.__name__ == name:
            result = _unpack(fields, cls, name)
            if encode(result, max_bytes=limit) != data:
                raise MessageError(f"{name} is not in its one canonical form.")
            return result
    wanted = " or ".join(cls.__name__ for cls in expected)
    raise MessageError(f"Expected {wanted or 'nothing'} here, got {_shown(name)}.")


def content_hash(data: bytes) -> str:
    """SHA-256 of some bytes in hexadecimal: the address of a broadcast."""
    return hashlib.sha256(data).hexdigest()


# ------------------------------------------------------------------ what a class allows


@cache
def _fields(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Names and annotations of a frozen dataclass."""
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise MessageError(f"{cls.__name__} is no frozen dataclass: it cannot be a message.")
    hints = get_type_hints(cls)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))


def _shown(value: object) -> str:
    """A value from outside for an error text: short, and never a number of anybody's data."""
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


def _mismatch(where: str, expected: str, got: object) -> MessageError:
    return MessageError(f"{where} must be {expected}, got {type(got).__name__}.")


def _alternatives(annotation: Any) -> tuple[Any, ...] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return None


def _optional(annotation: Any, where: str) -> Any:
    """The `X` of `X | None`."""
    others = [a for a in _alternatives(annotation) or () if a is not type(None)]
    if len(others) != 1:
        raise MessageError(f"{where}: of unions, only `X | None` can be encoded.")
    return others[0]


def _item_types(annotation: Any, count: int, where: str) -> list[Any]:
    args = get_args(annotation)
    if len(args) == 2 and args[1] is Ellipsis:
        return [args[0]] * count
    if len(args) != count:
        raise MessageError(f"{where} must have {len(args)} items, got {count}.")
    return list(args)


def _check_scalar(value: Any, annotation: Any, where: str) -> None:
    if type(value) is not annotation:
        raise _mismatch(where, annotation.__name__, value)
    if annotation is float and not math.isfinite(value):
        raise MessageError(f"{where} must be finite.")
    if annotation is int and not -(2**63) <= value < 2**63:
        raise MessageError(f"{where} must fit into 64 bits.")


def _check_literal(value: Any, annotation: Any, where: str) -> None:
    if type(value) is not str or value not in get_args(annotation):
        raise MessageError(f"{where} must be one of {get_args(annotation)}, got {_shown(value)}.")


# ------------------------------------------------------------------ objects to plain values


def _pack(value: Any, annotation: Any, where: str) -> Any:
    if _alternatives(annotation) is not None:
        return None if value is None else _pack(value, _optional(annotation, where), where)
    if annotation is Tensor:
        return _pack_tensor(value, where)
    if annotation is float and type(value) is int:
        value = float(value)
    if annotation in (bool, int, float, str, bytes):
        _check_scalar(value, annotation, where)
        return value
    if annotation in (None, type(None)):
        if value is not None:
            raise _mismatch(where, "None", value)
        return None
    origin = get_origin(annotation)
    if origin is Literal:
        _check_literal(value, annotation, where)
        return value
    if origin is tuple:
        if type(value) is not tuple:
            raise _mismatch(where, "a tuple", value)
        item_types = _item_types(annotation, len(value), where)
        items = enumerate(zip(value, item_types, strict=True))
        return [_pack(item, item_type, f"{where}[{i}]") for i, (item, item_type) in items]
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _mismatch(where, "a mapping", value)
        for key in value:
            _check_scalar(key, str, f"a key of {where}")
        item_type = get_args(annotation)[1]
        # Sorted: equal mappings have equal bytes.
        return {key: _pack(value[key], item_type, f"{where}[{key!r}]") for key in sorted(value)}
    if dataclasses.is_dataclass(annotation):
        if type(value) is not annotation:
            raise _mismatch(where, getattr(annotation, "__name__", "a dataclass"), value)
        cls: Any = annotation
        return [
            _pack(getattr(value, name), field_type, f"{where}.{name}")
            for name, field_type in _fields(cls)
        ]
    raise MessageError(f"{where}: {annotation} cannot be encoded.")


def _pack_tensor(value: Any, where: str) -> list[Any]:
    if not isinstance(value, Tensor):
        raise _mismatch(where, "a tensor", value)
    code = _CODES.get(value.dtype)
    if code is None:
        raise MessageError(f"{where} must be one of {sorted(map(str, _CODES))}, got {value.dtype}.")
    if value.dim() > MAX_DIMS:
        raise MessageError(f"{where} must have at most {MAX_DIMS} dimensions, got {value.dim()}.")
    array = value.detach().cpu().contiguous().numpy().astype(_DTYPES[code][1], copy=False)
    _check_array(array, where)
    return [code, list(array.shape), array.tobytes()]


def _check_array(array: np.ndarray[Any, Any], where: str) -> None:
    if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
        raise MessageError(f"{where} must be finite: it has NaN or infinite entries.")


# ------------------------------------------------------------------ plain values to objects


def _unpack(value: Any, annotation: Any, where: str) -> Any:
    if _alternatives(annotation) is not None:
        return None if value is None else _unpack(value, _optional(annotation, where), where)
    if annotation is Tensor:
        return _unpack_tensor(value, where)
    if annotation in (bool, int, float, str, bytes):
        _check_scalar(value, annotation, where)
        return value
    if annotation in (None, type(None)):
        if value is not None:
            raise _mismatch(where, "None", value)
        return None
    origin = get_origin(annotation)
    if origin is Literal:
        _check_literal(value, annotation, where)
        return value
    if origin is tuple:
        if type(value) is not list:
            raise _mismatch(where, "a list", value)
        item_types = _item_types(annotation, len(value), where)
        items = enumerate(zip(value, item_types, strict=True))
        return tuple(_unpack(item, item_type, f"{where}[{i}]") for i, (item, item_type) in items)
    if origin in (dict, Mapping):
        if type(value) is not dict:
            raise _mismatch(where, "a mapping", value)
        if list(value) != sorted(value):
            raise MessageError(f"The keys of {where} must be sorted.")
        item_type = get_args(annotation)[1]
        return {
            key: _unpack(item, item_type, f"{where}[{key[:40]!r}]") for key, item in value.items()
        }
    if dataclasses.is_dataclass(annotation):
        return _unpack_dataclass(value, annotation, where)
    raise MessageError(f"{where}: {annotation} cannot be decoded.")


def _unpack_dataclass(value: Any, cls: Any, where: str) -> Any:
    fields = _fields(cls)
    if type(value) is not list or len(value) != len(fields):
        got = f"{len(value)} fields" if type(value) is list else type(value).__name__
        raise MessageError(f"{where} must have {len(fields)} fields, got {got}.")
    arguments = {
        name: _unpack(item, field_type, f"{where}.{name}")
        for item, (name, field_type) in zip(value, fields, strict=True)
    }
    try:
        return cls(**arguments)
    except MessageError:
        raise
    except Exception as error:  # the class's own validation, whatever it raises
        raise MessageError(f"{where} is not valid: {error}") from error


def _unpack_tensor(value: Any, where: str) -> Tensor:
    if type(value) is not list or len(value) != 3:
        raise _mismatch(where, "a tensor", value)
    code, shape, data = value
    if type(code) is not str or code not in _DTYPES:
        raise MessageError(f"{where} must have a type of {sorted(_DTYPES)}, got {_shown(code)}.")
    if type(shape) is not list or len(shape) > MAX_DIMS or type(data) is not bytes:
        raise _mismatch(where, f"a tensor of at most {MAX_DIMS} dimensions", shape)
    if any(type(size) is not int or not 0 <= size < 2**40 for size in shape):
        raise MessageError(f"{where} must have sizes between 0 and 2^40.")
    dtype, layout = _DTYPES[code]
    if math.prod(shape) * layout.itemsize != len(data):
        raise MessageError(f"{where} of shape {shape} does not fit its {len(data):,} bytes.")
    if code == "b1" and data.strip(b"\x00\x01"):
        raise MessageError(f"{where} must hold 0 and 1 only.")
    array = np.frombuffer(data, dtype=layout).reshape(shape)
    _check_array(array, where)
    native = array.astype(layout.newbyteorder("="), copy=True)
    return torch.from_numpy(native).to(dtype)


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MessageError("A mapping names a key twice.")
    return result
