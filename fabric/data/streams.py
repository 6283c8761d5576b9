# SPDX-License-Identifier: Apache-2.0
"""Reading a `DataLoader` over an iterable data set: each sample once, over ranks and workers."""

from collections.abc import Iterator, Mapping
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe
from typing_extensions import override

from fabric.data.indexed import epoch_holders, iterates_as_usual, takers_of_epochs
from fabric.data.part import Cut, Part, Resume, StatefulPart, Stating, epoch_cell
from fabric.data.place import Place
from fabric.data.share import Share
from fabric.data.source import Reading, Source, Stated, restarted_if_over
from fabric.data.splitting import is_hugging_face, splitting_of
from fabric.data.worker_seeds import SeededHere
from fabric.utilities.data import has_len
from fabric.utilities.seed import IsolatedRandom, derive_seed, workers_are_seeded


def is_stateful(obj: Any) -> bool:
    """Whether an object of the user's has a state that can be saved and loaded."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


class StreamSource(Source):
    """Batches of an iterable data set.

    Args:
        loader: The user's loader, which is not changed: each iteration reads a copy.
        reading: How to read it.
    """

    def __init__(self, loader: DataLoader[Any], reading: Reading) -> None:
        self._loader = loader
        self._reading = reading
        self._workers = loader.num_workers
        self._splitting = splitting_of(loader.dataset, loader.worker_init_fn)
        self._hugging_face = is_hugging_face(loader.dataset) and reading.shard and not self._splitting.over_ranks
        self._delegates = is_stateful(loader)
        self._seeds = workers_are_seeded() and reading.shard
        self._own_state = is_stateful(loader.dataset) and not (
            self._delegates or isinstance(loader.dataset, IterDataPipe)
        )
        self.seed: int = reading.seed
        self._cell = epoch_cell(shared=self._workers > 0)
        self._kept: DataLoader[Any] | None = None  # the copy whose workers outlive an iteration
        self._read: DataLoader[Any] = loader  # the copy that the latest iteration reads
        self.epoch_holders = takers_of_epochs([*epoch_holders(loader), loader.dataset])
        self.uneven = reading.shard and reading.ranks.num_replicas > 1
        # Which samples a batch was made of is not known where the loader has an `__iter__` of its own.
        self.has_state = self._delegates or (self._own_state and iterates_as_usual(loader))
        self.layout = {
            "ranks": reading.ranks.num_replicas,
            "num_workers": loader.num_workers,
            "batch_size": loader.batch_size,
        }

    @override
    def start(self, place: Place, *, ahead: bool) -> Iterator[Any]:
        replays = place.position > 0 and place.resume is None
        with IsolatedRandom(derive_seed(self.seed, place.epoch, place.position)):
            batches = self._batches(place)
            for _ in islice(batches, place.position if replays else 0):
                pass
        if self.has_state and ahead and not self._states_come_along:
            return map(self._with_state, batches)  # which holds on to no batch
        return batches

    def _batches(self, place: Place) -> Iterator[Any]:
        loader = self._read = self._copy(place)
        ended = self._delegates and place.resume is not None and place.resume.get("ended")
        batches = restarted_if_over(lambda: iter(loader)) if ended else iter(loader)
        if self._states_come_along:
            batches = _collect_states(batches, self._workers, place.resume)
        return SeededHere(batches, None) if self._seeds and self._workers == 0 else batches

    @property
    def _states_come_along(self) -> bool:
        return self._own_state and self.has_state and self._workers > 0

    @override
    def yields_states(self, ahead: bool) -> bool:
        return self._states_come_along or super().yields_states(ahead)

    def _with_state(self, batch: Any) -> Stated:
        return Stated(batch, self.state())

    @override
    def state(self) -> Any:
        if self._delegates:
            return {"loader": self._read.state_dict()}  # type: ignore[attr-defined]
        if self.has_state and self._workers == 0:
            workers = {0: self._read.dataset.fabric_state()}  # type: ignore[attr-defined]
            return {"workers": workers, "next": 0, "num_workers": 0}
        return None

    @override
    def state_at_end(self) -> Any:
        # A worker can't tell its state when it has ended. Ranks that stop together have not all ended.
        here = self._delegates or self._workers == 0
        return self.state() if here and self._reading.uneven == "pad" else None

    # the copy that is read

    def _copy(self, place: Place) -> DataLoader[Any]:
        self._cell.fill_(place.epoch)
        if self._kept is not None and place.resume is None:
            self._tell_epoch(self._kept.dataset, place.epoch)
            return self._kept
        loader = copy(self._loader)
        generator = torch.Generator()
        seed = derive_seed(self.seed, place.epoch, self._reading.ranks.rank)
        entries: dict[str, Any] = {"generator": generator.manual_seed(seed), "_iterator": None}
        entries["dataset"] = self._part(place.resume)
        self._tell_epoch(entries["dataset"], place.epoch)
        if self._states_come_along:
            entries["collate_fn"] = Stating(loader.collate_fn)
        vars(loader).update(entries)
        if self._delegates and place.resume is not None:
            loader.load_state_dict(place.resume["loader"])  # type: ignore[attr-defined]
        self._kept = loader if loader.persistent_workers and self._workers > 0 else None
        return loader

    def _tell_epoch(self, dataset: Any, epoch: int) -> None:
        """A stream of `datasets` shows its workers the epoch in memory that only one process may write to."""
        if self._hugging_face:
            dataset.set_epoch(epoch)

    def _part(self, resume: Any) -> Any:
        dataset = self._loader.dataset
        if isinstance(dataset, IterDataPipe) or not (self._reading.shard or self._own_state):
            return dataset
        cut = self._cut()
        if self._hugging_face:
            from datasets.distributed import split_dataset_by_node

            ranks = self._reading.ranks
            dataset = split_dataset_by_node(dataset, rank=ranks.rank, world_size=ranks.num_replicas)
        splits = cut.num_replicas > 1 or cut.over_workers
        if not (splits or self._reading.replay or cut.seeds_samples or cut.tells_epoch or self._own_state):
            return dataset
        kind = StatefulPart if self._delegates and is_stateful(dataset) else Part
        return kind(dataset, cut, self._cell, None if self._delegates else _resume_from(resume))

    def _cut(self) -> Cut:
        loader, ranks, splitting = self._loader, self._reading.ranks, self._splitting
        whole = not self._reading.shard or splitting.over_ranks or self._hugging_face
        return Cut(
            num_replicas=1 if whole else ranks.num_replicas,
            rank=0 if whole else ranks.rank,
            over_workers=self._workers > 1 and not whole and not splitting.over_workers,
            seed=self.seed,
            entropy=(ranks.rank,) if whole else (),
            starts_alike=self._reading.replay or not whole,
            seeds_samples=self._seeds,
            tells_epoch=loader.persistent_workers and not self._is_hugging_face_dataset and self._takes_epochs,
            batch=loader.batch_size or 1,
        )

    @property
    def _is_hugging_face_dataset(self) -> bool:
        return is_hugging_face(self._loader.dataset)

    @property
    def _takes_epochs(self) -> bool:
        return callable(getattr(self._loader.dataset, "set_epoch", None))

    # what is known about it

    @override
    def share(self, place: Place) -> Share:
        cut = self._cut()
        dealt = cut.num_replicas > 1 and self._workers <= 1 and self._loader.batch_size is not None
        return Share(0 if place.padded else None, interleaved=dealt)

    @override
    def length(self) -> int | None:
        """Batches of this rank in an epoch, where this source splits a data set that has a length."""
        cut, dataset = self._cut(), self._loader.dataset
        if (cut.num_replicas == 1 and not cut.over_workers) or not has_len(dataset):
            return None
        split = self._workers if cut.over_workers else 1
        last = self._reading.uneven == "stop"  # of the ranks, the one that counts
        rank = cut.num_replicas - 1 if last else 0
        total, every = len(dataset), cut.num_replicas * split  # type: ignore[arg-type]
        samples = (max(0, -((rank * split + worker - total) // every)) for worker in range(split))
        return sum(each // cut.batch if self._loader.drop_last else -(-each // cut.batch) for each in samples)

    @override
    def adopt_seed(self, seed: int | None) -> None:
        self.seed = self.seed if seed is None else seed

    @override
    def validate_state(self, state: Any) -> Any:
        if state is None or self._delegates or state["num_workers"] == self._workers:
            return state
        if state.get("ended"):
            return None
        raise RuntimeError(
            f"The loader was saved in the middle of an epoch with `num_workers={state['num_workers']}`, and now it has"
            f" `num_workers={self._workers}`: a stream goes on only with as many as before."
        )

    @override
    def one_more(self, place: Place) -> Any:
        kept, read = self._kept, self._read
        self._kept = None
        try:
            with IsolatedRandom(derive_seed(self.seed, place.epoch)):
                first = next(self._batches(Place(place.epoch)))
        finally:
            self._kept, self._read = kept, read
        batch = first.batch if self._states_come_along else first
        return Stated(batch, place.resume) if self.has_state else batch

    @override
    def validate_resumable(self, place: Place) -> None:
        if place.position == 0:
            return
        dataset = type(self._loader.dataset).__name__
        before = f"The loader was saved after {place.position} batches of epoch {place.epoch}, and its data set"
        if self._loses_samples():
            place.resume = None
            before += (
                " shuffles in a buffer (`dataset.shuffle(buffer_size=...)`), whose samples `datasets` does not keep."
                " Shuffle in another way"
            )
        elif place.resume is None:
            before += (
                f" is an `IterableDataset` (`{dataset}`) without a place to go to."
                " Give it `state_dict` and `load_state_dict`"
            )
        if place.resume is None and not self._reading.replay:
            raise RuntimeError(
                f"{before}, save at the end of an epoch, or load the first batches once more with"
                " `fabric.setup_dataloaders(..., replay=True)`."
            )

    def _loses_samples(self) -> bool:
        return self._is_hugging_face_dataset and _shuffles_in_a_buffer(
            getattr(self._loader.dataset, "_ex_iterable", None)
        )


def _resume_from(state: Any) -> Resume | None:
    if state is None:
        return None
    return Resume(state["workers"], state["next"], bool(state.get("ended")))


def _collect_states(batches: Iterator[Any], workers: int, resume: Any) -> Iterator[Stated]:
    """What `Stating` made in the workers, as the batch and the states of all workers after it."""
    states: Mapping[int, Any] = {} if resume is None or resume.get("ended") else resume["workers"]
    for batch, state in batches:
        if state is None:  # a batch that was skipped
            continue
        worker, own = state
        states = {**states, worker: own}
        yield Stated(batch, {"workers": states, "next": (worker + 1) % workers, "num_workers": workers})
        del batch


def _shuffles_in_a_buffer(examples: Any) -> bool:
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return any(_shuffles_in_a_buffer(each) for each in inner)
