# SPDX-License-Identifier: Apache-2.0
"""Programs under Hydra: a rank runs one job of a sweep, in the folder that rank 0's job has."""

import os
import sys
from collections.abc import Sequence
from typing import Any

_MULTIRUN = ("-m", "--multirun")


def hydra_arguments(arguments: Sequence[str], directory: str) -> tuple[tuple[str, ...], str]:
    """The arguments and the directory with which a rank runs the Hydra job that this process is in.

    Without Hydra they are returned as they are. With it, every rank gets rank 0's output folder, and of a sweep
    (`--multirun`) the overrides of this one job.
    """
    config = _running_config()
    if config is None:
        return tuple(arguments), directory
    kept = list(arguments)
    if str(config.mode).endswith("MULTIRUN"):
        kept = [*_options(arguments), *config.overrides.task]
    folder = os.path.abspath(str(config.runtime.output_dir)).replace("\\", "\\\\").replace("'", "\\'")
    return (*kept, f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"), str(config.runtime.cwd)


def _running_config() -> Any:
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return module.HydraConfig.get()


def _options(arguments: Sequence[str]) -> list[str]:
    """The words that are options of Hydra's command line, without the sweep and its overrides."""
    takes_value = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p")
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in takes_value:
            options += [word, next(words, "")]
        elif word.startswith("-") and word not in _MULTIRUN:
            options.append(word)
    return options
