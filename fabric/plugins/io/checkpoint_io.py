# SPDX-License-Identifier: Apache-2.0
"""The base of whatever reads and writes checkpoint files."""

from abc import ABC, abstractmethod
from typing import Any

from fabric.utilities.types import PathLike


class CheckpointIO(ABC):
    """How the content of a checkpoint becomes a file and comes back. Pass yours to `Fabric(plugins=...)`.

    What it raises is raised on every rank.
    """

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Write a checkpoint; runs on rank 0 only. A kill in between should leave the old file or the new one, whole.

        Args:
            checkpoint: State dictionaries and plain values.
            path: Where to.
            storage_options: Options of the file system, where it takes any.
        """

    @abstractmethod
    def load_checkpoint(self, path: PathLike, map_location: Any = None, weights_only: bool = True) -> Any:
        """Read a checkpoint; runs on every rank.

        Args:
            path: Where from.
            map_location: The device for the tensors, as in `torch.load`.
            weights_only: Whether to refuse everything but tensors and plain values.
        """

    def map_checkpoint(self, path: PathLike, weights_only: bool = True) -> Any:
        """Read a checkpoint onto the CPU where each rank needs a part only; runs on every rank.

        By default all of it is read. What can leave the tensors in the file until they are copied should.
        """
        return self.load_checkpoint(path, map_location="cpu", weights_only=weights_only)

    @abstractmethod
    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint; runs on rank 0 only."""
