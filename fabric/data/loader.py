# SPDX-License-Identifier: Apache-2.0
"""What `setup_dataloaders` returns."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from fabric.data.epochs import Epochs, Move, Moving
from fabric.data.indexed import IndexedSource
from fabric.data.iterables import IterableSource
from fabric.data.place import Placed
from fabric.data.sharding import Sharding
from fabric.data.share import Share
from fabric.data.source import Reading, Source
from fabric.data.streams import StreamSource
from fabric.utilities.data import has_iterable_dataset


class _FabricDataLoader(Placed):
    """A loader that was set up: it shows the user's loader in everything, moves its batches and keeps its place.

    Attributes, methods and `isinstance` are those of the loader's own class, and so is the `__iter__` that makes the
    batches. Each iteration is the next epoch, also after `break`. `state_dict()` says how many batches of which epoch
    were yielded, after a `break` too, until the next iteration starts; `load_state_dict` lets the next one start there.

    Args:
        loader: A loader, from `shard_dataloader` or as the user made it, or anything that can be iterated over.
        move: Called with each batch; None hands the batches through.
        reading: How the ranks read it; by default one rank does.
        moving: In the place of `move`, where batches are moved before they are asked for.
    """

    __slots__ = ("__weakref__", "_epochs", "_inner", "_source")

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        move: Move | None = None,
        reading: Reading | None = None,
        moving: Moving | None = None,
    ) -> None:
        self._inner: Any = loader
        reading = reading or Reading()
        self._source = _source_of(loader, reading)
        self._epochs = Epochs(self._source, reading, moving or Moving(move))

    @property
    def loader(self) -> Any:
        """The user's own loader, as it was before it was set up."""
        sharding = Sharding.of(self._inner)
        return self._inner if sharding is None else sharding.original

    @property
    def share(self) -> Share | None:
        """What the batch that was yielded last on this rank is of the global one; None before the first."""
        return self._epochs.share

    @property
    @override
    def place(self) -> tuple[int, int]:
        """Epoch and position of `state_dict`, without talking to other ranks."""
        return self._epochs.place

    # `isinstance` asks for this after the real class; `type(...)` and the class statement are not affected.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _FabricDataLoader if isinstance(self._inner, _PLAIN) else type(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self._epochs.start()

    def __len__(self) -> int:
        length = self._source.length()
        return len(self._inner) if length is None else length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it each one is the next."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position (batches that were yielded on this rank) and seed; the same on all ranks.

        Of data that has a state of its own the states of all ranks come with it: call it on every rank then.
        """
        return self._epochs.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration start at the next unseen batch.

        Raises:
            RuntimeError: If the loader's data has no order that could be drawn again and no state of its own.
        """
        self._epochs.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in _FabricDataLoader.__slots__:  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FabricDataLoader.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._inner), "loader", "place", "set_epoch", "share", "state_dict", "load_state_dict"})

    def __repr__(self) -> str:
        return f"_FabricDataLoader({self._inner!r})"

    def __reduce__(self) -> Any:
        """Copying and pickling give a plain loader, the user's."""
        return _plain, (self.loader,)


_PLAIN = (list, tuple, range, Iterator)  # what has no methods of interest, and is not to be taken for the real thing


def _source_of(loader: Iterable[Any], reading: Reading) -> Source:
    if not isinstance(loader, DataLoader):
        return IterableSource(loader, replay=reading.replay)
    if has_iterable_dataset(loader):
        return StreamSource(loader, reading)
    return IndexedSource(loader, reading)


def _plain(loader: Any) -> Any:
    return loader
