# SPDX-License-Identifier: Apache-2.0
"""Ranks that exist already."""

import torch

from fabric.plugins.environments import ClusterEnvironment, LocalEnvironment
from fabric.strategies.launchers import ExternalLauncher


def test_one_process_just_runs() -> None:
    environment = LocalEnvironment(1)
    launcher = ExternalLauncher(environment=environment)

    def enter(given: ClusterEnvironment, x: int, *, y: int) -> tuple[ClusterEnvironment, int]:
        return given, x + y

    assert launcher.launch(enter, 1, y=2) == (environment, 3)
    launcher.teardown()


def test_sets_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        ExternalLauncher(environment=LocalEnvironment(1), threads=1).launch(lambda environment: None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
