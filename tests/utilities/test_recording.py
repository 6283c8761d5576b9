# SPDX-License-Identifier: Apache-2.0
"""What constructors do on the meta device, done later for real: bit for bit what they would have done at once."""

import copy

import pytest
import torch
from torch import nn

from fabric.utilities.init import own_tensors, put_tensors
from fabric.utilities.recording import recording_context
from fabric.utilities.replay import _Replay, replay

CPU = torch.device("cpu")


class Place:
    """Where a test keeps one tensor; it counts what is asked of it."""

    def __init__(self, tensor):
        self.tensor = torch.full(tensor.shape, 77, dtype=tensor.dtype)
        self.dtype = tensor.dtype
        self.kept = self.taken = 0

    def keep(self, whole):
        self.kept += 1
        self.tensor.copy_(whole)

    def whole(self):
        self.taken += 1
        return self.tensor.clone()


def record(build):
    with recording_context() as recording:
        module = build()
    return module, recording


def made_real(module, recording):
    """Replay into the module; returns the places by the id of the tensor that was there before."""
    metas = [found for found in own_tensors(module) if found[2].is_meta]
    places = {id(tensor): Place(tensor) for *_, tensor in metas}
    homes = {id(tensor): (recording.find(owner, name, tensor), places[id(tensor)]) for owner, name, tensor in metas}
    replay([recording], homes.values(), CPU)
    put_tensors(metas, lambda tensor: places[id(tensor)].tensor)
    return places


def state(module):
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def assert_equal(module, expected):
    actual, expected = state(module), state(expected)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
        assert actual[name].dtype == tensor.dtype
        assert type(actual[name]) is type(tensor)
        assert actual[name].requires_grad == tensor.requires_grad


class Initialised(nn.Module):
    """A layer, and what a constructor then does to it."""

    def __init__(self, then, layer=nn.Linear):
        super().__init__()
        self.layer = layer(6, 4)
        with torch.no_grad():
            then(self.layer)


class Tied(nn.Module):
    def __init__(self, head_wins):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        if head_wins:
            self.embedding.weight = self.head.weight
        else:
            self.head.weight = self.embedding.weight


class Values(nn.Module):
    """Parameters and buffers that are made by computing."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.small = nn.Parameter(torch.randn(3, 2) * 0.02)
        self.frozen = nn.Parameter(torch.eye(3) + torch.arange(3.0), requires_grad=False)
        self.register_buffer("mean", torch.tensor([0.5, 0.25]))
        self.register_buffer("number", torch.as_tensor(7))
        frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        table = torch.outer(torch.arange(5.0), frequencies)
        self.register_buffer("rotary", torch.stack([table.cos(), table.sin()]), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())


class Applied(nn.Module):
    """Initialised again from the root, as GPT-2 and its like are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3))
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("1.weight"):
                nn.init.normal_(parameter, std=0.02 / 3)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def _weight(initialise, *args, **kwargs):
    return lambda layer: initialise(layer.weight, *args, **kwargs)


CONSTRUCTORS = {
    "linear": lambda: nn.Linear(6, 4),
    "embedding": lambda: nn.Embedding(10, 6, padding_idx=2),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "rms norm": lambda: nn.RMSNorm(6),
    "lstm": lambda: nn.LSTM(6, 4, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(6, 2),
    "copies of a layer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 8), 2, enable_nested_tensor=False
    ),
    "transformer": lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
    "xavier": lambda: Initialised(_weight(nn.init.xavier_normal_)),
    "kaiming": lambda: Initialised(_weight(nn.init.kaiming_normal_)),
    "truncated": lambda: Initialised(_weight(nn.init.trunc_normal_, std=0.02)),
    "truncated, few": lambda: Initialised(_weight(nn.init.trunc_normal_, mean=1.0, std=1.0, a=1.5, b=2.0)),
    "orthogonal": lambda: Initialised(_weight(nn.init.orthogonal_, gain=2.0)),
    "sparse": lambda: Initialised(_weight(nn.init.sparse_, sparsity=0.5)),
    "dirac": lambda: Initialised(_weight(nn.init.dirac_), lambda *size: nn.Conv1d(*size, 3)),
    "eye": lambda: Initialised(_weight(nn.init.eye_)),
    "written": lambda: Initialised(lambda layer: layer.weight[1:3].fill_(7.0)),
    "set": lambda: Initialised(lambda layer: layer.weight.__setitem__(2, torch.tensor([float(n) for n in range(6)]))),
    "data": lambda: Initialised(lambda layer: layer.weight.data.mul_(3).add_(layer.weight.data)),
    "copied from another": lambda: Initialised(lambda layer: layer.weight.copy_(nn.Linear(6, 4).weight)),
    "in half precision": lambda: nn.Linear(6, 4, dtype=torch.bfloat16),
    "deep copy": lambda: nn.ModuleList([layer := nn.Linear(6, 4), copy.deepcopy(layer)]),
    "head's weight in the embedding": lambda: Tied(True),
    "embedding's weight in the head": lambda: Tied(False),
    "values": Values,
    "applied": Applied,
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_values_and_random_numbers_are_the_constructor_s(name):
    build = CONSTRUCTORS[name]
    torch.manual_seed(3)
    expected = build()
    following = torch.rand(4)

    module, recording = record(build)
    assert all(tensor.is_meta for tensor in state(module).values())
    torch.manual_seed(3)
    made_real(module, recording)
    assert_equal(module, expected)
    assert torch.equal(torch.rand(4), following)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    blocks = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    configurations = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, **sizes),
        "llama": lambda: transformers.LlamaConfig(num_key_value_heads=1, **blocks, **sizes),
        "bert": lambda: transformers.BertConfig(**blocks, **sizes),
    }
    configuration = configurations[kind]()
    models = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertModel"}
    build = getattr(transformers, models[kind])
    torch.manual_seed(3)
    expected = build(configuration)
    module, recording = record(lambda: build(configuration))
    torch.manual_seed(3)
    made_real(module, recording)
    assert_equal(module, expected)


def test_tied_parameters_stay_one():
    module, recording = record(lambda: Tied(True))
    made_real(module, recording)
    assert module.embedding.weight is module.head.weight


def test_what_users_write_on_a_parameter_stays():
    def build():
        module = nn.Linear(2, 2)
        module.weight.no_decay = True
        return module

    module, recording = record(build)
    made_real(module, recording)
    assert module.weight.no_decay is True


def test_one_tensor_is_in_memory_at_a_time_though_the_root_initialises_all_of_them_again():
    module, recording = record(Applied)
    metas = list(own_tensors(module))
    places = [Place(tensor) for *_, tensor in metas]
    run = _Replay([recording], [(recording.find(*f), p) for f, p in zip(metas, places, strict=True)], CPU, None)
    torch.manual_seed(3)
    with torch.no_grad():
        for step, following in zip(recording.steps, [*recording.steps[1:], None], strict=True):
            run.do(step)
            run.release(following.uses if following else frozenset())
            assert len(run._real) <= 1
    assert not run._real
    torch.manual_seed(3)
    for place, (*_, expected) in zip(places, own_tensors(Applied()), strict=True):
        assert torch.equal(place.tensor, expected)
    assert max(place.kept for place in places) > 1
    assert not any(place.taken for place in places)  # what is overwritten is not taken back first


def test_values_that_are_read_again_are_taken_back():
    def build():
        a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            a.weight.mul_(2)
            b.weight.add_(a.weight)
        return nn.ModuleList([a, b])

    torch.manual_seed(3)
    expected = build()
    module, recording = record(build)
    torch.manual_seed(3)
    places = made_real(module, recording)
    assert_equal(module, expected)
    assert sum(place.taken for place in places.values()) > 0


def test_a_home_of_another_dtype_gets_the_end_of_it():
    """Precision may convert a model before it is sharded; on the way the values keep the constructor's dtype."""

    def build():
        layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        return layers.apply(lambda module: [parameter.data.mul_(1.1) for parameter in module.parameters()])

    torch.manual_seed(3)
    expected = build().to(torch.bfloat16)
    module, recording = record(build)
    module.to(torch.bfloat16)
    torch.manual_seed(3)
    made_real(module, recording)
    assert_equal(module, expected)


def test_values_that_are_not_given_are_told():
    with recording_context() as recording:
        module = nn.Linear(3, 3)
        module.own = nn.Parameter(torch.empty(3))
        module.register_buffer("table", torch.empty(3))
    assert recording.find(module, "weight", module.weight) is not None
    assert recording.find(module, "own", module.own) is None
    assert recording.find(module, "table", module.table) is None
    with torch.device("meta"):
        other = nn.Linear(3, 3)
    assert recording.find(other, "weight", other.weight) is None


def test_writing_after_the_end_is_told():
    module, recording = record(lambda: nn.Linear(3, 3))
    assert not recording.was_changed(module, "weight")
    nn.init.zeros_(module.weight)
    assert recording.was_changed(module, "weight")
    assert not recording.was_changed(module, "bias")


def test_other_devices_are_left_alone():
    with recording_context() as recording:
        table = torch.arange(3, device="cpu")
        given = torch.tensor([1.0], device="cpu")
        twice = table * 2
    assert not table.is_meta
    assert not given.is_meta
    assert torch.equal(twice, torch.tensor([0, 2, 4]))
    assert not recording.steps


def test_values_from_outside_are_those_of_that_moment():
    source = torch.ones(3)

    def build():
        layer = nn.LayerNorm(3)
        with torch.no_grad():
            layer.weight.copy_(source)
        return layer

    module, recording = record(build)
    source.zero_()
    made_real(module, recording)
    assert module.weight.tolist() == [1, 1, 1]


def test_the_same_program_is_told_in_the_same_words():
    told = [list(record(CONSTRUCTORS["applied"])[1].describe()) for _ in range(2)]
    assert told[0] == told[1]
    assert "uniform_" in told[0][0]
    assert told[0] != list(record(CONSTRUCTORS["linear"])[1].describe())
    generator = torch.Generator()
    told = [list(record(lambda: Initialised(_weight(nn.init.normal_, generator=generator)))[1].describe())] * 2
    assert "0x" not in "".join(told[0])


def test_no_hook_is_left():
    with pytest.raises(RuntimeError, match="stop"), recording_context():
        raise RuntimeError("stop")
    assert not nn.Linear(2, 2).weight.is_meta
    assert not nn.modules.module._global_parameter_registration_hooks
    assert not nn.modules.module._global_buffer_registration_hooks
