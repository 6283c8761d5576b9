# SPDX-License-Identifier: Apache-2.0
"""Two models in training, under each strategy: what one of them saved, and whether another one has the same."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, PipelineParallelStrategy, Strategy
from tests.ranks import RankContext
from tests.strategies.nets import whole

WORDS, WIDTH, HIDDEN, LENGTH, BATCH = 11, 6, 8, 3, 8
BEFORE = 2  # steps of plain PyTorch, from which every strategy goes on
TOLERANCE = 2e-6  # of the largest value of a tensor, as in tests/test_equivalence.py for float32


class Block(nn.Module):
    """A buffer that is kept, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )
        self.spare = nn.Linear(3, 2)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x)))) + self.shift


class Net(nn.Module):
    """Has a layer that never gets a gradient, a frozen one, and a head that may be tied to the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bias, self.norm = nn.Parameter(torch.rand(WIDTH)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.blocks[1].spare = nn.Linear(3, 2)
        self.blocks[0].up.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(output: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), words.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """What all ranks read together."""
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]


def split(module: nn.Module, mesh: Any, *, words: bool = False) -> nn.Module:
    """The blocks; with `words` the vocabulary too, which no number of ranks divides."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for number in range(2):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    if words:
        plan |= {"embedding": RowwiseParallel(input_layouts=Replicate())}
        plan |= {"head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(module, mesh["tensor_parallel"], plan)


def split_words(module: nn.Module, mesh: Any) -> nn.Module:
    return split(module, mesh, words=True)


LAYOUTS: dict[str, tuple[int, Callable[[], Strategy | str]]] = {
    "single": (1, lambda: "auto"),
    "ddp-2": (2, lambda: DDPStrategy(find_unused_parameters=True)),
    "ddp-4": (4, lambda: DDPStrategy(find_unused_parameters=True)),
    "fsdp-1": (1, lambda: FSDPStrategy()),
    "fsdp-2": (2, lambda: FSDPStrategy(state_dict_type="full")),
    "fsdp-4": (4, lambda: FSDPStrategy(state_dict_type="sharded")),
    "hsdp-2x2": (4, lambda: FSDPStrategy(device_mesh=(2, 2))),
    "tensor-2": (2, lambda: ModelParallelStrategy(split)),
    "tensor-4": (4, lambda: ModelParallelStrategy(split_words)),
    "tensor-fsdp-2x2": (4, lambda: ModelParallelStrategy(split, tensor_parallel_size=2)),
    "pipeline-2": (2, lambda: PipelineParallelStrategy(split_at=["blocks.1"])),
    "pipeline-4": (4, lambda: PipelineParallelStrategy(split_at=["blocks.0", "blocks.1", "norm"])),
    "pipeline-2x2": (4, lambda: PipelineParallelStrategy(split_at=["blocks.0"], data_parallel_size=2)),
}
FORMS = {"torch": "file.pt", "sharded": "folder", "safetensors": "weights"}


def build(seed: int) -> dict[str, Any]:
    """A tied model under AdamW with all the state that it has, and another one under SGD, which has none."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tied, loose = Net(tied=True), Net(tied=False)
    adam = torch.optim.AdamW(groups_of(tied), lr=0.02, eps=1e-2, amsgrad=True)
    return {
        "tied": {"model": tied, "optimizer": adam, "schedule": torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.8)},
        "loose": {"model": loose},
        "step": 0,
        "seen": {"words": [0, 0]},
    }


def groups_of(model: nn.Module, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Two groups with options of their own, neither in the order of the model; those the other way have no names."""
    named = list(model.named_parameters())
    biases = [(name, p) for name, p in named if "bias" in name]
    weights = [(name, p) for name, p in named if "bias" not in name]
    if backwards:
        groups = [{"lr": 0.7, "params": weights[::-1]}, {"weight_decay": 0.7, "params": biases[::-1]}]
        return [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    return [{"params": biases, "lr": 0.03}, {"params": weights, "weight_decay": 0.1}]


def sgd_for(model: nn.Module, *, backwards: bool = False) -> Optimizer:
    return torch.optim.SGD(groups_of(model, backwards=backwards), lr=0.1, weight_decay=0.01)


Backward = Callable[[nn.Module, Tensor, Tensor], Any]


def train(state: dict[str, Any], backward: Backward, data: tuple[Tensor, Tensor]) -> None:
    """One step of both; `data` is this rank's."""
    for part in (state["tied"], state["loose"]):
        backward(part["model"], *data)
        part["optimizer"].step()
        part["optimizer"].zero_grad()
    state["tied"]["schedule"].step()
    state["step"] += 1
    state["seen"]["words"][1] += BATCH * LENGTH


def plain(steps: int) -> dict[str, Any]:
    """The same by plain PyTorch in one process."""
    state = build(seed=1)
    state["loose"]["optimizer"] = sgd_for(state["loose"]["model"])
    for _ in range(steps):
        train_plain(state)
    return state


def train_plain(state: dict[str, Any]) -> None:
    """The next step by plain PyTorch."""

    def backward(model: nn.Module, words: Tensor, target: Tensor) -> None:
        loss_of(model(words), target).backward()

    train(state, backward, batch(state["step"]))


def parts_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Optimizer]]:
    for name in ("tied", "loose"):
        model, optimizer = state[name]["model"], state[name]["optimizer"]
        yield name, getattr(model, "module", model), getattr(optimizer, "optimizer", optimizer)


def weights_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name} {key}": v for name, model, _ in parts_of(state) for key, v in model.state_dict().items()}


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """All that has to be restored, under the plain model's names; of sharded tensors and stages this rank's part."""
    values = {"step": state["step"], "seen": {"words": list(state["seen"]["words"])}, **weights_of(state)}
    values["epoch"] = state["tied"]["schedule"].last_epoch
    for name, model, optimizer in parts_of(state):
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for parameter in group["params"]:
                values[f"{name} options of {names[id(parameter)]}"] = options
                entries = optimizer.state.get(parameter, {})
                values |= {f"{name} {key} of {names[id(parameter)]}": entry for key, entry in entries.items()}
    return values


def whole_values(state: Mapping[str, Any], access: Strategy | None = None) -> dict[str, Any]:
    """The same with whole tensors, and those of all stages. Collective."""
    values = {key: whole(v) if isinstance(v, Tensor) else v for key, v in values_of(state).items()}
    if access is None or not access.state_is_distributed:
        return values
    return {key: value for part in access.gather_objects(values) for key, value in part.items()}


Indices = dict[str, Tensor]


def differences(
    values: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, indices: Indices, *, part: bool
) -> list[str]:
    """What is not as expected. Nothing is sent.

    Args:
        values: What this rank holds.
        expected: The whole.
        tolerance: Relative to the largest value of a tensor.
        indices: Which elements of a tensor this rank holds; filled as they are asked for.
        part: Whether other ranks hold what is missing here.
    """
    names = values.keys() - expected.keys() if part else values.keys() ^ expected.keys()
    found = [f"`{name}` is only {'here' if name in values else 'expected'}" for name in names]
    for name in values.keys() & expected.keys():
        value, other = values[name], expected[name]
        if not isinstance(value, Tensor):
            found += [] if value == other else [f"`{name}`: {value} and not {other}"]
        elif value.shape != other.shape or value.dtype != other.dtype:
            found += [f"`{name}`: {value.dtype} {[*value.shape]} and not {other.dtype} {[*other.shape]}"]
        else:
            error = _error(value, other, name, indices)
            found += [] if error <= tolerance else [f"`{name}`: off by {error:.1e} of the largest value"]
    return sorted(found)


def _error(value: Tensor, expected: Tensor, name: str, indices: Indices) -> float:
    own, largest = local(value), expected.abs().max()
    if own is not value:
        if name not in indices:
            indices[name] = _indices(value)
        expected = expected.flatten()[indices[name]]
    return 0.0 if torch.equal(own, expected) else float((own - expected).abs().max() / largest)


def _indices(value: Any) -> Tensor:
    """Of the elements that this rank holds, as PyTorch itself divides a tensor."""
    from torch.distributed.tensor import distribute_tensor

    numbers = torch.arange(value.numel()).view(value.shape)
    return local(distribute_tensor(numbers, value.device_mesh, value.placements, src_data_rank=None))


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Run:
    """Both models under a strategy, with values of their own.

    Args:
        context: The rank.
        layout: One of `LAYOUTS`.
        backwards: Whether the parameter groups of SGD, which is made after setup, stand the other way round.
    """

    def __init__(self, context: RankContext, layout: str, *, backwards: bool = False) -> None:
        self.fabric = context.fabric(strategy=LAYOUTS[layout][1]())
        self.state = build(seed=2)
        self._indices: Indices = {}
        tied, loose = self.state["tied"], self.state["loose"]
        tied["model"], tied["optimizer"] = self.fabric.setup(tied["model"], tied["optimizer"])
        loose["model"] = self.fabric.setup(loose["model"])
        loose["optimizer"] = self.fabric.setup_optimizers(sgd_for(loose["model"], backwards=backwards))

    def train(self) -> None:
        """One step on this rank's part of the batch."""
        part = self.fabric.strategy.distributed_sampler_kwargs
        words, target = (t[part["rank"] :: part["num_replicas"]] for t in batch(self.state["step"]))
        train(self.state, self._backward, (words, target))

    def _backward(self, model: nn.Module, words: Tensor, target: Tensor) -> None:
        self.fabric.forward_backward(model, words, target=target, loss_fn=loss_of)

    def differences(self, expected: Mapping[str, Any], tolerance: float = 0.0) -> list[str]:
        part = self.fabric.strategy.state_is_distributed
        values = values_of(self.state)
        found = differences(values, expected, tolerance, self._indices, part=part)
        if part:
            held = set().union(*self.fabric.strategy.gather_objects(set(values)))
            found += [f"`{name}` is on no rank" for name in sorted(expected.keys() - held)]
        return found

    @torch.no_grad()
    def spoil(self, *, state_too: bool) -> None:
        """Change all that a checkpoint restores; the optimizer's state goes, or becomes another one."""
        self.state["step"], self.state["seen"]["words"], self.state["tied"]["schedule"].last_epoch = -1, [], -1
        for _, model, optimizer in parts_of(self.state):
            for tensor in model.state_dict().values():
                local(tensor).fill_(7.0)
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 7.0, 7.0
            for entries in optimizer.state.values():
                for tensor in entries.values():
                    local(tensor).fill_(7.0)
            if state_too:
                optimizer.state.clear()


def write(context: RankContext, layout: str, plain_files: Path, folder: Path) -> list[str]:
    """Take over what plain PyTorch saved, take one more step, and save that in every form. Returns what is wrong."""
    run = Run(context, layout)
    expected = [whole_values(plain(steps)) for steps in (BEFORE, BEFORE + 1)]
    for name in ("tied", "loose"):
        run.fabric.load_raw(plain_files / f"{name} model.pt", run.state[name]["model"])
        run.fabric.load_raw(plain_files / f"{name} optimizer.pt", run.state[name]["optimizer"])
    raw = {name: value for name, value in expected[0].items() if name.startswith(("tied", "loose"))}
    wrong = [f"object by object: {line}" for line in run.differences(raw) if "only here" not in line]
    run.spoil(state_too=True)
    assert run.fabric.load(plain_files / "plain.pt", run.state) == {}
    wrong += [f"as plain PyTorch saved it: {line}" for line in run.differences(expected[0])]
    run.train()
    wrong += [f"one step later: {line}" for line in run.differences(expected[1], TOLERANCE)]
    for form, name in FORMS.items():
        run.fabric.save(folder / name, run.state, format=form)  # type: ignore[arg-type]
    values = whole_values(run.state, run.fabric.strategy)
    if context.rank == 0:
        torch.save(values, folder / "values.pt")
    return wrong


def read(context: RankContext, layout: str, folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """For each writer what is wrong with what was loaded of it, and after one more step."""
    run = Run(context, layout, backwards=True)
    after = whole_values(plain(BEFORE + 2))
    wrong: dict[str, list[str]] = {}
    for number, (writer, folder) in enumerate(folders.items()):
        expected, found = torch.load(folder / "values.pt"), []
        for form, name in FORMS.items():
            run.spoil(state_too=number % 2 == 0)
            try:
                assert run.fabric.load(folder / name, run.state) == {}
            except Exception as error:  # on all ranks
                found.append(f"{form}: {type(error).__name__}: {error}")
                continue
            found += [f"{form}: {line}" for line in run.differences(expected)]
        run.train()
        wrong[writer] = [*found, *(f"one step later: {line}" for line in run.differences(after, TOLERANCE))]
    return wrong


def write_plain(folder: Path) -> None:
    """What plain PyTorch saves of all that, in one file and object by object."""
    state = plain(BEFORE)
    content: dict[str, Any] = {"step": state["step"], "seen": state["seen"]}
    for name, model, optimizer in parts_of(state):
        content[name] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for key, own in content[name].items():
            torch.save(own, folder / f"{name} {key}.pt")
    content["tied"]["schedule"] = state["tied"]["schedule"].state_dict()
    torch.save(content, folder / "plain.pt")
