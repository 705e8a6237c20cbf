"""The codec against hostile bytes and across round trips."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

import msgpack
import pytest
import torch
from botorch.exceptions.errors import InputDataError
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from botorch_fed.errors import MessageError
from botorch_fed.models import feature_map_from_tensors
from botorch_fed.wire import codec
from botorch_fed.wire.codec import FORMAT_VERSION, MAX_BYTES, content_hash, decode, encode
from test.cases import MAPS


@dataclass(frozen=True, eq=False)
class Inner:
    weights: Tensor
    label: str = "a"


@dataclass(frozen=True, eq=False)
class Sample:
    flag: bool
    count: int
    value: float
    text: str
    blob: bytes
    tensor: Tensor
    maybe: Inner | None
    kind: Literal["plain", "private"]
    row: tuple[int, ...]
    pair: tuple[str, float]
    named: Mapping[str, Tensor]
    inners: tuple[Inner, ...] = ()

    def __post_init__(self) -> None:
        if self.count < -100:
            raise InputDataError("count must be at least -100")


@dataclass(frozen=True)
class Other:
    count: int


@dataclass
class Thawed:
    count: int


GOOD = Sample(
    flag=True,
    count=3,
    value=0.1,
    text="héllo",
    blob=b"\x00\xff",
    tensor=torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    maybe=Inner(torch.tensor([True, False])),
    kind="plain",
    row=(1, 2),
    pair=("x", -0.0),
    named={"b": torch.tensor([1, 2]), "a": torch.zeros(0, 2).double()},
    inners=(Inner(torch.tensor(3, dtype=torch.uint8), "b"),),
)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if hasattr(first, "__dataclass_fields__"):
        names = first.__dataclass_fields__
        return all(_same(getattr(first, n), getattr(second, n)) for n in names)
    return type(first) is type(second) and first == second


finite = st.floats(allow_nan=False, allow_infinity=False)
tensors = st.lists(finite, max_size=5).map(lambda v: torch.tensor(v, dtype=torch.float64))


samples = st.builds(
    Sample,
    flag=st.booleans(),
    count=st.integers(-100, 2**63 - 1),
    value=finite,
    text=st.text(),
    blob=st.binary(),
    tensor=tensors,
    maybe=st.none() | tensors.map(Inner),
    kind=st.sampled_from(["plain", "private"]),
    row=st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple),
    pair=st.tuples(st.text(), finite),
    named=st.dictionaries(st.text(), tensors, max_size=3),
    inners=st.lists(tensors.map(Inner), max_size=2).map(tuple),
)


@given(samples)
def test_round_trip(sample: Sample) -> None:
    data = encode(sample)
    back = decode(data, Other, Sample)
    assert _same(back, sample)
    assert encode(back) == data


def test_equal_objects_have_equal_bytes() -> None:
    data = encode(GOOD)
    reordered = replace(GOOD, named=dict(reversed(GOOD.named.items())))
    transposed = replace(GOOD, tensor=GOOD.tensor.mT.contiguous().mT)
    assert encode(reordered) == encode(transposed) == data
    assert content_hash(data) == content_hash(encode(reordered))
    assert content_hash(data) != content_hash(encode(replace(GOOD, count=4)))


def test_known_bytes() -> None:
    # Frozen: other releases read this.
    assert encode(Other(7)).hex() == "9301a54f746865729107"
    inner = encode(Inner(torch.tensor([1.5], dtype=torch.float64)))
    assert inner.hex() == "9301a5496e6e65729293a266389101c408000000000000f83fa161"


@pytest.mark.parametrize("make", MAPS)
def test_feature_maps_travel(make: Any) -> None:
    @dataclass(frozen=True, eq=False)
    class Setup:
        tensors: Mapping[str, Tensor]

    Setup.__annotations__ = {"tensors": Mapping[str, Tensor]}
    phi = make()
    back = decode(encode(Setup(phi.to_tensors())), Setup)
    assert feature_map_from_tensors(back.tensors).fingerprint == phi.fingerprint


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data, Sample, Other)


@given(st.data())
def test_damaged_bytes_are_refused_or_still_valid(data: Any) -> None:
    good = encode(GOOD)
    where = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[where] = data.draw(st.integers(0, 255))
    try:
        back = decode(bytes(damaged), Sample)
    except MessageError:
        return
    assert encode(back) == bytes(damaged)  # another message, but a message


def test_every_truncation_and_extension_is_refused() -> None:
    good = encode(GOOD)
    for end in range(len(good)):
        with pytest.raises(MessageError):
            decode(good[:end], Sample)
    with pytest.raises(MessageError):
        decode(good + b"\x00", Sample)
    with pytest.raises(MessageError):
        decode(good + good, Sample)


def _raw(fields: Any, name: str = "Sample", version: Any = FORMAT_VERSION) -> bytes:
    return msgpack.packb([version, name, fields])


def _fields(**changes: Any) -> list[Any]:
    names = list(Sample.__dataclass_fields__)
    fields = msgpack.unpackb(encode(GOOD))[2]
    for name, value in changes.items():
        fields[names.index(name)] = value
    return fields


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"flag": 1}, r"Sample.flag must be bool, got int"),
        ({"count": True}, r"Sample.count must be int, got bool"),
        ({"count": 1.0}, r"Sample.count must be int, got float"),
        ({"count": 2**63}, r"Sample.count must fit into 64 bits"),
        ({"count": -1000}, r"Sample is not valid: count must be at least -100"),
        ({"value": 1}, r"Sample.value must be float, got int"),
        ({"value": math.nan}, r"Sample.value must be finite"),
        ({"value": math.inf}, r"Sample.value must be finite"),
        ({"text": b"x"}, r"Sample.text must be str, got bytes"),
        ({"text": None}, r"Sample.text must be str, got NoneType"),
        ({"blob": "x"}, r"Sample.blob must be bytes, got str"),
        ({"kind": "secret"}, r"Sample.kind must be one of"),
        ({"row": {"a": 1}}, r"Sample.row must be a list, got dict"),
        ({"row": [1, "2"]}, r"Sample.row\[1\] must be int, got str"),
        ({"pair": ["x"]}, r"Sample.pair must have 2 items, got 1"),
        ({"named": {"b": ["f8", [0], b""], "a": ["f8", [0], b""]}}, r"canonical form"),
        ({"named": {b"b": ["f8", [0], b""]}}, r"keys of a mapping must be strings"),
        ({"named": {"a": ["f8", [0], b""], b"b": ["f8", [0], b""]}}, r"must be strings"),
        ({"named": [1]}, r"Sample.named must be a mapping"),
        ({"maybe": [["f8", [0], b""]]}, r"Sample.maybe must have 2 fields, got 1 fields"),
        ({"maybe": 3}, r"Sample.maybe must have 2 fields, got int"),
        ({"tensor": [1.0]}, r"Sample.tensor must be a tensor"),
        ({"tensor": ["f4", [1], b"0000"]}, r"Sample.tensor must have a type of"),
        ({"tensor": ["f8", [2], b"\0" * 8]}, r"shape \[2\] does not fit its 8 bytes"),
        ({"tensor": ["f8", [-1], b""]}, r"sizes that are integers >= 0"),
        ({"tensor": ["f8", [True], b"\0" * 8]}, r"sizes that are integers >= 0"),
        ({"tensor": ["f8", [2**39, 2**39], b""]}, r"at most 281,474,976,710,656 elements"),
        ({"tensor": ["f8", [0, 2**39, 2**39], b""]}, r"at most 281,474,976,710,656 elements"),
        ({"tensor": ["f8", [2**31, 2**31, 0], b""]}, r"at most 281,474,976,710,656 elements"),
        ({"tensor": ["f8", [1], "x"]}, r"with a shape and bytes"),
        ({"tensor": ["f8", [1] * 9, b"\0" * 8]}, r"at most 8 dimensions"),
        ({"tensor": ["b1", [1], b"\2"]}, r"must hold 0 and 1 only"),
        ({"tensor": ["f8", [1], b"\xff" * 8]}, r"Sample.tensor must be finite"),
        ({"tensor": ["f8", [1], b"\0" * 6 + b"\xf0\x7f"]}, r"Sample.tensor must be finite"),
    ],
)
def test_values_that_do_not_fit(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(MessageError, match=match):
        decode(_raw(_fields(**changes)), Sample)


def test_frames_that_do_not_fit() -> None:
    with pytest.raises(MessageError, match="format int, this release reads 1"):
        decode(_raw([7], "Other", version=2), Other)
    with pytest.raises(MessageError, match="format bool"):
        decode(_raw([7], "Other", version=True), Other)
    with pytest.raises(MessageError, match="Expected Sample or Other here, got 'Inner'"):
        decode(encode(GOOD.inners[0]), Sample, Other)
    with pytest.raises(MessageError, match="Expected nothing here"):
        decode(encode(Other(1)))
    with pytest.raises(MessageError, match="Expected Other here, got list"):
        decode(_raw([7], ["Other"]), Other)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="expected version, class name and fields"):
        decode(msgpack.packb([1, "Other"]), Other)
    with pytest.raises(MessageError, match="Expected bytes, got str"):
        decode("text", Other)  # type: ignore[arg-type]
    twice = b"\x93\x01\xa6Sample\x82\xa1a\x01\xa1a\x02"
    with pytest.raises(MessageError, match="names a key twice"):
        decode(twice, Sample)
    extension = msgpack.packb([1, "Other", [msgpack.ExtType(1, b"x")]])
    with pytest.raises(MessageError):
        decode(extension, Other)
    timestamp = msgpack.packb([1, "Other", [msgpack.Timestamp(1)]])
    with pytest.raises(MessageError):
        decode(timestamp, Other)
    deep = b"\x91" * 100_000 + b"\x90"
    with pytest.raises(MessageError, match="are no message"):
        decode(deep, Other)


def test_one_object_has_one_form() -> None:
    assert decode(b"\x93\x01\xa5Other\x91\x07", Other) == Other(7)
    for other in [
        b"\x93\x01\xa5Other\x91\xcc\x07",  # a longer integer
        b"\xdc\x00\x03\x01\xa5Other\x91\x07",  # a longer array
        b"\x93\x01\xd9\x05Other\x91\x07",  # a longer string
    ]:
        with pytest.raises(MessageError, match="canonical form"):
            decode(other, Other)


def test_size_limits() -> None:
    big = replace(GOOD, tensor=torch.zeros(MAX_BYTES // 8 + 1).double())
    with pytest.raises(
        MessageError, match=rf"Sample takes [\d,]+ bytes, the limit is {MAX_BYTES:,}"
    ):
        encode(big)
    data = encode(big, max_bytes=2 * MAX_BYTES)
    with pytest.raises(MessageError, match=f"at most {MAX_BYTES:,} bytes"):
        decode(data, Sample)
    assert _same(decode(data, Sample, max_bytes=2 * MAX_BYTES), big)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"value": math.nan}, "Sample.value must be finite"),
        ({"count": True}, "Sample.count must be int, got bool"),
        ({"count": 2**63}, "64 bits"),
        ({"row": [1]}, "Sample.row must be a tuple, got list"),
        ({"tensor": torch.zeros(2)}, "Sample.tensor must be one of .* got torch.float32"),
        ({"tensor": torch.tensor([math.inf]).double()}, "Sample.tensor must be finite"),
        ({"tensor": torch.eye(2).double().to_sparse()}, "Sample.tensor must be an ordinary"),
        ({"tensor": torch.empty(2, device="meta").double()}, "Sample.tensor must be an ordinary"),
        ({"tensor": torch.tensor([2], dtype=torch.uint8).view(torch.bool)}, "0 and 1 only"),
        ({"tensor": torch.zeros(0, 2**31, 2**31).double()}, "elements"),
        ({"row": (0,) * 200_001}, "Sample.row makes the message exceed 200,000 items"),
        ({"value": 2**53 + 1}, "a float holds exactly"),
        ({"value": 10**400}, "a float holds exactly"),
        ({"text": "\ud800"}, "Sample cannot be encoded: UnicodeEncodeError"),
        ({"tensor": [1.0]}, "Sample.tensor must be a tensor, got list"),
        ({"named": {1: torch.zeros(1).double()}}, "Sample.named must have strings as keys"),
        ({"maybe": Other(1)}, "Sample.maybe must be Inner, got Other"),
        ({"kind": "secret"}, "Sample.kind must be one of"),
    ],
)
def test_objects_that_cannot_be_encoded(change: dict[str, Any], match: str) -> None:
    with pytest.raises(MessageError, match=match):
        encode(replace(GOOD, **change))


@dataclass(frozen=True)
class Recursive:
    inner: Recursive | None = None


@dataclass(frozen=True)
class Derived:
    count: int = field(init=False, default=3)


@dataclass(frozen=True)
class Initial:
    count: InitVar[int]


@dataclass(frozen=True)
class Unresolved:
    count: Missing  # type: ignore[name-defined]  # noqa: F821


@dataclass(frozen=True)
class TwoWays:
    value: int | str


@dataclass(frozen=True)
class ThreeWays:
    value: int | str | None


@dataclass(frozen=True)
class Listed:
    value: tuple[list[int], ...]


@dataclass(frozen=True)
class Numbered:
    value: Mapping[int, int]


@dataclass(frozen=True)
class Bare:
    value: Mapping  # type: ignore[type-arg]


@dataclass(frozen=True)
class Picky:
    value: Literal[1, "a"]


class Undecorated(Other):
    pass


@pytest.mark.parametrize(
    "cls",
    [
        *(Thawed, Recursive, Derived, Initial, Unresolved, TwoWays, ThreeWays, Listed, Numbered),
        *(Bare, Picky, Undecorated, int, dict, object),
    ],
)
def test_classes_that_cannot_be_messages(cls: type) -> None:
    # A programming error: reported whatever the bytes are.
    with pytest.raises(TypeError):
        decode(b"anything", cls)
    with pytest.raises(TypeError):
        encode(object.__new__(cls) if cls not in (int, dict) else cls())


@dataclass(frozen=True)
class Nested:
    rows: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, count: int) -> Nested:
        return cls({"a": (count,)})


@dataclass(frozen=True)
class Choice:
    step: Other | Nested
    maybe: Other | Nested | None = None
    several: tuple[Other | Nested, ...] = ()


@dataclass(frozen=True)
class MixedChoice:
    value: Other | int


CHOICE = Choice(Other(1), Nested.of(3), (Nested.of(0), Other(2)))


def test_a_union_of_dataclasses_travels_with_the_name() -> None:
    data = encode(CHOICE)
    assert decode(data, Choice) == CHOICE
    assert decode(encode(replace(CHOICE, maybe=None)), Choice).maybe is None
    body = msgpack.unpackb(data)
    assert body[2][0] == ["Other", [1]]


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (["Inner", [1]], "step must be Other or Nested, got 'Inner'"),
        (["Sample", []], "must be Other or Nested"),
        (["Other", [1, 2]], "must have 1 fields"),
        (["Other"], "must be the name and the fields"),
        (["Other", [1], 0], "must be the name and the fields"),
        ([b"Other", [1]], "must be the name and the fields"),
        ([["Other"], [1]], "must be the name and the fields"),
        ([1], "must be the name and the fields"),
        ("Other", "must be the name and the fields"),
        ({"Other": [1]}, "must be the name and the fields"),
        (None, "must be the name and the fields"),
    ],
)
def test_a_union_is_a_closed_set(step: Any, match: str) -> None:
    data = msgpack.packb([FORMAT_VERSION, "Choice", [step, None, []]], use_bin_type=True)
    with pytest.raises(MessageError, match=match):
        decode(data, Choice)
    with pytest.raises(MessageError, match="must be Other or Nested, got Inner"):
        encode(Choice(Inner(torch.zeros(1))))  # type: ignore[arg-type]


def test_a_union_pays_for_its_items() -> None:
    many = [["Other", [1]]] * (codec.MAX_ITEMS // 4)
    data = msgpack.packb([FORMAT_VERSION, "Choice", [many[0], None, many]], use_bin_type=True)
    with pytest.raises(MessageError, match="items"):
        decode(data, Choice)


def test_a_union_of_other_things_is_no_message() -> None:
    with pytest.raises(TypeError, match="union in a message"):
        encode(MixedChoice(1))
    twin: Any = type("Other", (), {"__annotations__": {"count": int}})
    twins: Any = type(
        "Twins", (), {"__annotations__": {"value": Other | dataclass(frozen=True)(twin)}}
    )
    with pytest.raises(TypeError, match="different names"):
        encode(dataclass(frozen=True)(twins)(Other(1)))


def test_classes_of_one_name_are_not_confused() -> None:
    twin = type("Other", (), {"__annotations__": {"count": int}})
    with pytest.raises(TypeError, match="different names"):
        decode(encode(Other(1)), Other, dataclass(frozen=True)(twin))


def test_long_keys_cost_nothing() -> None:
    data = msgpack.packb([1, "Nested", [{"\x01" * 500_000: [0] * 50_000}]])
    start = time.perf_counter()
    decode(data, Nested)
    assert time.perf_counter() - start < 5  # it was quadratic once: minutes
    with pytest.raises(MessageError) as error:
        decode(msgpack.packb([1, "Nested", [{"k" * 500_000: [0.5]}]]), Nested)
    assert len(str(error.value)) < 200


@dataclass(frozen=True)
class Talkative:
    value: float

    def __post_init__(self) -> None:
        raise ValueError(f"the secret is {self.value}")


def test_errors_do_not_tell_data() -> None:
    with pytest.raises(MessageError) as error:
        decode(msgpack.packb([1, "Talkative", [0.125]]), Talkative)
    assert str(error.value) == "Talkative is not valid: ValueError."


def test_views_travel_as_their_values() -> None:
    base = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    views = [base.mT, base[:, ::2], base[:1].expand(3, 4), base.flip(0), base[1, 1]]
    views += [torch._neg_view(base), base.clone().requires_grad_(), base[:0]]
    for view in views:
        back = decode(encode(Inner(view)), Inner).weights
        assert torch.equal(back, view.detach())
        assert not back.requires_grad


def test_decoded_tensors_are_writable_and_their_own() -> None:
    data = encode(GOOD)
    back = decode(data, Sample)
    back.tensor.fill_(9.0)
    assert _same(decode(data, Sample), GOOD)


@pytest.mark.parametrize("shape", ["one list", "nested lists", "maps"])
def test_a_few_bytes_do_not_become_much_memory(shape: str) -> None:
    """Sixteen megabytes of empty lists would be a gigabyte of objects."""
    head = b"\x93\x01\xa6Sample"
    hostile = {
        "one list": head + b"\xdd" + (10**7).to_bytes(4, "big") + b"\x90" * 10**7,
        "nested lists": head + b"\xdc\x27\x10" + (b"\xdc\x03\xe8" + b"\x90" * 1000) * 10**4,
        "maps": head + b"\xdd" + (10**5).to_bytes(4, "big") + (b"\x8f" + b"\x01\x90" * 15) * 10**5,
    }[shape]
    tracemalloc.start()
    with pytest.raises(MessageError, match="more than 200,000 items"):
        decode(hostile, Sample)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@given(st.binary(max_size=60))
def test_counting_items_refuses_nothing_that_is_small(data: bytes) -> None:
    codec._check_count(data)


@dataclass(frozen=True)
class Names:
    names: tuple[str, ...]


def test_names_are_checked_and_kept_once() -> None:
    made = Names(tuple(f"site {n}" for n in range(50)))
    data = encode(made)
    one, other = decode(data, Names), decode(data, Names, own=True)
    assert one == other == made
    assert all(a is b for a, b in zip(one.names, other.names, strict=True))
    assert decode(encode(Names(())), Names) == Names(())
    with pytest.raises(MessageError, match=r"Names.names\[1\] must be str, got int"):
        encode(Names(("a", 3)))  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=r"Names.names\[1\] must be str, got int"):
        decode(msgpack.packb([codec.FORMAT_VERSION, "Names", [["a", 3]]]), Names)
    with pytest.raises(MessageError, match="exceed 200,000 items"):
        encode(Names(("a",) * 200_001))
    with pytest.raises(MessageError, match="exceed 200,000 items"):
        decode(msgpack.packb([codec.FORMAT_VERSION, "Names", [["a"] * 200_000]]), Names)


def test_what_a_program_has_written_itself_need_not_be_in_the_one_form() -> None:
    wide = msgpack.packb([codec.FORMAT_VERSION, "Other", [1]]).replace(b"\x01", b"\xcc\x01", 1)
    with pytest.raises(MessageError, match="canonical"):
        decode(wide, Other)
    assert decode(wide, Other, own=True) == Other(1)
