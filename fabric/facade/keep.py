# SPDX-License-Identifier: Apache-2.0
"""Keeping the state of a run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch.nn import Module
from torch.optim import Optimizer

from fabric import checkpoint, validation
from fabric.callbacks import Callbacks
from fabric.checkpoint.background import SaveHandle
from fabric.facade.identity import Identity
from fabric.utilities.seed import collect_rng_states, set_rng_states
from fabric.wrappers import _copy_plain_values, _unwrap_objects


class Keep(Identity):
    """Checkpoints: call each of these on every rank."""

    _callbacks: Callbacks

    def save(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
        format: Literal["torch", "sharded", "safetensors"] | None = None,
        max_shard_size: int | str | None = None,
        *,
        blocking: bool = True,
        busy: Literal["wait", "raise"] = "wait",
        checksum: bool = False,
    ) -> SaveHandle:
        """Write a checkpoint; call it on every rank. A failure is raised on every rank.

        Args:
            path: A local path or any URL that fsspec knows.
            state: Names to modules, optimizers, loaders, this `fabric` (RNG of every rank, loss scaler, callbacks),
                other objects with `state_dict`, plain values, nested as you like.
            filter: For a name in `state`, a function of (key, value) that says what of it to keep.
            format: `torch` (one file), `sharded` (a folder to which each rank writes its part) or `safetensors`
                (weights as Hugging Face writes them, the rest beside them); by default what the strategy says, and
                `safetensors` for a path that ends so.
            max_shard_size: The most bytes of one file of weights with `safetensors`; `5GB` by default.
            blocking: False copies the state and lets a thread write it, while the loop goes on.
            busy: What to do while an earlier save is still being written: `wait` for it, or `raise`.
            checksum: Whether `load` shall check that no bit has flipped.

        Returns:
            A handle: its `done()` says whether the checkpoint is complete, and its `result()` waits for that. An error
            in between is raised there, or else by the next call that saves or loads, on every rank.
        """
        self._require_launch("save")
        validation._validate_state(state)
        layout: dict[str, Any] = {"format": format, "max_shard_size": max_shard_size}
        layout |= {"blocking": blocking, "busy": busy, "checksum": checksum}
        return self._strategy.save_checkpoint(path, _unwrap_objects(state), filter=filter, **layout)

    def load(
        self,
        path: str | Path,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool = True,
    ) -> dict[str, Any]:
        """Restore a checkpoint; call it on every rank.

        Args:
            path: What was given to `save`.
            state: The objects to restore, in place, under the names that they were saved with. Plain values are put
                into this dictionary. Without it everything is returned.
            strict: Whether each name and each key must be in the file.
            weights_only: False also unpickles arbitrary objects, which may run code: only for files that you trust.

        Returns:
            What the file holds beyond `state`.
        """
        self._require_launch("load")
        unwrapped = _unwrap_objects(state)
        if isinstance(unwrapped, dict):  # the random numbers last: restoring an object of the user's may draw some
            unwrapped = dict(sorted(unwrapped.items(), key=lambda entry: entry[1] is self))
        try:
            return self._strategy.load_checkpoint(path, unwrapped, strict, weights_only)
        finally:  # an error while restoring says what was restored
            _copy_plain_values(unwrapped, state)

    def load_raw(self, path: str | Path, obj: Module | Optimizer, strict: bool = True) -> None:
        """Load a file that holds nothing but the state of one module or optimizer, as plain PyTorch saves it."""
        self._require_launch("load_raw")
        checkpoint.load_raw(
            path, _unwrap_objects(obj), access=self._strategy, io=self._strategy.checkpoint_io, strict=strict
        )

    def state_dict(self) -> dict[str, Any]:
        """RNG of every rank, loss scaler and callbacks: what `{"fabric": fabric}` keeps. Call it on every rank."""
        self._require_launch("state_dict")
        gathered = self._strategy.gather_objects((collect_rng_states(), self._share_of_batches()))
        rng, shares = map(list, zip(*gathered, strict=True))
        return {
            "rng": rng,
            "shares": shares,
            "precision": self._precision.state_dict(),
            "callbacks": self._callbacks.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; with ranks in another number or layout the RNGs are seeded anew."""
        self._require_launch("load_state_dict")
        own = self._share_of_batches()
        shares = self._strategy.gather_objects(own)  # before anything can fail on this rank alone
        self._precision.load_state_dict(state_dict["precision"])
        self._callbacks.load_state_dict(state_dict["callbacks"])
        set_rng_states(
            state_dict["rng"],
            rank=self.global_rank,
            world_size=self.world_size,
            data_rank=own[0],
            same_layout=state_dict.get("shares", shares) == shares,
        )

    def _share_of_batches(self) -> list[int]:
        """What this rank has of the batches: its data rank, of how many parts of a sequence, and whether in stages."""
        strategy = self._strategy
        data_rank: int = strategy.distributed_sampler_kwargs["rank"]
        return [data_rank, strategy.context_parallel_size, int(strategy.state_is_distributed)]
