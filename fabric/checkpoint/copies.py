# SPDX-License-Identifier: Apache-2.0
"""Copies of a state on the CPU, made while the loop is held, in memory that is used again and again."""

import copy
import ctypes
import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fabric.checkpoint.state.later import Later, replaced
from fabric.checkpoint.state.shards import is_sharded

T = TypeVar("T")

_CHUNK = 4 << 20  # bytes that a thread copies before it looks for more: under a millisecond


class Buffers:
    """Tensors on the CPU to copy into; pinned ones for what comes from a GPU."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Tensor]] = {}
        self._used: dict[Hashable, int] = defaultdict(int)

    def begin(self) -> None:
        """All of them may be written to again."""
        self._used.clear()

    def take(self, tensor: Tensor) -> Tensor:
        """One of the shape, strides and dtype of a plain tensor; another one each time until `begin`."""
        pinned = tensor.is_cuda
        key = (tensor.shape, tensor.stride(), tensor.dtype, pinned)
        same = self._kept.setdefault(key, [])
        number = self._used[key]
        self._used[key] += 1
        if number == len(same):
            with torch.inference_mode(False):  # they are written to in any mode later
                same.append(torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned))
        return same[number]

    def end(self) -> None:
        """Forget those that were not taken since `begin`."""
        self._kept = {key: same[: self._used[key]] for key, same in self._kept.items() if self._used[key]}


class LaterShard(Later):
    """Stands for this rank's part of a sharded tensor.

    Args:
        tensor: The sharded tensor.
        local: A copy of this rank's part.
    """

    def __init__(self, tensor: Any, local: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype, lambda: local, is_fresh=False)
        package = sys.modules["torch.distributed.tensor"]
        empty = torch.empty_like(tensor.to_local(), device="meta", requires_grad=False)
        mesh, placements = tensor.device_mesh, tensor.placements
        # On a GPU's mesh a tensor of the CPU would be moved to the GPU; one on `meta` stays where it is.
        self._like = package.DTensor.from_local(
            empty, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def stand_in(self) -> Tensor:
        """A sharded tensor without memory."""
        return self._like  # type: ignore[no-any-return]


def is_apart(value: Any) -> bool:
    """Whether a value is a sharded tensor, or a copy of this rank's part of one."""
    return isinstance(value, LaterShard) or is_sharded(value)


class Copies:
    """Makes one copy of a state. Tensors that are one in the state, under several names, are one in the copy.

    Args:
        buffers: The memory; what was copied before is overwritten.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._buffers.begin()
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no other object gets the id of one of these
        self._of_memory: dict[Hashable, Tensor] = {}
        self._devices: set[torch.device] = set()
        self._moves: list[tuple[int, int, int]] = []  # on the CPU: target, source, bytes

    def of(self, content: T) -> T:
        """A copy of a whole content; plain values are copied too. It is complete when this returns."""
        done = {id(tensor): self.of_tensor(tensor) for tensor in _tensors_in(content)}
        copied = copy.deepcopy(content, dict(done))
        self._wait()
        self._buffers.end()
        return copied

    def of_shards(self, content: T) -> T:
        """The same content with copies of this rank's parts of what is sharded; all else is not copied."""
        shards = replaced(content, lambda tensor: self.of_tensor(tensor) if is_sharded(tensor) else tensor)
        self._wait()
        self._buffers.end()
        return shards  # type: ignore[no-any-return]

    @torch.no_grad()
    def of_tensor(self, tensor: Tensor) -> Any:
        """A copy of one tensor, which `of` takes for its own; of a sharded one what stands for this rank's part.

        From a GPU it may be under way until `of` returns.
        """
        if id(tensor) not in self._done:
            if is_sharded(tensor):
                made: Any = LaterShard(tensor, self._copy(tensor.to_local()))  # type: ignore[attr-defined]
            else:
                made = _alike(self._copy(tensor), tensor)
            self._alive += [tensor, made]
            self._done[id(tensor)] = self._done[id(made)] = made
        return self._done[id(tensor)]

    def of_gathered(self, tensor: Tensor) -> Tensor:
        """A copy, complete when this returns, of a tensor that nobody else holds; it may go then."""
        if _is_plain(tensor):
            made = self._buffers.take(tensor)
            self._copy_into(made, tensor.detach())
            self._wait()
        else:
            made = tensor.detach().to("cpu", copy=True)
        self._alive.append(made)
        self._done[id(made)] = made
        return made

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if not _is_plain(tensor):
            return tensor.detach().to("cpu", copy=True)
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or place not in self._of_memory:
            self._alive.append(tensor)
            made = self._buffers.take(tensor)
            self._copy_into(made, tensor)
            self._of_memory[place] = made
        return self._of_memory[place]

    def _copy_into(self, made: Tensor, tensor: Tensor) -> None:
        """Complete after `_wait`."""
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            self._moves.append((made.data_ptr(), tensor.data_ptr(), tensor.nbytes))
            return
        made.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)

    def _wait(self) -> None:
        _move(self._moves, torch.get_num_threads())
        self._moves = []
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def _move(moves: list[tuple[int, int, int]], threads: int) -> None:
    """Copy memory. Each thread takes the next piece when it has done one, so that none waits for one that is held up.

    PyTorch's threads would wait for each other at each tensor, which takes long on a busy CPU.
    """
    pieces = deque(
        (target + start, source + start, min(_CHUNK, size - start))
        for target, source, size in moves
        for start in range(0, size, _CHUNK)
    )

    def work() -> None:
        with suppress(IndexError):
            while True:
                ctypes.memmove(*pieces.popleft())

    helpers: list[Thread] = []
    with suppress(RuntimeError):  # where no thread can start, this one does it all
        for _ in range(min(threads, 4, len(pieces)) - 1):
            helper = Thread(target=work, name="fabric-copy")
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg()


def _alike(made: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, Parameter):
        return Parameter(made, requires_grad=tensor.requires_grad)
    made = made.detach()
    return made.requires_grad_() if tensor.requires_grad and tensor.is_leaf else made


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item)
