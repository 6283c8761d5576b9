# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that lie in a folder, as rank 0 sees them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from fabric.checkpoint.keeping.folder import Folder
from fabric.checkpoint.keeping.rules import (
    Best,
    Kept,
    name_of,
    note_of,
    note_with,
    noted_step,
    read_note,
    step_of,
    superseded,
)

# How often to choose again where another process removes what was just chosen.
_TRIES = 5


class Catalogue:
    """Finds checkpoints, and removes those that need not stay.

    Each has a note beside it, written before it. So a note without a checkpoint is what a killed process left, and a
    checkpoint without a note is somebody else's.

    Args:
        folder: Where they lie.
        last: How many of the last ones stay; None for all.
        best: Which others stay.
    """

    def __init__(self, folder: Folder, *, last: int | None, best: Best | None) -> None:
        self._folder = folder
        self._last = last
        self._best = best

    def all(self) -> list[Kept]:
        """The complete ones in the order of steps."""
        names = self._folder.names()
        return [self._kept(step, names) for step in self._steps(names) if self._is_complete(step)]

    def latest(self) -> Kept | None:
        """The complete one with the highest step."""
        names = self._folder.names()
        step = next(filter(self._is_complete, reversed(self._steps(names))), None)
        return None if step is None else self._kept(step, names)

    def best(self) -> Kept | None:
        """The best one."""
        assert self._best is not None
        return next(iter(self._best.ordered(self.all())), None)

    def at(self, step: int) -> Kept | None:
        """That of a step; None where there are none at all."""
        found = self.all()
        kept = next((kept for kept in found if kept.step == step), None)
        if kept is None and found:
            raise ValueError(
                f"`CheckpointManager.restore(state, {step})`: `{self._folder.path}` has no checkpoint of that step."
                f" Choose one of {', '.join(str(kept.step) for kept in found)}."
            )
        return kept

    @contextmanager
    def reading(self, which: str | int) -> Iterator[Kept | None]:
        """A checkpoint, which no catalogue removes inside."""
        for _ in range(_TRIES):
            kept = {"latest": self.latest, "best": self.best}[which]() if isinstance(which, str) else self.at(which)
            if kept is None:
                yield None
                return
            with self._folder.reading(name_of(kept.step)) as still_there:
                if still_there:
                    yield kept
                    return
        raise FileNotFoundError(f"Another process removes the checkpoints of `{self._folder.path}`.")

    def announce(self, step: int, metrics: Mapping[str, float]) -> str:
        """Write the note of a checkpoint that is about to be written; returns the path for that."""
        name, names = name_of(step), self._folder.names()
        if name in names and note_of(name) not in names:
            raise FileExistsError(
                f"`{self._folder.path_of(name)}` was not written by a `CheckpointManager`: `{note_of(name)}` is not"
                " beside it. Move it away, or give this run a folder of its own."
            )
        if name in names and not self._is_complete(step):  # left by a save that was killed, maybe of another layout
            self._folder.remove(name)
        self._folder.write(note_of(name), note_with(step, metrics))
        return self._folder.path_of(name)

    def withdraw(self, step: int) -> None:
        """The checkpoint that was announced could not be written."""
        if not self._is_complete(step):
            self._folder.remove(note_of(name_of(step)))

    def prune(self, newest: int) -> None:
        """Remove what need not stay, after the checkpoint of step `newest` is complete."""
        names = self._folder.names()
        noted = sorted(step for step in map(noted_step, names) if step is not None)
        complete = [self._kept(step, names) for step in noted if self._is_complete(step)]
        unfinished = {step for step in noted if step < newest} - {kept.step for kept in complete}
        for kept in superseded(complete, last=self._last, best=self._best, newest=newest):
            self._remove(kept.step)
        for step in unfinished:
            if all(self._folder.remove(name) for name in _parts_of(step, names)):
                self._remove(step)

    def _remove(self, step: int) -> None:
        if self._folder.remove(name_of(step)):
            self._folder.remove(note_of(name_of(step)))

    def _steps(self, names: Sequence[str]) -> list[int]:
        return sorted(step for step in map(step_of, names) if step is not None)

    def _is_complete(self, step: int) -> bool:
        return self._folder.is_committed(name_of(step))

    def _kept(self, step: int, names: Sequence[str]) -> Kept:
        metrics, name = None, name_of(step)
        if note_of(name) in names:
            with suppress(FileNotFoundError):  # another process removes it
                metrics = read_note(self._folder.read(note_of(name)), step)
        return Kept(step, self._folder.path_of(name), metrics or {})


def _parts_of(step: int, names: Sequence[str]) -> list[str]:
    """The temporary files of a file that was never finished; whoever still writes one has it locked."""
    return [name for name in names if name.lstrip(".").startswith(f"{name_of(step)}.") and name.endswith(".tmp")]
