# SPDX-License-Identifier: Apache-2.0
"""How much of the recorded time of a profile went into talking to the other ranks."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[float, float]

_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")  # what torch.distributed's backends call their work


@dataclass(frozen=True)
class Communication:
    """What one rank recorded, in microseconds.

    Attributes:
        recorded: Length of the recording.
        steps: Steps that it holds; 0 if `step()` was not called.
        busy: Time in which at least one collective was under way.
        exposed: The part of `busy` in which nothing was computed: what communication costs.
        collectives: By name, how often each was called, and its time summed up.
    """

    recorded: float = 0.0
    steps: int = 0
    busy: float = 0.0
    exposed: float = 0.0
    collectives: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The exposed part of the recorded time, 0 to 1."""
        return self.exposed / self.recorded if self.recorded else 0.0


def communication_of(events: Sequence[Any]) -> Communication:
    """Measure it in the events of a profile.

    Where a GPU was recorded, its own time line counts: kernels of collectives against other kernels. Else the CPU's:
    the collectives of the backend against the operators, on whatever thread they ran.

    Args:
        events: `torch.profiler.profile(...).events()`.
    """
    on_device = [event for event in events if _is_device_event(event)]
    timeline = on_device or events
    talking = [_span(event) for event in timeline if _is_collective(event)]
    computing = [_span(event) for event in timeline if _is_computation(event)]
    spans = [_span(event) for event in events]
    busy = _merged(talking)
    return Communication(
        recorded=max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0),
        steps=sum(event.name.startswith("ProfilerStep") and not _is_device_event(event) for event in events),
        busy=_length(busy),
        exposed=_length(busy) - _length(_overlap(busy, _merged(computing))),
        collectives=_by_name(timeline),
    )


def _by_name(timeline: Iterable[Any]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in timeline:
        if event.name.startswith(_COLLECTIVES):
            count, total = found[event.name]
            start, end = _span(event)
            found[event.name] = (count + 1, total + end - start)
    return dict(found)


def _is_device_event(event: Any) -> bool:
    return str(event.device_type) != "DeviceType.CPU"


def _is_collective(event: Any) -> bool:
    return str(event.name).startswith((*_COLLECTIVES, "nccl"))  # `ncclDevKernel_AllReduce_...` is a kernel


def _is_computation(event: Any) -> bool:
    """An operator that calls no other one, or a kernel; not the collectives and what only brackets others."""
    if _is_collective(event) or event.is_user_annotation or event.name.startswith(("ProfilerStep", "c10d::")):
        return False
    return _is_device_event(event) or not event.cpu_children


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, as spans in order that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time that is in both; each in order and without overlaps."""
    common: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def communication_table(ranks: Sequence[Communication]) -> str:
    """What each rank lost, and the collectives of rank 0, as text."""
    lines = [f"{'rank':>4}  {'steps':>5}  {'recorded':>11}  {'collectives':>11}  {'nothing else':>12}  {'share':>6}"]
    for number, rank in enumerate(ranks):
        times = f"{_ms(rank.recorded):>11}  {_ms(rank.busy):>11}  {_ms(rank.exposed):>12}"
        lines.append(f"{number:>4}  {rank.steps:>5}  {times}  {100 * rank.share:>5.1f}%")
    slowest = sorted(ranks[0].collectives.items(), key=lambda item: -item[1][1])
    for name, (count, total) in slowest:
        lines.append(f"  {name}: {count} call{'' if count == 1 else 's'}, {_ms(total)} (rank 0)")
    return "\n".join(lines)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms"
