# SPDX-License-Identifier: Apache-2.0
"""The base of every strategy: the place where parallelism lives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric.accelerators import Accelerator
from fabric.checkpoint import load, save
from fabric.plugins.environments import ClusterEnvironment
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.plugins.precision import Precision, create_precision
from fabric.strategies.parameters import ParameterMap
from fabric.strategies.reduction import ReduceOp
from fabric.utilities.apply_func import move_data_to_device
from fabric.utilities.init import skip_init_context

T = TypeVar("T")


class Strategy(ABC):
    """How a loop runs on the devices: where things are placed, what is sent, and how a step is taken.

    A strategy is complete after its constructor and two calls that Fabric makes on every rank: `bind`, with what the
    plan decided, and `setup_environment`, which joins the process group. A subclass overrides what differs.

    Class attributes (the plan reads them, before any process starts):
        start_method: How the ranks start: `subprocess`, `spawn`, `fork`, `forkserver`; None for one process.
        interactive_compatible: Whether it can start from a notebook.
        one_process_per_device: Whether each device has its own process.
        max_devices: The most devices per machine, or None.
        accelerators: Names of the accelerators that it runs on, or None for all.
    """

    start_method: str | None = None
    interactive_compatible: bool = True
    one_process_per_device: bool = False
    max_devices: int | None = None
    accelerators: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self.parameters = ParameterMap()
        self._accelerator: Accelerator | None = None
        self._environment: ClusterEnvironment | None = None
        self._devices: tuple[torch.device, ...] = ()
        self._precision: Precision = Precision()
        self._checkpoint_io: CheckpointIO = TorchCheckpointIO()

    # who am I

    def bind(
        self,
        *,
        accelerator: Accelerator,
        devices: Sequence[torch.device],
        environment: ClusterEnvironment,
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        """Complete a strategy with what the plan decided; no process or device is touched.

        Args:
            accelerator: The kind of device.
            devices: The devices of this machine, one for each local rank (or all of them for one process).
            environment: Who this process is in the cluster.
            precision: The precision that surrounds forward, backward and step.
            checkpoint_io: Reads and writes single files; by default the strategy's own.
        """
        self._accelerator = accelerator
        self._devices = tuple(devices)
        self._environment = environment
        self._precision = precision
        self._checkpoint_io = checkpoint_io or self._checkpoint_io

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device that this strategy runs on."""
        if self._accelerator is None:
            raise self._unbound()
        return self._accelerator

    @property
    def environment(self) -> ClusterEnvironment:
        """Who this process is in the cluster."""
        if self._environment is None:
            raise self._unbound()
        return self._environment

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this machine."""
        if not self._devices:
            raise self._unbound()
        return self._devices

    def _unbound(self) -> RuntimeError:
        name = type(self).__name__
        return RuntimeError(
            f"This `{name}` does not know its devices yet. Pass it to `Fabric(strategy={name}(...))` before you use it."
        )

    @property
    def precision(self) -> Precision:
        """The precision that surrounds forward, backward and step."""
        return self._precision

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads and writes the single-file checkpoints."""
        return self._checkpoint_io

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device of this rank."""

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return 1

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return 0

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of the whole job."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """`num_replicas` and `rank` for sharding the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def create_precision(self, name: str, device_type: str) -> Precision:
        """The precision of this full name; runs once, while the plan is made.

        Raises:
            ValueError: If this strategy does not support it.
        """
        return create_precision(name, device_type)

    # join and leave

    def setup_environment(self) -> None:
        """Set up this rank's device; runs once on every rank, at `launch`."""
        self.accelerator.setup_device(self.root_device)

    def teardown(self) -> None:
        """Undo `setup_environment`."""
        self.accelerator.teardown()

    # create and place

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Tensors are created on the rank's device."""
        return self.root_device

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Modules are created on the rank's device.

        Args:
            empty_init: True skips the random initialisation, for weights that are loaded afterwards.
        """
        return skip_init_context(self.root_device) if empty_init else self.root_device

    def module_to_device(self, module: Module) -> None:
        """Move a module to the rank's device, in place."""
        module.to(self.root_device)

    @property
    def moves_batches(self) -> bool:
        """Whether the batches of a loader, which are made on the CPU, go elsewhere; asked once per loader, at setup."""
        return self.root_device.type != "cpu" or type(self).batch_to_device is not Strategy.batch_to_device

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Move the tensors of a batch, a tensor or any nesting of containers, to the rank's (or the given) device."""
        return move_data_to_device(batch, device or self.root_device)

    def process_dataloader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Change a loader after it was sharded; runs once per loader, at `setup_dataloaders`."""
        return loader

    # make it parallel

    def setup_module(self, module: Module) -> Module:
        """Wrap a module; what is returned is called in forward. Runs once, on every rank."""
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer that was made, and perhaps stepped, before its parameters were replaced or converted."""
        self.parameters.repoint(optimizer)
        if optimizer.state:
            groups = optimizer.param_groups
            optimizer.load_state_dict(
                optimizer.state_dict()
            )  # PyTorch's way to give state the parameters' device and dtype
            optimizer.param_groups = groups  # the same ones, which the user may hold
        return optimizer

    def setup_module_and_optimizers(
        self, module: Module, optimizers: Sequence[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        """Set up a module together with its optimizers and its learning-rate scheduler."""
        module = self.setup_module(module)
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    # one step

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward from `tensor`; it is never rescaled but by the loss scaler of the precision."""
        self._precision.backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Take one step; returns what the optimizer's own `step` returns."""
        return self._precision.optimizer_step(optimizer, **kwargs)

    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Where gradients are synchronised in backward: leave that out inside, to accumulate them."""
        return nullcontext()

    def join_uneven_inputs(self, *modules: Module) -> AbstractContextManager[Any]:
        """Let ranks take unlike numbers of batches inside: one that has left the loop takes part until all have.

        Args:
            *modules: What `setup_module` returned.

        Raises:
            RuntimeError: On every rank, if there are several and the strategy can't do that.
        """
        if self.world_size > 1:
            raise RuntimeError(
                f"`fabric.join_uneven_inputs(...)` needs `strategy='ddp'`, and this run uses `{type(self).__name__}`."
                " Let all ranks take the same number of batches: a loader from"
                " `fabric.setup_dataloaders(loader, uneven='pad')` does."
            )
        return nullcontext()

    def syncs_backward(self, module: Module) -> bool:
        """Whether ranks wait for each other in the backward of the forward that just ran; only debug mode asks.

        Args:
            module: What `setup_module` returned.
        """
        return False

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The global ranks whose parameters are equal to this one's after each step; only debug mode asks."""
        return (self.global_rank,)

    def has_synced_buffers(self, module: Module) -> bool:
        """Whether the forward that is running has made the buffers of all replicas equal; only debug mode asks.

        Args:
            module: What `setup_module` returned.
        """
        return False

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale the optimizer's gradients down to a total norm of `max_norm`; returns the norm before it.

        Under a loss scaler, gradients that are not finite do not raise: the scaler skips that step.
        """
        self._precision.unscale_gradients(optimizer)
        return torch.nn.utils.clip_grad_norm_(
            _parameters_of(optimizer),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite and not self._precision.skips_nonfinite_steps,
        )

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each element of the optimizer's gradients to `[-clip_val, clip_val]`."""
        self._precision.unscale_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(_parameters_of(optimizer), clip_val)

    # talk to the other ranks

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`, on every rank."""

    @abstractmethod
    def gather_objects(self, obj: T) -> list[T]:
        """The objects of all ranks in the order of ranks, on every rank."""

    @abstractmethod
    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False, pad_value: float | None = None
    ) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension (none is added for one rank).

        Unlike shapes raise on every rank; with a `pad_value`, each dimension is filled up to the largest instead.
        """

    def gather_alike(self, tensor: Tensor) -> Tensor:
        """`all_gather` for tensors of which the caller knows that shape and dtype are the same on all ranks."""
        return self.all_gather(tensor)

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: ReduceOp = "mean") -> Tensor:
        """A new tensor that holds the reduction over all ranks."""

    @abstractmethod
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank, with `all=False`) say True."""

    def start_boolean_decision(self, decision: bool, all: bool = True) -> Callable[[], bool]:
        """Begin what `reduce_boolean_decision` does, so that it goes on while this rank works.

        Call it in the main thread, in the same order on all ranks.

        Returns:
            A function that waits for the answer.
        """
        decided = self.reduce_boolean_decision(decision, all)
        return lambda: decided

    # state

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """The full state of a user's module, under its own names."""
        return module.state_dict()

    def load_module_state_dict(self, module: Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a full state into a user's module."""
        return module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer in PyTorch's own layout."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load a full state into an optimizer."""
        optimizer.load_state_dict(dict(state_dict))

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write `state` as one file; collective, and a failure is raised on every rank."""
        save(path, state, access=self, io=self._checkpoint_io, filter=filter)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool = True,
    ) -> dict[str, Any]:
        """Restore `state` in place from one file, and return what it did not ask for; collective."""
        return load(path, state, access=self, io=self._checkpoint_io, strict=strict, weights_only=weights_only)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
