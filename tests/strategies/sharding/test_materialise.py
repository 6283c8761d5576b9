# SPDX-License-Identifier: Apache-2.0
"""Where the values of sharded models come from: bit for bit those of rank 0, or of the constructor in one process."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Tied, with computed tables, and initialised from the root."""

    def __init__(self, root=True):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, padding_idx=2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(3, 7))  # rows do not divide by the ranks
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight
        table = torch.outer(torch.arange(5.0), 0.5 ** torch.arange(WIDTH)).cos()
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.mask = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
        if root:
            self.apply(self._init)
            with torch.no_grad():
                self.embedding.weight[3].fill_(7.0)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, words):
        x = self.embedding(words) @ self.mask + self.table[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.mean()


def net(seed=1, **options):
    torch.manual_seed(seed)
    return Net(**options)


def split(module, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"up": ColwiseParallel, "down": RowwiseParallel}
    plan = {f"blocks.{number}.{name}": style() for number in range(3) for name, style in styles.items()}
    return parallelize_module(module, mesh["tensor_parallel"], plan)


SETUPS = {
    "fsdp": (2, lambda: "fsdp"),
    "fsdp of 4": (4, lambda: "fsdp"),
    "fsdp of 1": (1, lambda: "fsdp"),
    "hsdp": (4, lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))),
    "offload": (2, lambda: FSDPStrategy(cpu_offload=True)),
    "activation checkpointing": (2, lambda: FSDPStrategy(activation_checkpointing_policy={Block})),
    "tensor": (2, lambda: ModelParallelStrategy(split)),
    "tensor and data": (4, lambda: ModelParallelStrategy(split, data_parallel_size=2, tensor_parallel_size=2)),
}


def whole(model):
    """All values, on every rank."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for name, t in tensors}


def values(module):
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def assert_equal(actual, module):
    expected = values(module)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


WORDS = torch.arange(8).view(2, 4) % 10


def train(fabric, model, optimizer):
    """One step, so that a model that looks right but is not is found out."""
    loss = model(WORDS).logsumexp(-1).mean()
    fabric.backward(loss)
    optimizer.step()
    return loss.detach()


def expected_training(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = module(WORDS).logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), values(module)


def assert_trained(actual, module):
    (loss, after), (expected_loss, expected) = actual, expected_training(module)
    torch.testing.assert_close(loss, expected_loss)
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, msg=name)


# --------------------------------------------------------------------------------------------------------------------
# From the constructor
# --------------------------------------------------------------------------------------------------------------------
def from_constructor(context, setup, optimizer_first):
    fabric = context.fabric(strategy=SETUPS[setup][1]())
    torch.manual_seed(1 if context.rank == 0 else 50 + context.rank)
    before = torch.get_rng_state()
    with fabric.init_module(empty_init=True):
        model = Net()
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert torch.equal(torch.get_rng_state(), before)
    if optimizer_first:
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.head.weight is model.embedding.weight
    start = whole(model)
    draw = torch.rand(3)
    loss = train(fabric, model, optimizer)
    return start, draw, (fabric.all_reduce(loss), whole(model))


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("setup", SETUPS)
def test_the_values_are_the_constructor_s(setup, optimizer_first):
    ranks = run_ranks(SETUPS[setup][0], from_constructor, setup, optimizer_first)
    plain = net()
    following = torch.rand(3)
    for rank, (start, draw, trained) in enumerate(ranks):
        assert_equal(start, plain)
        assert_trained(trained, copy.deepcopy(plain))
        if rank:
            torch.manual_seed(50 + rank)
            following = torch.rand(3)
        assert torch.equal(draw, following)  # rank 0's has moved on, the others' are as they were


def with_one_seed(context):
    fabric = context.fabric(strategy="fsdp")
    fabric.seed_everything(1)
    with fabric.sharded_model():
        model = Net()
    fabric.setup(model)
    return torch.rand(3)


def test_ranks_with_one_seed_stay_alike():
    net()
    following = torch.rand(3)
    assert all(torch.equal(draw, following) for draw in run_ranks(2, with_one_seed))


def in_precision(context, precision):
    fabric = context.fabric(strategy="fsdp", precision=precision)
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        model = Net()
        model.single = nn.Parameter(torch.randn(3, 3, dtype=torch.float32))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    start = whole(model)
    assert torch.isfinite(train(fabric, model, optimizer))
    return start


def in_one_process(precision):
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(1)
    with fabric.init_module():
        model = Net()
        model.single = nn.Parameter(torch.randn(3, 3, dtype=torch.float32))
    return fabric.setup(model).module


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_in_each_precision(precision):
    expected = in_one_process(precision)
    for start in run_ranks(2, in_precision, precision):
        assert_equal(start, expected)
        assert {n: t.dtype for n, t in start.items()} == {n: t.dtype for n, t in values(expected).items()}


def two_models(context):
    fabric = context.fabric(strategy="fsdp")
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        first, second = Net(), Net(root=False)
    with fabric.init_module(empty_init=True):
        third = nn.Linear(WIDTH, WIDTH)
    second, first, third = fabric.setup(second), fabric.setup(first), fabric.setup(third)
    return whole(first), whole(second), whole(third)


def test_models_that_were_made_together_and_apart():
    torch.manual_seed(1)
    first, second, third = Net(), Net(root=False), nn.Linear(WIDTH, WIDTH)
    for start in run_ranks(2, two_models):
        for actual, expected in zip(start, (first, second, third), strict=True):
            assert_equal(actual, expected)


def compiled(context):
    fabric = context.fabric(strategy="fsdp")
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        model = Net()
    model = torch.compile(model, backend="eager")
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    start = whole(model)
    with warnings.catch_warnings():
        # What PyTorch's compiler does when it looks at any input that is no leaf; it hides the warning from users.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        return start, train(fabric, model, optimizer)


def test_a_compiled_model():
    plain = net()
    for start, loss in run_ranks(2, compiled, timeout=120):
        assert_equal(start, plain)
        torch.testing.assert_close(loss, expected_training(copy.deepcopy(plain))[0])


# --------------------------------------------------------------------------------------------------------------------
# From initialisers
# --------------------------------------------------------------------------------------------------------------------
class Rooted(nn.Module):
    """Its values are in `init_weights` alone, which writes into blocks too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.own = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("table", torch.empty(4), persistent=False)

    def init_weights(self):
        nn.init.normal_(self.own)
        self.table = torch.arange(4.0)
        for block in self.blocks:
            nn.init.trunc_normal_(block.up.weight, std=0.02)
            with torch.no_grad():
                block.down.weight[0].fill_(0.0)


def from_initialisers(context, inside):
    fabric = context.fabric(strategy="fsdp")
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True) if inside else torch.device("meta"):
        model = Rooted()
    return whole(fabric.setup(model))


@pytest.mark.parametrize("inside", [True, False])
def test_init_weights_of_the_root_reaches_into_blocks(inside):
    torch.manual_seed(1)
    expected = Rooted()
    expected.init_weights()
    for start in run_ranks(2, from_initialisers, inside):
        assert_equal(start, expected)


def replaced_initialisers(context):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        layer.reset_parameters = lambda layer=layer: nn.init.constant_(layer.weight, 4.0)
    return whole(fabric.setup(model))


def test_an_initialiser_that_a_program_puts_on_a_module_is_called():
    for start in run_ranks(2, replaced_initialisers):
        assert torch.equal(start["0.weight"], torch.full((3, 3), 4.0))
        assert torch.equal(start["1.weight"], torch.full((3, 3), 4.0))
        assert start["0.bias"].any()


# --------------------------------------------------------------------------------------------------------------------
# From rank 0
# --------------------------------------------------------------------------------------------------------------------
def from_rank_zero(context, setup):
    fabric = context.fabric(strategy=SETUPS[setup][1]())
    with fabric.init_module(empty_init=not fabric.is_global_zero):
        model = net(seed=1 + context.rank)
    assert all(t.is_meta == bool(context.rank) for t in [*model.parameters(), *model.buffers()])
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.head.weight is model.embedding.weight
    start = whole(model)
    loss = train(fabric, model, optimizer)
    return start, (fabric.all_reduce(loss), whole(model))


@pytest.mark.parametrize("setup", [name for name, (ranks, _) in SETUPS.items() if ranks > 1])
def test_a_model_of_rank_zero_goes_to_all(setup):
    for start, trained in run_ranks(SETUPS[setup][0], from_rank_zero, setup):
        assert_equal(start, net())
        assert_trained(trained, net())


def unseeded(context, setup):
    fabric = context.fabric(strategy=SETUPS[setup][1]())
    model = net(seed=1 + context.rank)
    with torch.no_grad():
        model.count.fill_(context.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    return whole(model)


@pytest.mark.parametrize("setup", [name for name, (ranks, _) in SETUPS.items() if ranks > 1])
def test_models_that_differ_over_the_ranks_become_rank_zero_s(setup):
    expected = net()
    with torch.no_grad():
        expected.count.fill_(0)
    for start in run_ranks(SETUPS[setup][0], unseeded, setup):
        assert_equal(start, expected)


def partly_real(context):
    fabric = context.fabric(strategy="fsdp")
    body = net(seed=1 + context.rank)
    torch.manual_seed(5 + context.rank)
    with fabric.init_module(empty_init=True):
        head = nn.Linear(10, 3)
    return whole(fabric.setup(nn.Sequential(body, head)))


def test_a_new_head_on_a_body_that_is_there():
    body = net()
    torch.manual_seed(5)
    expected = nn.Sequential(body, nn.Linear(10, 3))
    for start in run_ranks(2, partly_real):
        assert_equal(start, expected)


def in_many_dtypes(context):
    fabric = context.fabric(strategy="fsdp")
    model = nn.Linear(2, 2)
    for number, dtype in enumerate(DTYPES):
        values = [0, 0, 0] if context.rank else [1, 0, 1]
        model.register_buffer(f"buffer{number}", torch.tensor(values).to(dtype))
    model.register_buffer("transposed", (torch.arange(6.0).view(2, 3) * (context.rank + 1)).t())
    model.register_buffer("nothing", torch.empty(0))
    return whole(fabric.setup(model))


NUMBERS = ("bool", "int16", "uint8", "int64", "float16", "bfloat16", "float64", "complex64")
DTYPES = tuple(getattr(torch, name) for name in NUMBERS)


def test_buffers_of_every_kind_are_sent():
    for start in run_ranks(2, in_many_dtypes):
        for number, dtype in enumerate(DTYPES):
            assert torch.equal(start[f"buffer{number}"], torch.tensor([1, 0, 1]).to(dtype))
        assert torch.equal(start["transposed"], torch.arange(6.0).view(2, 3).t())


# --------------------------------------------------------------------------------------------------------------------
# From a checkpoint
# --------------------------------------------------------------------------------------------------------------------
def from_checkpoint(context, layout, path):
    fabric = context.fabric(strategy=FSDPStrategy(state_dict_type=layout))
    if layout == "sharded":
        fabric.save("folder", {"model": fabric.setup(net())})
        path = "folder"
    with fabric.init_module(empty_init=True):
        model = net(seed=2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.load(path, {"model": model})
    start = whole(model)
    loss = train(fabric, model, optimizer)
    return start, (fabric.all_reduce(loss), whole(model))


@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_a_checkpoint_is_read_into_a_model_that_started_on_the_meta_device(layout, tmp_path):
    torch.save({"model": net().state_dict()}, tmp_path / "file")
    expected = net()
    for start, trained in run_ranks(2, from_checkpoint, layout, tmp_path / "file"):
        assert_equal(start, expected)
        assert_trained(trained, copy.deepcopy(expected))


# --------------------------------------------------------------------------------------------------------------------
# What can't be
# --------------------------------------------------------------------------------------------------------------------
class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.table = nn.Parameter(torch.empty(3))


def no_values(context):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(2, 2), Empty())
    return _error_of(fabric, model)


def _error_of(fabric, model):
    with pytest.raises((RuntimeError, ValueError)) as error:
        fabric.setup(model)
    return type(error.value), str(error.value)


def test_a_module_without_values_is_named_on_every_rank():
    text = (
        "`fabric.setup(...)`: `1.table` of `Sequential` can't be materialised: it is on the meta device, and `Empty`"
        " does not say which values it gets. Create the model inside `with fabric.init_module(empty_init=True):`, which"
        " notes what its constructor does; or give `Empty` a method `reset_parameters()`; or create the model for real"
        " on rank 0, which then hands it on: `with fabric.init_module(empty_init=not fabric.is_global_zero):`."
    )
    assert run_ranks(2, no_values) == [(RuntimeError, text)] * 2


class Forgets(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.table = torch.arange(3.0)


def an_attribute(context, empty):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=empty or not fabric.is_global_zero):
        model = Forgets()
    return _error_of(fabric, model)


@pytest.mark.parametrize("empty", [True, False])
def test_a_tensor_that_is_no_buffer_is_named_on_every_rank(empty):
    text = (
        "`fabric.setup(...)`: `layer.table` of `Forgets` is on the meta device and is neither a parameter nor a buffer,"
        " so that nothing gives it values. Register it in the constructor of `Linear`:"
        " `self.register_buffer('table', ..., persistent=False)`."
    )
    assert run_ranks(2, an_attribute, empty) == [(RuntimeError, text)] * 2


class Named(nn.Module):
    """A buffer that has a second name as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.original = self.table


def named_twice(context, empty):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=empty or not fabric.is_global_zero):
        model = Named()
    model = fabric.setup(model)
    return model.original is model.table, model.table


@pytest.mark.parametrize("empty", [True, False])
def test_a_second_name_of_a_buffer(empty):
    for same, table in run_ranks(2, named_twice, empty):
        assert same
        assert table.tolist() == [0, 1, 2]


def dropped(context, empty):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=empty):
        model = Net()
    model = fabric.setup(model)
    shards = [weakref.ref(parameter.to_local().untyped_storage()) for parameter in model.parameters()]
    del model
    gc.collect()
    gc.collect()  # a unit is a cycle of its own, which is left when that of the whole model is gone
    return [shard() is not None for shard in shards]


@pytest.mark.parametrize("empty", [True, False])
def test_a_model_that_is_dropped_leaves_nothing_in_memory(empty):
    for alive in run_ranks(2, dropped, empty):
        assert not any(alive)


def real_elsewhere(context):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=fabric.is_global_zero):
        model = Block()
    return _error_of(fabric, model)


def test_meta_on_rank_zero_and_real_elsewhere_raises():
    text = (
        "`fabric.setup(...)`: `norm.weight` of `Block` is on the meta device on rank 0 and has values on rank 1. Create"
        " the model for real on rank 0, which hands it on, or on no rank: `with"
        " fabric.init_module(empty_init=not fabric.is_global_zero):` or `with fabric.init_module(empty_init=True):`."
    )
    assert run_ranks(2, real_elsewhere) == [(RuntimeError, text)] * 2


def different_models(context):
    fabric = context.fabric(strategy="fsdp")
    return _error_of(fabric, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + context.rank)))


def test_different_models_raise():
    text = (
        "`fabric.setup(...)`: the ranks built `Sequential` in different ways: where rank 0 has `1.weight` float32 [3,"
        " 2], rank 1 has `1.weight` float32 [4, 2]. Build the same model on every rank."
    )
    assert run_ranks(2, different_models) == [(ValueError, text)] * 2


def different_constructors(context):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=True):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0 + context.rank)
    return _error_of(fabric, model)


def test_constructors_that_do_different_things_raise():
    text = (
        "`fabric.setup(...)`: the constructor of `Linear` did not do the same on every rank. Pass it the same"
        " arguments, and let it not depend on the rank or on numbers drawn before."
    )
    assert run_ranks(2, different_constructors) == [(ValueError, text)] * 2


def written_too_late(context):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=True):
        model = Block()
    nn.init.zeros_(model.up.weight)
    return _error_of(fabric, model)


def test_initialising_after_the_block_raises():
    text = (
        "`fabric.setup(...)`: `Linear.weight` was written to on the meta device after `init_module` had ended, and what"
        " was written is lost. Do it inside of `with fabric.init_module(empty_init=True):`, which notes it, or after"
        " `fabric.setup`."
    )
    assert run_ranks(2, written_too_late) == [(RuntimeError, text)] * 2


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        nn.init.constant_(self.table, self.table.sum().item())


def reads_values(context):
    fabric = context.fabric(strategy="fsdp")
    with fabric.init_module(empty_init=True):
        model = Reads()
    return _error_of(fabric, model)


def test_an_initialiser_that_reads_values_raises():
    text = (
        "`fabric.setup(...)`: `Reads.reset_parameters()` can't run on the meta device: Tensor.item() cannot be called"
        " on meta tensors. Let it not read values; or create the model for real on rank 0, which then hands it on:"
        " `with fabric.init_module(empty_init=not fabric.is_global_zero):`."
    )
    assert run_ranks(2, reads_values) == [(RuntimeError, text)] * 2


def replacing(module, mesh):
    with torch.device("meta"):
        module.up = nn.Linear(WIDTH, WIDTH)
    return module


def modules_replaced(context):
    fabric = context.fabric(strategy=ModelParallelStrategy(replacing, tensor_parallel_size=1))
    with fabric.init_module(empty_init=True):
        model = Block()
    return _error_of(fabric, model)


def test_modules_that_come_while_sharding_raise():
    [(kind, text)] = run_ranks(1, modules_replaced)
    assert kind is RuntimeError
    assert text == (
        "`fabric.setup(...)`: `up.weight` of `Block` came on the meta device while the model was sharded. Let"
        " `parallelize_fn` keep the modules of the model."
    )


def on_meta_elsewhere(context, strategy):
    fabric = context.fabric(strategy=strategy)
    with torch.device("meta"):
        model = Block()
    return _error_of(fabric, model)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_other_strategies_refuse_the_meta_device(strategy):
    [(kind, text)] = run_ranks(1, on_meta_elsewhere, strategy)
    assert kind is RuntimeError
    assert text == (
        "`fabric.setup(...)`: `Block` has 6 parameters on the meta device, the first is `norm.weight`. Create it under"
        " `fabric.init_module()`, or materialise it with `module.to_empty(device=...)` and load its weights first."
    )


def sharded_model(context, strategy):
    fabric = context.fabric(strategy=strategy)
    torch.manual_seed(1)
    with fabric.sharded_model():
        model = Net()
    meta = next(model.parameters()).is_meta
    return meta, whole(fabric.setup(model))


@pytest.mark.parametrize(("strategy", "is_meta"), [("fsdp", True), ("ddp", False)])
def test_sharded_model_gives_the_same_values_under_every_strategy(strategy, is_meta):
    for meta, start in run_ranks(2, sharded_model, strategy):
        assert meta is is_meta
        assert_equal(start, net())
