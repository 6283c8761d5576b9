# SPDX-License-Identifier: Apache-2.0
"""Checks of what `PipelineParallelStrategy` is given."""

from collections.abc import Sequence
from typing import Any


def validate_division(split_at: Any, stages: Any, stages_per_rank: Any) -> None:
    """Check how the user wants a model to be cut.

    Raises:
        ValueError: If it is said in two ways, or not at all.
        TypeError: If these are no names.
    """
    if (split_at is None) == (stages is None):
        given = "neither" if split_at is None else "both"
        raise ValueError(
            f"`PipelineParallelStrategy` needs either `split_at=` or `stages=`, and got {given}. Name the modules that"
            " begin a stage: `PipelineParallelStrategy(split_at=['layers.4'])`."
        )
    if stages_per_rank is not None and not callable(stages):
        raise ValueError(
            f"`PipelineParallelStrategy(stages_per_rank={stages_per_rank!r})` is for `stages` that is a function;"
            " otherwise the number of stages says it. Leave it out."
        )
    if stages is None and not _are_names(split_at):
        raise TypeError(
            f"`PipelineParallelStrategy(split_at={split_at!r})` takes names of submodules, such as"
            " `split_at=['layers.4', 'layers.8']`."
        )
    if stages is not None and not callable(stages) and not (_is_list(stages) and all(map(_are_names, stages))):
        raise TypeError(
            f"`PipelineParallelStrategy(stages={stages!r})` takes the names of the submodules of each stage, such as"
            " `stages=[['token', 'layers.0'], ['layers.1', 'head']]`, or a function"
            " `(module, stage_index, num_stages)`."
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _are_names(value: Any) -> bool:
    return _is_list(value) and all(isinstance(each, str) for each in value)


def validate_numbers(num_microbatches: Any, stages_per_rank: Any, pipeline: Any, data: Any) -> None:
    """Check what must be a positive number; sizes of ranks are checked once the number of ranks is known.

    Raises:
        ValueError: If it is none, or both sizes are "auto".
    """
    for name, value in (("num_microbatches", num_microbatches), ("stages_per_rank", stages_per_rank)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"`PipelineParallelStrategy({name}={value!r})` takes a number, 1 or more.")
    if pipeline == data == "auto":
        raise ValueError(
            "`PipelineParallelStrategy(pipeline_parallel_size='auto', data_parallel_size='auto')` leaves both sizes"
            " open. Give one of them as a number."
        )
