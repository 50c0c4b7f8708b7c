import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import GenerationDefaults, ModelConfig
from jaxinfer.weights.records import from_json, to_json


@dataclass(frozen=True)
class Pair:
    left: int
    right: tuple[float, str]


@dataclass(frozen=True)
class Mixed:
    pairs: tuple[Pair, ...]
    kind: Literal["a", "b"]
    maybe: int | None = None
    either: float | int | bool | tuple[float, ...] = 0


# repr is equal only if every number is, with its type; == would call NaN different and True the same as 1.
@pytest.mark.parametrize("cls", [ModelConfig, GenerationDefaults, Mixed])
@settings(deadline=None)
@given(data=st.data())
def test_records_come_back_as_they_were(cls: type, data: st.DataObject) -> None:
    record = data.draw(st.from_type(cls))
    assert repr(from_json(cls, json.loads(json.dumps(to_json(record))))) == repr(record)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ([], "Mixed"),
        ({"pairs": []}, "kind"),
        ({"pairs": [], "kind": "c"}, r"Mixed\.kind"),
        ({"pairs": [], "kind": "a", "more": 1}, "more"),
        ({"pairs": [], "kind": "a", "maybe": "1"}, r"Mixed\.maybe"),
        ({"pairs": [], "kind": "a", "maybe": True}, r"Mixed\.maybe"),
        ({"pairs": [{"left": 1.5, "right": [1, "x"]}], "kind": "a"}, r"Mixed\.pairs\[0\]\.left"),
        ({"pairs": [{"left": 1, "right": [1]}], "kind": "a"}, r"Mixed\.pairs\[0\]\.right"),
    ],
)
def test_what_does_not_fit_is_named(data: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        from_json(Mixed, data)


def test_only_records_have_a_json_form() -> None:
    with pytest.raises(TypeError, match="set"):
        to_json((1, {2}))
