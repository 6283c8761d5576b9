# SPDX-License-Identifier: Apache-2.0
"""What `FSDPStrategy` trains equals plain PyTorch in one process on the joined batch."""

import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import Shard

from fabric import Fabric
from fabric.strategies import STRATEGIES, FSDPStrategy
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
STEPS, BATCH = 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two layers, some of whose sizes no number of ranks divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))

    def embed(self, x):
        return self.blocks[0](self.first(x))

    def training_step(self, x, y):
        return F.mse_loss(self(x), y)


class TiedNet(Net):
    """The last layer shares its weight with the first, and two blocks share one between them."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 6)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.first = nn.Linear(6, 8)
        self.first.weight = self.last.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        x = F.linear(x, self.first.weight.t(), self.first.bias)
        for block in self.blocks:
            x = block(x)
        return self.last(x)[:, :3] + self.norm(x)[:, :3]


class SharedNet(Net):
    """One block is called three times; another pair of blocks has a layer in common."""

    def __init__(self):
        super().__init__()
        self.blocks[2] = self.blocks[0]
        self.pair = nn.ModuleList(Block() for _ in range(2))
        self.pair[1].up = self.pair[0].up

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0], *self.pair):
            x = block(x)
        return self.last(self.norm(x))


class FrozenNet(Net):
    """One block is frozen, of another a part."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)
        self.first.bias.requires_grad_(False)


class UnusedNet(Net):
    """Neither a whole block, nor parts of another, take part in the steps."""

    def __init__(self):
        super().__init__()
        self.never, self.blocks[1].never = Block(), nn.Linear(2, 2)


class MixedBlock(Block):
    def __init__(self):
        super().__init__()
        self.bfloat16()
        self.norm.float()

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x).bfloat16()))).float()


class MixedNet(Net):
    """Its blocks are bfloat16, but for their norms."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(3))


class DeepNet(Net):
    """Blocks inside of blocks."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))

    def forward(self, x):
        return self.last(self.norm(self.outer(self.first(x))))


class CompiledNet(Net):
    """Each block is compiled, in two ways; by a backend that changes nothing."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")
        self.blocks[2].compile(backend="eager")


class NoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).eval()

    def forward(self, x):
        return self.layers(x)


def batch(step, micro=0):
    generator = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def optimizer_of(model, **options):
    """Two groups, which differ, in an order that is not the model's."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": biases, "lr": 0.2}, {"params": others, "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)


def plain(build, *, accumulation=1, norm_type=2.0):
    model = build()
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            x, y = batch(step, micro)
            loss = F.mse_loss(model(x), y) / accumulation
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, whole_state(model)


def train(context, build, strategy, *, accumulation=1, norm_type=2.0, **options):
    fabric = context.fabric(strategy=strategy, **options)
    model = build()
    model, optimizer = fabric.setup(model, optimizer_of(model))
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            x, y = (tensor[context.rank :: context.world_size] for tensor in batch(step, micro))
            with fabric.no_backward_sync(model, enabled=micro < accumulation - 1):
                loss = F.mse_loss(model(x), y) / accumulation
                fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach()).item())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5, norm_type=norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, whole_state(model), fabric.strategy.setup_rows()


def whole_state(model):
    return {name: whole(value) for name, value in model.state_dict().items()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def assert_equal(run, expected, tolerance=2e-6):
    for ours, theirs in zip(run[:2], expected[:2], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance * 10, atol=tolerance)
    assert list(run[2]) == list(expected[2])
    for name, value in expected[2].items():
        torch.testing.assert_close(run[2][name], value, rtol=tolerance * 10, atol=tolerance * 5)


def by_columns(parameter):
    return Shard(1) if parameter.dim() == 2 else None


def is_block(module):
    return isinstance(module, Block)


BY_BLOCK = "Net: 3 x Block of 296 + 99 others"
CASES = {
    "defaults": (2, Net, FSDPStrategy(), BY_BLOCK),
    "four ranks": (4, Net, FSDPStrategy(), BY_BLOCK),
    "classes": (
        2,
        Net,
        FSDPStrategy(auto_wrap_policy={Block, nn.Linear}),
        "Net: 8 x Linear of 27 to 144 + 3 x Block of 296 + 16 others",
    ),
    "one class": (2, Net, FSDPStrategy(auto_wrap_policy=Block), BY_BLOCK),
    "function": (2, Net, FSDPStrategy(auto_wrap_policy=is_block), BY_BLOCK),
    "ModuleWrapPolicy": (2, Net, FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({Block})), BY_BLOCK),
    "transformer policy": (
        2,
        Net,
        FSDPStrategy(auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})),
        BY_BLOCK,
    ),
    "size policy": (
        2,
        Net,
        FSDPStrategy(auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=140)),
        "Net: 3 x Block of 296 + 3 x Linear of 144 + 99 others",
    ),
    "SHARD_GRAD_OP": (2, Net, FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), BY_BLOCK),
    "NO_SHARD": (2, Net, FSDPStrategy(sharding_strategy=ShardingStrategy.NO_SHARD), BY_BLOCK),
    "to groups of two": (4, Net, FSDPStrategy(reshard_after_forward=2), BY_BLOCK),
    "hybrid": (4, Net, FSDPStrategy(device_mesh=(2, 2)), BY_BLOCK),
    "offload": (2, Net, FSDPStrategy(cpu_offload=True), BY_BLOCK),
    "offload policy": (2, Net, FSDPStrategy(cpu_offload=CPUOffloadPolicy(pin_memory=False)), BY_BLOCK),
    "recomputed": (2, Net, FSDPStrategy(activation_checkpointing_policy={Block}), BY_BLOCK),
    "recomputed in part": (2, Net, FSDPStrategy(activation_checkpointing_policy={nn.LayerNorm}), BY_BLOCK),
    "recomputed and offloaded": (
        4,
        TiedNet,
        FSDPStrategy(activation_checkpointing_policy=is_block, cpu_offload=True, device_mesh=(2, 2)),
        "TiedNet: 1 x Block of 296 + 542 others",
    ),
    "recomputed, nested": (2, Net, FSDPStrategy(activation_checkpointing_policy={Block, nn.Linear}), BY_BLOCK),
    "by columns": (2, Net, FSDPStrategy(shard_placement_fn=by_columns), BY_BLOCK),
    "tied": (2, TiedNet, FSDPStrategy(), "TiedNet: 1 x Block of 296 + 542 others"),
    "shared": (2, SharedNet, FSDPStrategy(), "SharedNet: 2 x Block of 296 + 547 others"),
    "frozen": (2, FrozenNet, FSDPStrategy(), "FrozenNet: 3 x Block of 296 + 99 others"),
    "frozen and hybrid": (4, FrozenNet, FSDPStrategy(device_mesh=(2, 2)), "FrozenNet: 3 x Block of 296 + 99 others"),
    "unused": (2, UnusedNet, FSDPStrategy(), "UnusedNet: 4 x Block of 296 to 302 + 99 others"),
    "nested": (
        2,
        DeepNet,
        FSDPStrategy(auto_wrap_policy={Block, nn.Sequential}),
        "DeepNet: 7 x Block of 296 + 3 x Sequential of 592 to 1,184 + 99 others",
    ),
    "no blocks": (2, NoBlocks, FSDPStrategy(), "NoBlocks: 63 parameters as one"),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process(name):
    ranks, build, strategy, row = CASES[name]
    expected = plain(build)
    runs = run_ranks(ranks, train, build, strategy)
    for run in runs:
        assert_equal(run, expected)
        assert run[1] == runs[0][1]
        assert run[3][0][1] == row


def train_compiled(context, *args):
    with warnings.catch_warnings():
        # What PyTorch's compiler does when it looks at any input that is no leaf; it hides the warning from users.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        return train(context, *args)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing_policy": {nn.LayerNorm}}], ids=["", "recomputed"])
def test_compiled_blocks(options):
    expected = plain(Net)
    for run in run_ranks(2, train_compiled, CompiledNet, FSDPStrategy(**options), timeout=180):
        assert_equal(run, expected)
        assert run[3][0][1] == "CompiledNet: 3 x Block of 296 + 99 others"


def test_blocks_with_norms_of_another_dtype():
    expected = plain(MixedNet)
    for run in run_ranks(2, train, MixedNet, FSDPStrategy()):
        assert_equal(run, expected, tolerance=4e-3)


@pytest.mark.parametrize("how", ["unsharded", "sharded"])
@pytest.mark.parametrize(("ranks", "mesh"), [(2, None), (4, (2, 2))], ids=["2", "2x2"])
def test_accumulation(how, ranks, mesh):
    expected = plain(Net, accumulation=3)
    for run in run_ranks(ranks, train, Net, FSDPStrategy(accumulation=how, device_mesh=mesh), accumulation=3):
        assert_equal(run, expected)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_norms_of_other_orders(norm_type):
    """On 4 ranks the bias of 3 elements leaves one of them without any."""
    expected = plain(Net, norm_type=norm_type)
    for run in run_ranks(4, train, Net, FSDPStrategy(), norm_type=norm_type):
        assert_equal(run, expected)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_cpu_offload", "hsdp"])
def test_names(name):
    expected = plain(Net)
    rows = {"fsdp": "2 ranks", "fsdp_cpu_offload": "2 ranks", "hsdp": "2 ranks, 1 copy"}
    for run in run_ranks(2, train, Net, name):
        assert_equal(run, expected)
        assert ("over", rows[name], "freed between forward and backward") in run[3]
        assert (("kept in", "main memory", "argument (cpu_offload)") in run[3]) == (name == "fsdp_cpu_offload")


def own_dtypes(context):
    """A policy of the user's own decides about dtypes; what comes out is float32 all the same."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fabric = context.fabric(strategy=FSDPStrategy(mixed_precision=policy))
    model = Net()
    seen = []
    model.blocks[0].up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = fabric.setup(model)
    output = model(batch(0)[0])
    fabric.backward(output.sum())
    return seen, output.dtype, {p.grad.dtype for p in model.parameters()}, fabric.strategy.setup_rows()[-1]


def test_a_policy_of_ones_own():
    row = ("gathered in", "bfloat16, reduced in float32", "argument (mixed_precision)")
    expected = ([torch.bfloat16], torch.float32, {torch.float32}, row)
    assert run_ranks(2, own_dtypes) == [expected, expected]


# Construction needs no ranks.


def raises(kind, text, **options):
    with pytest.raises(kind) as error:
        FSDPStrategy(**options)
    assert str(error.value) == text


def test_policies_that_are_none():
    advice = "Write for example `{Block}`, with the class of your model's blocks."
    raises(
        TypeError,
        "`FSDPStrategy(auto_wrap_policy=...)` takes a set of module classes, or a function that is given a submodule"
        f" and says whether it is a unit, but got `'Block'`. {advice}",
        auto_wrap_policy="Block",
    )
    raises(
        ValueError,
        "`FSDPStrategy(activation_checkpointing_policy=...)` is empty. Leave it out, or name the classes of your"
        " model's blocks.",
        activation_checkpointing_policy=set(),
    )


def test_options_that_are_none():
    raises(
        ValueError,
        "`FSDPStrategy(sharding_strategy='ZERO')` is not known. Choose one of 'FULL_SHARD', 'SHARD_GRAD_OP',"
        " 'HYBRID_SHARD', 'NO_SHARD'.",
        sharding_strategy="ZERO",
    )
    raises(
        ValueError,
        "`FSDPStrategy(reshard_after_forward=0)` is neither True, False, nor a number of ranks to which units are"
        " sharded between forward and backward.",
        reshard_after_forward=0,
    )
    raises(
        TypeError,
        "`FSDPStrategy(cpu_offload='yes')` takes True, False, or a `torch.distributed.fsdp.CPUOffloadPolicy(...)`.",
        cpu_offload="yes",
    )
    raises(
        TypeError,
        "`FSDPStrategy(mixed_precision=torch.bfloat16)` takes a"
        " `torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)`. Without it the precision of"
        " `Fabric(precision=...)` decides.",
        mixed_precision=torch.bfloat16,
    )
    raises(
        ValueError,
        "`FSDPStrategy(accumulation='shard')` is not a way to accumulate. Did you mean 'sharded'? Choose one of"
        " 'unsharded', 'sharded'.",
        accumulation="shard",
    )
    raises(
        ValueError,
        "`FSDPStrategy(state_dict_type='whole')` is not a layout of checkpoints. Choose one of 'full', 'sharded'.",
        state_dict_type="whole",
    )
    with pytest.raises(
        TypeError, match=r"^`FSDPStrategy\(ignored_parameters=\.\.\.\)` is not an argument\. Did you mean"
    ):
        FSDPStrategy(ignored_parameters=set())


def test_options_that_contradict_each_other():
    raises(
        ValueError,
        "`FSDPStrategy(sharding_strategy='SHARD_GRAD_OP', reshard_after_forward=True)` contradict each other:"
        " 'SHARD_GRAD_OP' means False. Leave one of them out.",
        sharding_strategy="SHARD_GRAD_OP",
        reshard_after_forward=True,
    )
    raises(
        ValueError,
        "`FSDPStrategy(sharding_strategy='HYBRID_SHARD')` takes sizes `(copies, shards)`, but `device_mesh` has 1"
        " dimension. Change one of them.",
        sharding_strategy="HYBRID_SHARD",
        device_mesh=(4,),
    )
    raises(
        ValueError,
        "`FSDPStrategy(sharding_strategy='FULL_SHARD')` takes one size, `(shards,)`, but `device_mesh` has 2"
        " dimensions. Change one of them.",
        sharding_strategy="FULL_SHARD",
        device_mesh=(2, 2),
    )
    raises(
        ValueError,
        "`FSDPStrategy(sharding_strategy='NO_SHARD', device_mesh=(2, 2))` shards over 2 ranks. Write 'HYBRID_SHARD' for"
        " copies that are sharded, or leave `device_mesh` out.",
        sharding_strategy="NO_SHARD",
        device_mesh=(2, 2),
    )
    raises(
        TypeError,
        "`FSDPStrategy(device_mesh=4)` takes sizes such as `(2, 4)`, for 2 copies of the model, each of which is"
        " sharded over 4 ranks; or a `torch.distributed.DeviceMesh`.",
        device_mesh=4,
    )
    raises(
        ValueError,
        "`FSDPStrategy(device_mesh=...)` takes one or two dimensions, but got 3: (1, 2, 2). For tensor parallel use"
        " `ModelParallelStrategy`.",
        device_mesh=(1, 2, 2),
    )


def test_sizes_that_do_not_multiply():
    text = (
        "`FSDPStrategy(device_mesh=(2, 3))` has 6 ranks, but this run has 4 processes. Make the sizes multiply to that"
        " number."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Fabric(accelerator="cpu", devices=4, strategy=FSDPStrategy(device_mesh=(2, 3)))


def test_setup_before_launch():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    text = (
        "`fabric.setup(...)` needs the 2 processes of this run, and they are not started yet. Call `fabric.launch()`"
        " before it."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        fabric.setup(Net())


def test_names_are_listed():
    assert {"fsdp", "fsdp_cpu_offload", "hsdp"} <= set(STRATEGIES.available_strategies())


# What is wrong with a model is told on every rank.


def refusals(context):
    texts = []

    def refuse(fabric, model, *optimizers):
        with pytest.raises((RuntimeError, ValueError)) as error:
            fabric.setup(model, *optimizers)
        texts.append(str(error.value))

    fabric = context.fabric(strategy="fsdp")
    refuse(context.fabric(strategy=FSDPStrategy(auto_wrap_policy={nn.Conv2d})), Net())
    refuse(context.fabric(strategy=FSDPStrategy(auto_wrap_policy={nn.ModuleList})), Net())
    refuse(context.fabric(strategy=FSDPStrategy(activation_checkpointing_policy={Block})), CompiledNet())
    refuse(context.fabric(strategy=FSDPStrategy(cpu_offload=CPUOffloadPolicy())), Net())
    refuse(context.fabric(strategy=FSDPStrategy(reshard_after_forward=3)), Net())
    model = fabric.setup(Net())
    refuse(fabric, nn.Sequential(model.module))
    scalar = Net()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refuse(fabric, scalar)
    refuse(fabric, Net(), torch.optim.SGD(Net().parameters()))
    side_by_side = Net()
    side_by_side.first.bias.data = side_by_side.first.bias.data.double()
    refuse(fabric, side_by_side)
    return texts


def test_models_that_it_can_not_take():
    ranks = run_ranks(2, refusals)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [
        "`FSDPStrategy(auto_wrap_policy=...)` matches no submodule of `Net`, whose submodules are of the classes:"
        " Block, LayerNorm, Linear, ModuleList. Choose among these, or leave the policy out to take its repeated"
        " blocks.",
        "`FSDPStrategy(auto_wrap_policy=...)` matches `blocks`, a `ModuleList`, which is never called itself. Choose"
        " the modules inside of it.",
        "`activation_checkpointing_policy` matches a `Block` that is compiled in place, with the hooks that would do"
        " it. Write `blocks[i] = torch.compile(blocks[i])` in place of `blocks[i].compile()`.",
        "`FSDPStrategy(cpu_offload=CPUOffloadPolicy(pin_memory=True))` pins memory, which needs an accelerator, but"
        " this run is on the CPU. Write `cpu_offload=True`, which pins where it can.",
        "`FSDPStrategy(reshard_after_forward=3)` must divide the 2 ranks over which parameters are sharded. Choose such"
        " a number, or True or False.",
        "`fabric.setup(...)`: `Sequential` is sharded already, `0.first.weight` for example. Set up each module once,"
        " as you made it, and leave `fully_shard` to the strategy; with `ModelParallelStrategy(parallelize_fn=...)` you"
        " can call it yourself.",
        "`fabric.setup(...)`: the parameter `scale` of `Net` is a scalar, which can't be sharded. Make it a vector of"
        " one element: `torch.nn.Parameter(torch.ones(1))`.",
        "`SGD` holds 24 parameters of no module that is set up, the first of shape [8, 6]. Set its module up first:"
        " `fabric.setup(module, optimizer)`, or `fabric.setup_module(module)` for each of several modules, then"
        " `fabric.setup_optimizers(optimizer)`.",
        "`first` holds parameters of float32 and float64 side by side, and what is sharded as a unit has one dtype."
        " Convert it with `module.to(dtype)`, or put the parameters of the other dtype into a submodule of their own.",
    ]


# Mixed precision and normalisation


class Norms(nn.Module):
    """Norms of each kind before and between other layers; targets are larger than half precision is exact for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(
            *(nn.LayerNorm(6), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Linear(4, 3))
        )
        self.seen = set()

    def forward(self, x):
        return self.layers(x)

    def training_step(self, x, y):
        self.seen |= {x.dtype, y.dtype}
        return F.mse_loss(self.layers(x) - y, torch.zeros_like(y))


def norms_in(context, precision, options):
    fabric = context.fabric(strategy=FSDPStrategy(**options), precision=precision)
    model = fabric.setup(Norms())
    model.eval()
    x, y = (tensor[context.rank :: context.world_size] for tensor in large_batch())
    loss = model.training_step(x, y)
    scale = fabric.precision.state_dict().get("scale", 1.0)
    fabric.backward(loss / 20 / scale)
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return fabric.all_reduce(loss.detach()).item(), gradients, model.seen


def large_batch():
    x, y = batch(0)
    return x + 300, y + 301


@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": {nn.Linear}}], ids=["", "by layer"])
@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_inputs_and_norms_stay_float32_as_under_autocast(precision, dtype, options):
    model = Norms().eval()
    with torch.autocast("cpu", dtype=dtype):
        expected = model.training_step(*large_batch())
    (expected / 20).backward()
    for loss, gradients, seen in run_ranks(2, norms_in, precision, options):
        assert seen == {torch.float32}
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            largest = parameter.grad.abs().max()
            torch.testing.assert_close(gradients[name] / largest, parameter.grad / largest, rtol=0, atol=2e-2)


def train_compiled_whole(context):
    return train_compiled(context, compiled_net, FSDPStrategy())


def compiled_net():
    return torch.compile(Net(), backend="eager")


def test_a_compiled_model():
    expected = plain(Net)
    for run in run_ranks(2, train_compiled_whole, timeout=180):
        assert_equal(run, expected)
        assert run[3][0][1] == BY_BLOCK


def _load_full_state(context):
    fabric = context.fabric(strategy="fsdp")
    torch.manual_seed(context.rank)
    model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
    torch.manual_seed(7)
    full = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).state_dict()
    model.load_state_dict(full)
    errors = []
    for state, options in ((full, {"assign": True}), ({"0.weight": full["1.weight"], "x": full["0.bias"]}, {})):
        with pytest.raises((ValueError, RuntimeError)) as error:
            model.load_state_dict(state, **options)
        errors.append(str(error.value))
    loaded = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return all(torch.equal(full[name], loaded[name]) for name in full), errors


def test_a_set_up_module_takes_a_full_state():
    for equal, errors in run_ranks(2, _load_full_state):
        assert equal
        assert errors == [
            "`Sequential.load_state_dict(assign=True)` would replace the shards that the optimizer knows."
            " Leave `assign` out: the values are copied into them.",
            "The state does not match `Sequential`.\n  missing     0.bias\n  missing     1.weight\n"
            "  missing     1.bias\n"
            "  unexpected  x\nTo skip what is missing or unexpected, pass `strict=False`.",
        ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"use_orig_params": True},
            "`FSDPStrategy(use_orig_params=...)` belongs to PyTorch's former `FullyShardedDataParallel`; `fully_shard`"
            " needs no such option. Leave it out.",
        ),
        ({"shard_placement_fn": 3}, "`FSDPStrategy(shard_placement_fn=3)` takes a function of a parameter."),
        (
            {"ignored_params": [1]},
            "`FSDPStrategy(ignored_params=...)` takes a set of parameters: `set(model.head.parameters())`.",
        ),
    ],
)
def test_what_fully_shard_does_not_take_is_refused(options, text):
    with pytest.raises(TypeError) as error:
        FSDPStrategy(**options)
    assert str(error.value) == text
