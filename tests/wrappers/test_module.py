# SPDX-License-Identifier: Apache-2.0
"""The module wrapper shows the user's module in everything but what forward goes through."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fabric import Fabric, is_wrapped
from fabric.plugins.precision import MixedPrecision, Precision
from tests.ranks import run_ranks


class Net(nn.Module):
    """A module with one of everything that a wrapper could get wrong."""

    shared = "class attribute"

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.plain = 3
        self._ratio = 0.5

    def forward(self, x, *, times=1):
        return self.head(self.inner(x)) * self.scale * times

    @property
    def ratio(self):
        return self._ratio

    @ratio.setter
    def ratio(self, value):
        if value > 1:
            raise ValueError("a ratio is at most 1")
        self._ratio = value

    @ratio.deleter
    def ratio(self):
        self._ratio = None

    @property
    def broken(self):
        return self.does_not_exist

    @property
    def doubled(self):
        return 2 * self.plain

    def training_step(self, x):
        return self(x).sum()

    def embed(self, x):
        return self.inner(x)

    def embed_functionally(self, x):
        return nn.functional.linear(x, self.inner.weight)

    def count(self):
        return sum(p.numel() for p in self.parameters())

    @classmethod
    def build(cls):
        return cls()

    @staticmethod
    def double(x):
        return 2 * x


class Child(Net):
    """Overrides `nn.Module` methods, as users do."""

    def train(self, mode=True):
        super().train(mode)
        self.head.eval()
        return self

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "extra": 1}


class Generating(nn.Linear):
    def generate(self, x):
        yield "first"
        yield self(x)
        yield "last"


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def model(net, fabric):
    return fabric.setup(net)


class TestAttributes:
    def test_reading_reaches_the_users_module(self, net, model):
        assert model.module is net
        assert (model.plain, model.shared, model.ratio, model.doubled) == (3, "class attribute", 0.5, 6)
        assert model.inner is net.inner
        assert model.scale is net.scale
        assert model.steps is net.steps

    def test_writing_reaches_the_users_module(self, net, model):
        model.plain = 4
        model.fresh = "new"
        model.inner = nn.Linear(4, 4, bias=False)
        model.scale = nn.Parameter(torch.zeros(()))
        model.steps = torch.ones(1)
        assert (net.plain, net.fresh, net.inner.bias, net.scale.item(), net.steps.item()) == (4, "new", None, 0.0, 1.0)
        assert "fresh" not in vars(model)
        assert set(dict(net.named_children())) == {"inner", "head"}

    def test_property_setter_and_deleter_run(self, net, model):
        model.ratio = 0.25
        assert net._ratio == 0.25
        with pytest.raises(ValueError, match=r"^a ratio is at most 1$"):
            model.ratio = 2
        del model.ratio
        assert net._ratio is None

    def test_deleting_reaches_the_users_module(self, net, model):
        del model.plain
        del model.head
        assert not hasattr(net, "plain")
        assert not hasattr(model, "head")
        assert "head" not in dict(net.named_children())
        with pytest.raises(AttributeError, match="nothing"):
            del model.nothing

    def test_hasattr_and_dir(self, net, model):
        assert hasattr(model, "inner")
        assert hasattr(model, "training_step")
        assert not hasattr(model, "nothing")
        assert set(dir(net)) <= set(dir(model))
        assert "mark_forward_method" in dir(model)

    def test_a_missing_attribute_is_reported_as_the_users_class_reports_it(self, model):
        with pytest.raises(AttributeError, match=r"^'Net' object has no attribute 'nothing'"):
            model.nothing  # noqa: B018

    def test_an_error_inside_a_property_is_not_reported_as_no_attribute_broken(self, model):
        with pytest.raises(AttributeError, match=r"^'Net' object has no attribute 'does_not_exist'"):
            model.broken  # noqa: B018

    def test_class_and_static_methods(self, model):
        assert isinstance(model.build(), Net)

    def test_a_static_method_named_like_a_module_method_is_the_users(self, model):
        assert model.double(3) == 6

    def test_repr_is_the_users(self, net, model):
        assert repr(model) == repr(net)

    def test_attributes_named_like_the_wrappers_own_are_not_lost(self, fabric):
        class Named(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)
                self.module = "mine"
                self._strategy = "mine"

        named = Named()
        model = fabric.setup(named)
        assert model.module is named
        assert named._strategy == "mine"
        assert model(torch.zeros(1, 2)).shape == (1, 2)


class TestNames:
    def test_every_listing_is_the_users(self, net, model):
        for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
            assert dict(getattr(model, listing)()) == dict(getattr(net, listing)())
        for listing in ("parameters", "buffers", "modules", "children"):
            assert list(map(id, getattr(model, listing)())) == list(map(id, getattr(net, listing)()))

    def test_arguments_of_the_listings_are_passed_on(self, net, model):
        assert [n for n, _ in model.named_parameters("net", recurse=False)] == ["net.scale"]
        assert [n for n, _ in model.named_buffers(prefix="net")] == ["net.steps", "net.scratch"]
        assert next(name for name, _ in model.named_modules(prefix="net")) == "net"

    def test_look_up_by_name(self, net, model):
        assert model.get_submodule("inner") is net.inner
        assert model.get_parameter("inner.weight") is net.inner.weight
        assert model.get_buffer("steps") is net.steps

    def test_state_dict_is_the_users(self, net, model):
        assert list(model.state_dict()) == list(net.state_dict())
        assert "scratch" not in model.state_dict()
        assert list(model.state_dict(prefix="net.")) == list(net.state_dict(prefix="net."))
        assert model.state_dict(keep_vars=True)["scale"] is net.scale

    def test_load_state_dict(self, net, model):
        state = {name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert net.scale.item() == 2.0
        with pytest.raises(RuntimeError, match=r'Missing key.*"scale"'):
            model.load_state_dict({name: value for name, value in state.items() if name != "scale"})
        result = model.load_state_dict({"scale": torch.tensor(3.0)}, strict=False)
        assert "inner.weight" in result.missing_keys
        assert net.scale.item() == 3.0

    def test_a_compiled_submodule_leaves_no_segment(self, fabric):
        net = Net()
        plain = list(net.state_dict())
        net.inner = torch.compile(net.inner, backend="eager")
        assert "inner._orig_mod.weight" in net.state_dict()
        model = fabric.setup(net)
        assert sorted(model.state_dict()) == sorted(plain)
        assert sorted(name for name, _ in model.named_parameters()) == sorted(n for n in plain if n not in ("steps",))
        for state in (net.state_dict(), Net().state_dict()):  # with the segment and without it
            assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
            assert torch.equal(net.inner.weight, state.get("inner.weight", state.get("inner._orig_mod.weight")))

    def test_modules_registered_through_the_wrapper_are_the_users(self, net, model):
        model.register_buffer("more", torch.ones(1))
        model.register_parameter("weight", nn.Parameter(torch.ones(1)))
        model.add_module("tail", nn.Linear(2, 2))
        assert {"more", "weight", "tail.weight"} <= set(net.state_dict())
        assert list(model.state_dict()) == list(net.state_dict())

    def test_functions_of_pytorch_that_read_a_modules_tables_see_the_users(self, net, model):
        assert nn.utils.parameters_to_vector(model.parameters()).numel() == net.count()
        out = torch.func.functional_call(model, {"scale": torch.tensor(0.0)}, (torch.ones(1, 4),))
        assert out.abs().sum() == 0
        assert net.scale.item() == 1


class TestModuleMethods:
    def test_train_and_eval(self, net, model):
        assert model.eval() is model
        assert not net.training
        assert not net.inner.training
        assert not model.training
        assert model.train() is model
        assert net.inner.training
        model.training = False
        assert not net.training
        net.train()
        assert model.training

    def test_overridden_methods_of_the_user_run(self, fabric):
        child = Child()
        model = fabric.setup(child)
        model.train()
        assert child.training
        assert not child.head.training
        assert model.state_dict()["extra"] == 1

    def test_requires_grad_and_zero_grad(self, net, model):
        model(torch.ones(1, 4)).sum().backward()
        assert net.scale.grad is not None
        model.zero_grad()
        assert net.scale.grad is None
        assert model.requires_grad_(False) is model
        assert not net.scale.requires_grad

    def test_apply_and_to_act_on_the_users_module(self, net, model):
        seen = []
        assert model.apply(seen.append) is model
        assert seen[-1] is net
        assert model.to(torch.float64) is model
        assert net.scale.dtype == torch.float64

    def test_hooks_are_the_users(self, net, model):
        calls = []
        handle = model.register_forward_hook(lambda module, args, output: calls.append(module))
        model(torch.ones(1, 4))
        assert calls == [net]
        handle.remove()
        model(torch.ones(1, 4))
        assert calls == [net]
        assert not net._forward_hooks

    def test_forward_pre_hooks_and_backward_hooks(self, net, model):
        calls = []
        model.register_forward_pre_hook(lambda module, args: calls.append("before"))
        model.register_full_backward_hook(lambda module, grads, outputs: calls.append("backward"))
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
        assert calls == ["before", "backward"]

    def test_state_dict_hooks_run_once(self, net, model):
        calls = []
        model.register_state_dict_post_hook(lambda module, state, prefix, metadata: calls.append(module))
        model.state_dict()
        assert calls == [net]

    def test_extra_state_travels(self, fabric):
        class Counter(nn.Linear):
            count = 0

            def get_extra_state(self):
                return {"count": self.count}

            def set_extra_state(self, state):
                self.count = state["count"]

        counter = Counter(1, 1)
        model = fabric.setup(counter)
        model.count = 5
        state = model.state_dict()
        assert state["_extra_state"] == {"count": 5}
        model.count = 0
        model.load_state_dict(state)
        assert counter.count == 5


class TestUntouched:
    def test_setup_leaves_no_trace_on_the_users_module(self, fabric):
        net = Net()
        before, kind, forward = set(vars(net)), type(net), net.forward
        fabric.setup(net)
        assert set(vars(net)) == before
        assert type(net) is kind
        assert net.forward == forward
        assert not net._forward_hooks
        assert not net._forward_pre_hooks

    def test_the_users_module_is_not_in_the_wrappers_tables(self, net, model):
        assert net not in model._modules.values()

    def test_isinstance_of_module_holds(self, model):
        assert isinstance(model, nn.Module)
        assert is_wrapped(model)
        assert not is_wrapped(model.module)

    def test_the_wrapper_can_be_part_of_another_module(self, net, model):
        outer = nn.Sequential(model, nn.Linear(2, 1))
        assert next(iter(outer.state_dict())).startswith("0.")
        assert {n.removeprefix("0.") for n in outer.state_dict() if n.startswith("0.")} == set(net.state_dict())
        assert len(list(outer.parameters())) == len(list(net.parameters())) + 2
        fresh = nn.Sequential(Net(), nn.Linear(2, 1))
        assert str(outer.load_state_dict(fresh.state_dict())) == "<All keys matched successfully>"
        assert torch.equal(net.inner.weight, fresh[0].inner.weight)
        assert outer(torch.ones(1, 4)).shape == (1, 1)


class TestCopies:
    def test_deepcopy_is_a_plain_copy_of_the_users_module(self, net, model):
        copied = copy.deepcopy(model)
        assert type(copied) is Net
        assert copied is not net
        assert torch.equal(copied.inner.weight, net.inner.weight)
        assert copied.inner.weight is not net.inner.weight

    def test_pickle_is_a_plain_copy_of_the_users_module(self, net, model):
        copied = pickle.loads(pickle.dumps(model))
        assert type(copied) is Net
        assert torch.equal(copied.inner.weight, net.inner.weight)

    def test_torch_save_of_the_whole_module(self, net, model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is Net

    def test_copies_share_what_a_copied_tree_shares(self, net, model):
        """An averaged model, the classic use: `AveragedModel(model)` deep-copies."""
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        assert type(averaged.module) is Net
        assert torch.equal(averaged.module.scale, net.scale)


class TestCompile:
    def test_compiled_before_setup_is_unwrapped_and_compiled_again(self, fabric):
        net = Net()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model = fabric.setup(torch.compile(net, backend=backend))
        assert model.module is net
        assert list(model.state_dict()) == list(net.state_dict())
        x = torch.ones(1, 4)
        assert torch.equal(model(x), net(x))
        assert graphs

    def test_reapply_compile_can_be_refused(self, fabric):
        net = Net()
        compiled = torch.compile(net, backend="eager")
        model = fabric.setup(compiled, _reapply_compile=False)
        assert model.module is compiled
        assert list(model.state_dict()) == list(net.state_dict())
        assert model(torch.ones(1, 4)).shape == (1, 2)

    def test_the_wrappers_own_compile_keeps_names_clean(self, net, model):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model.compile(backend=backend)
        x = torch.ones(1, 4)
        assert torch.equal(model(x), net(x))
        assert graphs
        assert list(model.state_dict()) == list(net.state_dict())

    def test_torch_compile_of_the_wrapper_keeps_pytorchs_prefix(self, net, model):
        compiled = torch.compile(model, backend="eager")
        assert "_orig_mod.inner.weight" in compiled.state_dict()
        x = torch.ones(1, 4)
        assert torch.equal(compiled(x), net(x))

    def test_torch_compile_itself_is_not_patched(self, fabric):
        assert torch.compile.__module__ == "torch"


class TestForward:
    def test_arguments_and_output_pass_through(self, net, model):
        x = torch.randn(2, 4)
        assert torch.equal(model(x, times=3), net(x, times=3))
        assert torch.equal(model.forward(x), net(x))

    def test_inputs_and_outputs_are_converted_and_nothing_else(self):
        net = Net()
        model = Fabric(accelerator="cpu", devices=1, precision="bf16-true").setup(net)
        seen = {}

        def note(module, args, kwargs):
            seen["dtype"] = args[0].dtype
            seen["autocast"] = torch.is_autocast_enabled("cpu")

        net.register_forward_pre_hook(note, with_kwargs=True)
        assert model(torch.ones(1, 4)).dtype == torch.float32
        assert seen == {"dtype": torch.bfloat16, "autocast": False}

    def test_autocast_surrounds_forward_and_ends_after_an_error(self):
        class Failing(nn.Linear):
            def forward(self, x):
                assert torch.is_autocast_enabled("cpu")
                raise RuntimeError("the user's own error")

        model = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup(Failing(2, 2))
        with pytest.raises(RuntimeError, match=r"^the user's own error$"):
            model(torch.ones(1, 2))
        assert not torch.is_autocast_enabled("cpu")


class Recording(Precision):
    """Counts how often the hooks around forward run."""

    def __init__(self):
        self.calls = []

    def convert_input(self, data):
        self.calls.append("input")
        return data

    def convert_output(self, data):
        self.calls.append("output")
        return data


class TestMarkedMethods:
    @pytest.fixture
    def recorded(self):
        precision = Recording()
        net = Net()
        return precision, net, Fabric(accelerator="cpu", devices=1, plugins=precision).setup(net)

    def test_the_named_steps_are_marked_from_the_start(self, recorded):
        precision, _, model = recorded
        model.training_step(torch.ones(1, 4))
        assert precision.calls == ["input", "output"]

    def test_marked_by_name_or_by_method(self, recorded):
        precision, net, model = recorded
        model.mark_forward_method("embed")
        x = torch.ones(1, 4)
        assert torch.equal(model.embed(x), net.embed(x))
        model.mark_forward_method(model.embed_functionally)
        model.embed_functionally(x)
        assert precision.calls == ["input", "output"] * 2

    def test_nothing_is_set_on_the_users_objects(self, recorded):
        _, net, model = recorded
        before = set(vars(net))
        model.mark_forward_method("embed")
        model.embed(torch.ones(1, 4))
        assert set(vars(net)) == before
        assert net.forward.__func__ is Net.forward

    def test_an_unknown_method_cannot_be_marked(self, model):
        with pytest.raises(AttributeError) as caught:
            model.mark_forward_method("embde")
        assert str(caught.value) == (
            "`mark_forward_method('embde')`: `Net` has no method `embde`. Pass the name of one of its methods."
        )

    def test_an_unmarked_method_that_reaches_a_submodule_raises(self, recorded):
        _, net, model = recorded
        with pytest.raises(RuntimeError) as caught:
            model.embed(torch.ones(1, 4))
        assert str(caught.value) == (
            "`Net.embed()` reached the forward of `Linear` past the strategy and the precision, so gradients would not"
            " be synchronised or dtypes not converted. Mark it once after setup: `model.mark_forward_method('embed')`."
        )
        assert all(not module._forward_pre_hooks for module in net.modules())
        assert model(torch.ones(1, 4)).shape == (1, 2)  # the next call is right again

    def test_an_unmarked_method_that_calls_the_module_raises(self):
        class Calls(Net):
            def predict(self, x):
                return self(x).argmax()

        model = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup(Calls())
        with pytest.raises(RuntimeError, match=r"^`Calls\.predict\(\)` reached the forward of `Calls` past"):
            model.predict(torch.ones(1, 4))

    def test_it_raises_without_gradients_too_where_the_precision_surrounds_forward(self, recorded):
        _, _, model = recorded
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"^`Net\.embed\(\)` reached"):
            model.embed(torch.ones(1, 4))

    def test_an_unmarked_method_that_reaches_no_submodule_runs(self, recorded):
        _, net, model = recorded
        assert model.count() == net.count()
        x = torch.ones(1, 4)
        assert torch.equal(model.embed_functionally(x), net.embed_functionally(x))

    def test_on_one_device_in_full_precision_every_method_just_runs(self, net, model):
        x = torch.ones(1, 4)
        assert torch.equal(model.embed(x), net.embed(x))

    def test_hooks_of_an_unmarked_call_are_gone_after_an_error_of_the_users(self):
        class Failing(Net):
            def fail(self):
                assert self.inner._forward_pre_hooks
                raise KeyError("mine")

        failing = Failing()
        wrapped = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup(failing)
        with pytest.raises(KeyError, match="mine"):
            wrapped.fail()
        assert all(not module._forward_pre_hooks for module in failing.modules())

    def test_marked_methods_run_under_autocast(self):
        class Tells(nn.Linear):
            def tell(self):
                return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        model = Fabric(accelerator="cpu", devices=1, precision="16-mixed").setup(Tells(1, 1))
        assert model.tell()[0] is False
        model.mark_forward_method("tell")
        assert model.tell() == (True, torch.float16)

    def test_a_marked_method_can_be_marked_again_and_keeps_its_name(self, recorded):
        _, _, model = recorded
        model.mark_forward_method(model.training_step)
        assert model.training_step.__name__ == "training_step"

    def test_a_generator_cannot_be_marked(self):
        model = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup(Generating(2, 2))
        with pytest.raises(TypeError) as caught:
            model.mark_forward_method("generate")
        assert str(caught.value) == (
            "`mark_forward_method('generate')`: `Generating.generate` is a generator, which runs only after the call"
            " has returned. Mark the method that computes one item, and call that in a loop."
        )

    def test_an_unmarked_generator_that_reaches_a_submodule_raises_when_it_does(self):
        net = Generating(2, 2)
        model = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup(net)
        items = model.generate(torch.ones(1, 2))
        assert next(items) == "first"
        assert model(torch.ones(1, 2)).shape == (1, 2)  # between two items nothing is refused
        with pytest.raises(RuntimeError, match=r"^`Generating\.generate\(\)` reached the forward of `Generating` past"):
            next(items)
        assert not net._forward_pre_hooks
        plain = Fabric(accelerator="cpu", devices=1).setup(Generating(2, 2))
        assert len(list(plain.generate(torch.ones(1, 2)))) == 3

    def test_a_method_set_on_the_instance_after_setup_is_found(self, recorded):
        precision, _, model = recorded
        model.extra = lambda x: x + 1
        assert model.extra(1) == 2
        assert precision.calls == []


# --------------------------------------------------------------------------------------------------------------------
# Under DDP
# --------------------------------------------------------------------------------------------------------------------
def ddp_names(context):
    net = Net()
    before, plain = set(vars(net)), list(net.state_dict())
    model = context.fabric().setup(net)
    assert list(model.state_dict()) == plain
    assert dict(model.named_parameters()) == dict(net.named_parameters())
    assert set(vars(net)) == before
    assert type(model.module) is Net
    assert model.inner is net.inner  # not our own `_Entry.inner`
    assert isinstance(model._forward_module, nn.parallel.DistributedDataParallel)
    assert type(copy.deepcopy(model)) is Net
    assert type(pickle.loads(pickle.dumps(model))) is Net


def ddp_marked_methods(context):
    """Each way through the wrapper leaves the mean of the ranks' gradients."""
    fabric = context.fabric()
    gradients = []
    for method in ("forward", "training_step", "embed"):
        torch.manual_seed(0)
        net = Net()
        if method == "embed":
            net.head.requires_grad_(False), net.scale.requires_grad_(False)
        model = fabric.setup(net)
        model.mark_forward_method("embed")
        call = model if method == "forward" else getattr(model, method)
        fabric.backward(call(torch.full((1, 4), float(fabric.global_rank + 1))).sum())
        gradients.append(net.inner.weight.grad)
    return gradients


def ddp_unmarked(context):
    model = context.fabric().setup(Net())
    with pytest.raises(RuntimeError, match=r"^`Net\.embed\(\)` reached the forward of `Linear` past the strategy"):
        model.embed(torch.ones(1, 4))
    with torch.no_grad():  # nothing to synchronise, nothing to convert
        assert model.embed(torch.ones(1, 4)).shape == (1, 4)
    assert model.count() == sum(p.numel() for p in model.parameters())


def ddp_compiled(context):
    fabric = context.fabric()
    torch.manual_seed(0)
    net = Net()
    model = fabric.setup(torch.compile(net, backend="eager"))
    assert model.module is net
    assert list(model.state_dict()) == list(net.state_dict())
    fabric.backward(model(torch.full((1, 4), float(fabric.global_rank + 1))).sum())
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.ones(1, 4)).sum())
    return net.inner.weight.grad


def ddp_compiled_after(context):
    fabric = context.fabric()
    torch.manual_seed(0)
    net = Net()
    model = fabric.setup(net)
    model.compile(backend="eager")
    fabric.backward(model(torch.full((1, 4), float(fabric.global_rank + 1))).sum())
    return net.inner.weight.grad


def expected_gradient(method, scale):
    torch.manual_seed(0)
    net = Net()
    getattr(net, method)(torch.full((1, 4), scale)).sum().backward()
    return net.inner.weight.grad


@pytest.mark.ranks
class TestUnderDDP:
    def test_names_and_copies_are_the_users(self):
        run_ranks(2, ddp_names)

    def test_gradients_are_synchronised_whichever_marked_method_runs(self):
        for rank in run_ranks(2, ddp_marked_methods):
            for method, gradient in zip(("forward", "training_step", "embed"), rank, strict=True):
                torch.testing.assert_close(gradient, expected_gradient(method, 1.5))

    def test_an_unmarked_method_raises_where_gradients_would_be_lost(self):
        run_ranks(2, ddp_unmarked)

    def test_a_module_compiled_before_setup_still_synchronises(self):
        first, second = run_ranks(2, ddp_compiled)
        torch.testing.assert_close(first, expected_gradient("forward", 1.5) + expected_gradient("forward", 1.0))
        assert torch.equal(first, second)

    def test_a_module_compiled_after_setup_still_synchronises(self):
        for gradient in run_ranks(2, ddp_compiled_after):
            torch.testing.assert_close(gradient, expected_gradient("forward", 1.5))


def test_a_custom_scaler_reaches_the_wrapper():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    model = fabric.setup(Net())
    fabric.backward(model(torch.ones(1, 4)).sum())
    assert scaler.get_scale() == 8.0
    assert torch.allclose(model.scale.grad, 8 * model(torch.ones(1, 4)).sum().detach(), rtol=1e-2)


class Versioned(nn.Linear):
    """Translates files of its first version."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version") != 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_loading_keeps_the_versions_of_modules():
    model = Fabric(accelerator="cpu", devices=1).setup(nn.Sequential(Versioned(2, 2), nn.BatchNorm1d(2)))
    state = model.state_dict()
    expected = {name: value.clone() for name, value in state.items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    del state["1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        model.load_state_dict(state)


def test_buffers_have_plain_names_too():
    net = nn.Sequential(torch.compile(nn.BatchNorm1d(2), backend="eager"))
    model = Fabric(accelerator="cpu", devices=1).setup(net)
    assert [name for name, _ in model.named_buffers()] == list(model.state_dict())[2:]


class Named(nn.Linear):
    def forward(self, x, method=1, call=1):
        return super().forward(x) * method * call

    def training_step(self, x, method=1, call=1):
        return self(x, method, call)


def _any_keyword(context):
    model = context.fabric(strategy="ddp", precision="bf16-mixed").setup(Named(1, 1))
    x = torch.ones(1, 1)
    for function in (model, model.training_step):
        torch.testing.assert_close(function(x, method=2, call=2), function(x) * 4)  # exact in bfloat16


@pytest.mark.ranks
def test_any_keyword_reaches_the_users_method():
    run_ranks(2, _any_keyword)


def test_torch_compile_of_a_model_that_was_set_up_is_known():
    fabric = Fabric(accelerator="cpu", devices=1)
    compiled = torch.compile(fabric.setup(nn.Linear(1, 1)), backend="eager")
    assert is_wrapped(compiled)
    with fabric.no_backward_sync(compiled):
        fabric.backward(compiled(torch.ones(1, 1)).sum(), model=compiled)
    with pytest.raises(ValueError, match=r"^This module was set up before"):
        fabric.setup(compiled)
