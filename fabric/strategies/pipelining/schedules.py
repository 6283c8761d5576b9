# SPDX-License-Identifier: Apache-2.0
"""The schedules by name, and what each of them asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fabric.utilities.spelling import suggest


@dataclass(frozen=True)
class Kind:
    """One of PyTorch's schedules.

    Args:
        name: How users call it.
        class_name: Its class in `torch.distributed.pipelining`.
        stages_per_rank: How many stages each rank runs; None for any number.
        default_stages_per_rank: The same where only the schedule says so.
        v_shaped: Whether the stages go down the ranks and back up, and not round after round.
    """

    name: str
    class_name: str
    stages_per_rank: int | None = None
    default_stages_per_rank: int = 2
    v_shaped: bool = False

    @property
    def takes_one_stage(self) -> bool:
        """Whether its constructor takes one stage, and not a list."""
        return self.stages_per_rank == 1

    def ranks_of_stages(self, num_stages: int, size: int) -> tuple[int, ...]:
        """For each stage its rank in the pipeline.

        Example:
            >>> KINDS["interleaved_1f1b"].ranks_of_stages(4, 2), KINDS["zbv_zero_bubble"].ranks_of_stages(4, 2)
            ((0, 1, 0, 1), (0, 1, 1, 0))
        """
        if self.v_shaped:
            return tuple(stage if stage < size else 2 * size - 1 - stage for stage in range(num_stages))
        return tuple(stage % size for stage in range(num_stages))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("gpipe", "ScheduleGPipe", 1, 1),
        Kind("1f1b", "Schedule1F1B", 1, 1),
        Kind("interleaved_1f1b", "ScheduleInterleaved1F1B"),
        Kind("looped_bfs", "ScheduleLoopedBFS"),
        Kind("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble"),
        Kind("zbv_zero_bubble", "ScheduleZBVZeroBubble", 2, 2, v_shaped=True),
    )
}


def find_kind(schedule: Any) -> Kind:
    """The schedule of this name.

    Raises:
        ValueError: If there is none; the message lists the choices and the nearest spelling.
    """
    if schedule not in KINDS:
        raise ValueError(
            f"`PipelineParallelStrategy(schedule={schedule!r})` is not a known schedule. {suggest(schedule, KINDS)}"
        )
    return KINDS[schedule]


def validate_num_stages(kind: Kind, num_stages: int, size: int) -> None:
    """Check that so many stages can be divided over the ranks of a pipeline.

    Raises:
        ValueError: If there are more ranks than stages, or the schedule runs another number of them per rank.
    """
    stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    if num_stages < size:
        raise ValueError(
            f"`PipelineParallelStrategy`: the model is cut into {stages}, but the pipeline has {ranks}, some of which"
            f" would have nothing to do. Name more modules in `split_at`, or set `pipeline_parallel_size={num_stages}`"
            " and let `data_parallel_size` take the other ranks."
        )
    wanted = kind.stages_per_rank
    if num_stages % size or (wanted is not None and num_stages != wanted * size):
        per_rank = "as many stages on each rank as on the others"
        if wanted is not None:
            per_rank = f"{wanted} stage{'s' if wanted > 1 else ''} per rank"
        others = [other.name for other in KINDS.values() if other.stages_per_rank in (None, num_stages / size)]
        hint = f" or choose another schedule ({', '.join(others)})," if num_stages % size == 0 else ""
        raise ValueError(
            f"`PipelineParallelStrategy(schedule={kind.name!r})` runs {per_rank}, but the model is cut into {stages}"
            f" and the pipeline has {ranks}. Cut it into another number of stages,{hint} or set"
            " `pipeline_parallel_size`."
        )


def validate_num_microbatches(kind: Kind, number: int, num_stages: int, size: int) -> None:
    """Check that the schedule can run so many micro-batches.

    Raises:
        ValueError: If it can't.
    """
    rounds = max(1, number // size)
    needed = None
    if kind.name == "1f1b" and number < num_stages:
        needed = f"at least as many micro-batches as there are stages, {num_stages}"
    elif kind.name in ("interleaved_1f1b", "interleaved_zero_bubble") and number % rounds:
        needed = f"a number of micro-batches that {rounds} rounds can share, such as {number - number % rounds}"
    if needed is not None:
        raise ValueError(
            f"`PipelineParallelStrategy(schedule={kind.name!r}, num_microbatches={number})`: this schedule needs"
            f" {needed}."
        )


def create_schedule(kind: Kind, stages: list[Any], num_microbatches: int) -> Any:
    """PyTorch's schedule object for the stages of this rank.

    The last stage's module returns the loss, already divided by the number of micro-batches: the schedules' own
    `scale_grads` would divide what earlier calls have accumulated once more.
    """
    from torch.distributed import pipelining

    own = stages[0] if kind.takes_one_stage else stages
    return getattr(pipelining, kind.class_name)(own, num_microbatches, loss_fn=_loss, scale_grads=False)


def _loss(output: Any, target: Any) -> Any:
    return output
