# SPDX-License-Identifier: Apache-2.0
import gc
import weakref

import torch

from fabric.strategies.parameters import ParameterMap


def _replace(module, name):
    setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().clone()))


def test_an_optimizer_made_before_follows_the_parameters_with_its_state():
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[module.weight]["momentum_buffer"]
    parameters = ParameterMap()
    for _ in range(2):  # replaced twice between the optimizer and its setup
        with parameters.follow(module):
            _replace(module, "weight")
    parameters.repoint(optimizer)
    assert optimizer.param_groups[0]["params"][0] is module.weight
    assert optimizer.param_groups[0]["params"][1] is module.bias
    assert optimizer.state[module.weight]["momentum_buffer"] is momentum
    assert set(optimizer.state) == {module.weight, module.bias}


def test_an_optimizer_that_holds_the_list_of_its_group_follows_too():
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters())
    parameters = ParameterMap()
    with parameters.follow(module):
        _replace(module, "weight")
    parameters.repoint(optimizer)
    before = module.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not torch.equal(module.weight, before)


def test_a_parameter_of_another_module_stays():
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    parameters = ParameterMap()
    with parameters.follow(module):
        _replace(module, "weight")
    parameters.repoint(optimizer)
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, other.parameters())]


def test_the_old_parameters_are_not_kept_alive():
    module = torch.nn.Linear(2, 1)
    parameters = ParameterMap()
    old = weakref.ref(module.weight)
    with parameters.follow(module):
        _replace(module, "weight")
    gc.collect()
    assert old() is None
    parameters.repoint(torch.optim.SGD(module.parameters(), lr=0.1))
