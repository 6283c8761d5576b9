# SPDX-License-Identifier: Apache-2.0
import dataclasses
import operator
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fabric.utilities.apply_func import _takes_non_blocking, convert_tensors_to_scalars, move_data_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "a"
    made: list[int] = dataclasses.field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.made = [1]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: int = 3


@dataclasses.dataclass
class Derived:
    """Has an argument that is no field, and an attribute that is none either."""

    x: Any
    scale: dataclasses.InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        self.scaled = scale * 2


class Marked(torch.Tensor):
    """A tensor subclass."""


class Graph:
    """Moves its tensors with a `.to` that takes `non_blocking=`, as PyTorch Geometric's `Data` does."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors
        self.asked: list[bool] = []

    def to(self, device: Any, *args: Any, non_blocking: bool = False) -> "Graph":
        moved = Graph(**{name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors.items()})
        moved.asked = [*self.asked, non_blocking]
        return moved


class Movable:
    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: Any) -> "Movable":
        return Movable(self.x.to(device))


class MovesInPlace(Movable):
    def to(self, device: Any) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


class Table(dict[str, Any]):
    """A mapping with a constructor of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Items(list[Any]):
    note = "kept"


Edge = namedtuple("Edge", ["origin", "to"])


def x() -> torch.Tensor:
    return torch.ones(2)


def table() -> Table:
    result = Table("t")
    result["x"] = x()
    return result


def grouped() -> Any:
    result = defaultdict(list)
    result["x"] = [x()]
    return result


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tensor": (x, lambda moved: moved),
    "dict": (lambda: {"x": x()}, lambda moved: moved["x"]),
    "ordered dict": (lambda: OrderedDict(x=x()), lambda moved: moved["x"]),
    "default dict": (grouped, lambda moved: moved["x"][0]),
    "user dict": (lambda: UserDict(x=x()), lambda moved: moved["x"]),
    "dict subclass": (table, lambda moved: moved["x"]),
    "chain map": (lambda: ChainMap({"x": x()}, {"y": 1}), lambda moved: moved["x"]),
    "list": (lambda: [x(), 1], lambda moved: moved[0]),
    "list subclass": (lambda: Items([x()]), lambda moved: moved[0]),
    "user list": (lambda: UserList([x()]), lambda moved: moved[0]),
    "deque": (lambda: deque([x()], maxlen=3), lambda moved: moved[0]),
    "tuple": (lambda: ("a", x()), lambda moved: moved[1]),
    "named tuple": (lambda: Pair(x(), "b"), lambda moved: moved.left),
    "named tuple with a field `to`": (lambda: Edge(x(), x()), lambda moved: moved.to),
    "torch return type": (lambda: torch.max(torch.ones(2, 2), 0), lambda moved: moved.values),
    "dataclass": (lambda: Sample(x()), lambda moved: moved.x),
    "frozen dataclass": (lambda: Frozen(x()), lambda moved: moved.x),
    "dataclass with an argument that is no field": (lambda: Derived(x()), lambda moved: moved.x),
    "anything with to": (lambda: Movable(x()), lambda moved: moved.x),
    "to that returns nothing": (lambda: MovesInPlace(x()), lambda moved: moved.x),
    "packed sequence": (lambda: pack_sequence([x()]), lambda moved: moved.data),
    "nested": (
        lambda: [{"a": (Pair(Sample({"b": [x()]}), None), "text")}, 3.5],
        lambda moved: moved[0]["a"][0].left.x["b"][0],
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_come_back_in_their_own_type(name: str) -> None:
    make, tensor_in = CONTAINERS[name]
    batch = make()
    moved = move_data_to_device(batch, "meta")
    assert type(moved) is type(batch)
    assert tensor_in(moved).device == META
    if name != "to that returns nothing":
        assert tensor_in(batch).device.type == "cpu"


def test_what_a_container_holds_beside_its_items_is_kept() -> None:
    assert move_data_to_device(grouped(), META).default_factory is list
    assert move_data_to_device(table(), META).name == "t"
    assert move_data_to_device(deque([x()], maxlen=3), META).maxlen == 3
    sample = Sample(x())
    sample.made = [2]
    assert move_data_to_device(sample, META).made == [2]
    assert move_data_to_device(Frozen(x(), 7), META).y == 7
    assert move_data_to_device(Derived(x(), scale=4), META).scaled == 8


@pytest.mark.parametrize("name", [n for n in CONTAINERS if n not in ("anything with to", "packed sequence")])
def test_nothing_is_copied_when_it_is_there_already(name: str) -> None:
    batch = CONTAINERS[name][0]()
    assert move_data_to_device(batch, "cpu") is batch


def test_a_read_only_mapping_is_moved() -> None:
    moved = move_data_to_device(MappingProxyType({"x": x()}), META)
    assert moved["x"].device == META
    assert type(moved) is MappingProxyType


@pytest.mark.parametrize(
    "value", [1, 2.5, "text", b"x", None, True, range(3), {1, 2}, Counter("ab"), print, dict, torch.float32, object()]
)
def test_everything_else_is_handed_through(value: Any) -> None:
    assert move_data_to_device(value, META) is value
    assert move_data_to_device([value, x()], META)[0] is value


def test_arrays_stay_arrays() -> None:
    array = np.ones(2)
    assert move_data_to_device({"x": x(), "ids": array, "words": np.array(["a"])}, META)["ids"] is array


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_moved(layout: Any) -> None:
    sparse = torch.eye(2).to_sparse(layout=layout)
    assert move_data_to_device([sparse], "cpu")[0] is sparse
    moved = move_data_to_device([sparse], META)[0]
    assert (moved.device, moved.layout) == (META, layout)


def test_nested_tensors_are_moved() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert move_data_to_device([ragged], "cpu")[0] is ragged
    moved = move_data_to_device([ragged], META)[0]
    assert (moved.device, moved.is_nested) == (META, True)


def test_tensor_subclasses_stay_what_they_are() -> None:
    moved = move_data_to_device([x().as_subclass(Marked)], META)[0]
    assert (type(moved), moved.device) == (Marked, META)


def test_a_graph_beside_other_things() -> None:
    batch = {"graph": Graph(nodes=x(), edges=x()), "rest": ("text", [x(), np.ones(1), None])}
    moved = move_data_to_device(batch, META)
    assert {tensor.device for tensor in moved["graph"].tensors.values()} == {META}
    assert moved["rest"][1][0].device == META
    assert moved["graph"].asked == [False]  # only from the CPU to CUDA
    assert moved["rest"][1][1] is batch["rest"][1][1]


def _positional(device: Any) -> None: ...


def _forwarding(*args: Any, **kwargs: Any) -> None: ...


def _only_names(device: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (Graph().to, True),
        (_forwarding, True),
        (pack_sequence([x()]).to, True),
        (_positional, False),
        (_only_names, False),
        (Movable(x()).to, False),
        (operator.itemgetter(0), False),
    ],
)
def test_whose_copies_do_not_block(to: Any, expected: bool) -> None:
    assert _takes_non_blocking(to) is expected


def test_hugging_face_batches_and_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": x(), "text": ["a"]})
    moved = move_data_to_device([batch], META)[0]
    assert (type(moved), moved["input_ids"].device, moved["text"]) == (type(batch), META, ["a"])
    assert _takes_non_blocking(batch.to)
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x())
    moved = move_data_to_device(output, META)
    assert (type(moved), moved.last_hidden_state.device, moved[0].device) == (type(output), META, META)
    assert output.last_hidden_state.device.type == "cpu"


@pytest.mark.parametrize("kind", [list, dict, Sample])
def test_a_container_that_holds_itself_is_named(kind: Any) -> None:
    batch = kind(x()) if kind is Sample else kind()
    if kind is list:
        batch.append(batch)
    elif kind is dict:
        batch["again"] = batch
    else:
        batch.x = [batch]
    with pytest.raises(
        ValueError,
        match=r"^This batch can't be moved: one of its containers holds itself, or they are nested too deep\. Take the"
        r" reference to itself out of what the data set or `collate_fn` returns\.$",
    ):
        move_data_to_device(batch, META)


def test_gradients_flow_through_the_move() -> None:
    parameter = torch.ones(2, requires_grad=True)
    assert move_data_to_device({"x": parameter}, META)["x"].requires_grad
    assert isinstance(move_data_to_device(pack_sequence([x()]), META), PackedSequence)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_copied_without_blocking() -> None:
    pinned = torch.ones(64 * 1024 * 1024).pin_memory()
    torch.cuda._sleep(10**9)  # the stream is busy: a blocking copy would wait for it
    moved = move_data_to_device({"x": pinned}, "cuda")
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.equal(moved["x"].cpu(), pinned)


def test_tensors_become_numbers() -> None:
    metrics = {"loss": torch.tensor(0.5), "n": [torch.tensor([3])], "name": "a", "flag": torch.tensor(True)}
    assert convert_tensors_to_scalars(metrics) == {"loss": 0.5, "n": [3], "name": "a", "flag": True}


def test_a_tensor_with_several_elements_is_no_number() -> None:
    with pytest.raises(
        ValueError,
        match=r"^A tensor of shape \(2, 3\) is no single number\. Reduce it first, for example with `\.mean\(\)`\.$",
    ):
        convert_tensors_to_scalars({"loss": torch.zeros(2, 3)})
