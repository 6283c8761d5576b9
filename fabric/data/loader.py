# SPDX-License-Identifier: Apache-2.0
"""What `setup_dataloaders` returns."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from fabric.data.epochs import Epochs
from fabric.data.sharding import Sharding


class _FabricDataLoader:
    """A loader that was set up: it shows the user's loader in everything, moves its batches and keeps its place.

    Attributes, methods and `isinstance` are those of the loader's own class, and so is the `__iter__` that makes the
    batches. Each iteration is the next epoch, also after `break`. `state_dict()` says how many batches of which epoch
    were yielded, after a `break` too, until the next iteration starts; `load_state_dict` lets the next one start there.

    Args:
        loader: A loader, from `shard_dataloader` or as the user made it.
        move: Called with each batch; None hands the batches through.
    """

    __slots__ = ("__weakref__", "_epochs", "_inner", "_move")

    def __init__(self, loader: DataLoader[Any], *, move: Callable[[Any], Any] | None) -> None:
        self._inner = loader
        self._move = move
        self._epochs = Epochs(loader)

    @property
    def loader(self) -> DataLoader[Any]:
        """The user's own loader, as it was before it was set up."""
        sharding = Sharding.of(self._inner)
        return self._inner if sharding is None else sharding.original

    # `isinstance` asks for this after the real class; `type(...)` and the class statement are not affected.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self._epochs.start(self._move)

    def __len__(self) -> int:
        return len(self._inner)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it each one is the next."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position (batches that were yielded on this rank) and seed; the same on all ranks."""
        return self._epochs.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration start at the next unseen batch.

        Raises:
            RuntimeError: If the loader's data has no order that could be drawn again.
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
        return sorted({*dir(self._inner), "loader", "set_epoch", "state_dict", "load_state_dict"})

    def __repr__(self) -> str:
        return f"_FabricDataLoader({self._inner!r})"

    def __reduce__(self) -> Any:
        """Copying and pickling give a plain loader, the user's."""
        return _plain, (self.loader,)


def _plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader
