# SPDX-License-Identifier: Apache-2.0
"""The base of every strategy: the place where parallelism lives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric import checkpoint
from fabric.checkpoint.background import BackgroundSaves, SaveHandle
from fabric.strategies.bound import Bound
from fabric.strategies.parameters import ParameterMap
from fabric.strategies.reduction import ReduceOp
from fabric.utilities.apply_func import move_data_to_device
from fabric.utilities.init import skip_init_context

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Strategy(Bound, ABC):
    """How a loop runs on the devices: where things are placed, what is sent, and how a step is taken.

    A strategy is complete after its constructor and two calls that Fabric makes on every rank: `bind`, with what the
    plan decided, and `setup_environment`, which joins the process group. A subclass overrides what differs.

    Class attributes (the plan reads them, before any process starts):
        start_method: How the ranks start: `subprocess`, `spawn`, `fork`, `forkserver`; None for one process.
        interactive_compatible: Whether it can start from a notebook.
        one_process_per_device: Whether each device has its own process.
        max_devices: The most devices per machine, or None.
        accelerators: Names of the accelerators that it runs on, or None for all.
        shards_parameters: Whether a rank holds a part of the parameters only.
        starts_on_meta: Whether `setup_module` gives values to parameters on the meta device.
        state_dict_type: How `fabric.save` writes: `full`, one file, or `sharded`, a folder to which each rank writes.
        state_is_distributed: Whether ranks hold different parameters, such as the stages of a pipeline.
    """

    start_method: str | None = None
    interactive_compatible: bool = True
    one_process_per_device: bool = False
    max_devices: int | None = None
    accelerators: tuple[str, ...] | None = None
    shards_parameters: bool = False
    starts_on_meta: bool = False
    state_dict_type: Literal["full", "sharded"] = "full"
    state_is_distributed: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.parameters = ParameterMap()
        self.saves = BackgroundSaves()

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

    def setup_rows(self) -> list[tuple[str, str, str]]:
        """Rows that `fabric.explain()` adds for what was decided at setup: name, value, reason."""
        return []

    # one step

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward from `tensor`; it is never rescaled but by the loss scaler of the precision."""
        self._precision.backward(tensor, module, *args, **kwargs)

    def forward_backward(
        self,
        module: Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor],
    ) -> Tensor:
        """Forward, loss and backward of one batch; see `Fabric.forward_backward`.

        Args:
            module: What `setup_module` returned.
            forward: Calls it through the precision.
            args: Inputs of the forward.
            kwargs: The same, by name.
            target: What `loss_fn` compares the output with.
            loss_fn: From output and target to the loss.
        """
        loss = loss_fn(forward(*args, **kwargs), target)
        self.backward(loss, module)
        return loss.detach()

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Take one step; returns what the optimizer's own `step` returns."""
        return self._precision.optimizer_step(optimizer, **kwargs)

    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Where gradients are synchronised in backward: leave that out inside, to accumulate them."""
        return nullcontext()

    def drop_unsent(self, parameters: Iterable[Tensor]) -> None:
        """Forget what was accumulated for parameters and is not in their `.grad`; asked if `shards_parameters`.

        Args:
            parameters: Those whose gradients `zero_grad` has reset.
        """
        return

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

    def replicas_of(self, tensor: Tensor) -> tuple[int, ...]:
        """The ranks on which this parameter or buffer is the same; by default `replica_ranks`. Only debug mode asks."""
        return self.replica_ranks

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

    # one sequence on several ranks

    @property
    def context_parallel_size(self) -> int:
        """Number of ranks that share each sequence; gradients are averaged over all of them."""
        return 1

    @property
    def parts_of_batch(self) -> int:
        """In how many parts losses of one batch come, of which not the sum but the mean is trained."""
        return self.context_parallel_size

    def context_parallel(self, tensors: Any, seq_dims: Any) -> AbstractContextManager[Any]:
        """Divide sequences over the ranks that share them; see `Fabric.context_parallel`.

        Returns:
            A context whose value is this rank's part of `tensors`.
        """
        return nullcontext(tensors)

    def gather_sequence(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole of what the ranks that share a sequence made of their parts, in its order; without gradients.

        Args:
            tensor: Of one shape on these ranks.
            dim: The dimension of the sequence.
        """
        return tensor.detach()

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

    @property
    def checkpoint_group(self) -> "ProcessGroup | None":
        """The process group over which saving and loading talk, on the CPU; None for the default one, or for none."""
        return None

    def create_cpu_group(self) -> "ProcessGroup | None":
        """A new group of all ranks over gloo, for threads that write checkpoints; None in one process. Collective."""
        return None

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """What this rank holds of a user's module, under its own names: plain tensors, and `DTensor`s where sharded.

        They are the module's own memory: a folder is read right into them.
        """
        return module.state_dict()

    def load_module_state_dict(self, module: Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state into a user's module: full tensors, of which each rank takes its part, or such as it holds."""
        return checkpoint.load_module(module, state_dict, strict=strict)

    def parameter_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        """The plain names of an optimizer's parameters by group; None where nobody knows them.

        Saving and loading ask it for optimizers whose module is not saved or loaded with them.
        """
        return checkpoint.own_names(optimizer)

    def in_plain_order(self, names: list[str]) -> list[str]:
        """The names of parameters from all ranks in the order of the plain model; asked if `state_is_distributed`."""
        return names

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What this rank holds of an optimizer's state, in PyTorch's own layout, `DTensor`s where it is sharded."""
        return checkpoint.with_names(optimizer.state_dict(), self.parameter_names(optimizer))

    def load_optimizer_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load a state in PyTorch's own layout, with full tensors or such as this rank holds."""
        checkpoint.load_optimizer(optimizer, state_dict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
        format: Literal["torch", "sharded", "safetensors"] | None = None,
        max_shard_size: int | str | None = None,
        **options: Any,
    ) -> SaveHandle:
        """Write `state` as one file or as a folder; collective, and a failure is raised on every rank.

        `options` are `blocking`, `busy` and `checksum`, as `fabric.save` takes them.
        """
        options |= {"filter": filter, "format": format, "max_shard_size": max_shard_size}
        return checkpoint.save(path, state, access=self, io=self._checkpoint_io, **options)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool = True,
    ) -> dict[str, Any]:
        """Restore `state` in place from a file or folder, and return what it did not ask for; collective."""
        return checkpoint.load(
            path, state, access=self, io=self._checkpoint_io, strict=strict, weights_only=weights_only
        )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
