# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from fabric.utilities.types import LRScheduler, Optimizable, Stateful, Steppable


def test_optimizers_modules_and_schedulers_have_their_types() -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    assert isinstance(optimizer, Optimizable)
    assert isinstance(optimizer, Steppable)
    assert isinstance(scheduler, LRScheduler)
    assert all(isinstance(it, Stateful) for it in (module, optimizer, scheduler))


@pytest.mark.parametrize("other", [torch.nn.Linear(1, 1), object(), {}])
def test_other_objects_are_not_optimizable(other: object) -> None:
    assert not isinstance(other, Optimizable)
