# SPDX-License-Identifier: Apache-2.0
"""The facade: each method names who does the work."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, cast, overload
from weakref import ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric import data, debugging, validation
from fabric.accelerators import Accelerator, take_inventory
from fabric.callbacks import Callbacks
from fabric.evaluation import Agreement
from fabric.facade import Keep, Observe, Place, Talk
from fabric.loggers import Logger
from fabric.loggers.ending import finalize_at_exit, saved_after
from fabric.plan import Arguments, Plan, resolve
from fabric.plugins.environments import ClusterEnvironment
from fabric.run_override import launching
from fabric.strategies import Strategy
from fabric.strategies.launchers import SubprocessLauncher, create_launcher
from fabric.utilities.seed import seed_everything
from fabric.watching import Screen
from fabric.wrappers import (
    SetUpObjects,
    _FabricModule,
    _FabricOptimizer,
    _unwrap_compiled,
    _unwrap_objects,
)

T = TypeVar("T")


class Fabric(Place, Talk, Observe, Keep):
    """Scales a plain PyTorch loop: you keep the loop, Fabric places it on the devices.

    Args:
        accelerator: `cpu`, `cuda`, `mps`, `gpu`, `auto`, or an `Accelerator`.
        strategy: `ddp`, `dp`, `single_device`, ..., `auto`, or a `Strategy`.
        devices: How many (`2`, `"2"`), which (`[0, 2]`, `"0,2"`), all (`-1`), or `auto`: all GPUs, one CPU process.
        num_nodes: Number of machines; `auto` takes what the cluster says, else 1.
        precision: `32-true`, `16-mixed`, `bf16-mixed`, `bf16-true`, ...; None for `32-true`.
        plugins: A `Precision`, a `ClusterEnvironment`, a `CheckpointIO`, or a list of them.
        callbacks: One object or a list; `fabric.call("hook")` calls the method of that name on each that has it.
        loggers: A `Logger` or a list of them, for `fabric.log`.

    Raises:
        ValueError: If a choice is unknown, or two of them contradict each other.

    Example::

        fabric = Fabric(devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model(batch).sum())
            optimizer.step()
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: Sequence[int] | str | int = "auto",
        num_nodes: int | str = "auto",
        precision: str | int | None = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Logger | Sequence[Logger] | None = None,
    ) -> None:
        arguments = Arguments(accelerator, strategy, devices, num_nodes, precision, plugins)
        self._plan = resolve(
            arguments, os.environ, take_inventory(os.environ), launched=SubprocessLauncher.launched_environment()
        )
        self._accelerator = self._plan.accelerator.value
        self._strategy = self._plan.strategy.value
        self._precision = self._plan.precision.value
        self._callbacks = Callbacks(_as_list(callbacks))
        self._screen = Screen()
        self._loggers: list[Logger] = validation._validated_loggers(_as_list(loggers))
        self._launcher = create_launcher(
            self._plan.launcher.value, environment=self._plan.environment.value, threads=self._plan.threads.value
        )
        self._checks = _create_checks(self._plan)
        self._launched = False
        self._agreement = Agreement()
        self._set_up = SetUpObjects()
        self._only_module: Callable[[], Module | None] = _no_module  # what the strategy made of it, held weakly
        self._bind(self._plan.environment.value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = launching(cls, cls.run)  # type: ignore[method-assign]

    # start

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the other processes and join them; a second call only runs `function`.

        Args:
            function: Called as `function(fabric, *args, **kwargs)` on every rank. Without it the script goes on after
                `launch()` on every rank. The strategies that spawn or fork need it.

        Returns:
            What the function returned on this machine's first rank.
        """
        validation._validate_launch(function, self._plan)
        if self._launched:
            return function(self, *args, **kwargs) if function is not None else None
        return self._launcher.launch(self._enter, function, args, kwargs)

    def _enter(
        self, environment: ClusterEnvironment, function: Callable[..., T] | None, args: Any, kwargs: Any
    ) -> T | None:
        """What each rank does at launch."""
        self._bind(environment)
        self._strategy.setup_environment()
        self._checks.enter()
        self._launched = True
        if function is None:
            finalize_at_exit(self._loggers)
            return None
        with saved_after(self._loggers):
            result = function(self, *args, **kwargs)
            self._strategy.saves.close()
            return result

    def _bind(self, environment: ClusterEnvironment) -> None:
        self._strategy.bind(
            accelerator=self._accelerator,
            devices=self._accelerator.get_parallel_devices(list(self._plan.devices.value)),
            environment=environment,
            precision=self._precision,
            checkpoint_io=self._plan.checkpoint_io.value,
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Override this with your loop; calling it launches the processes and runs it on each."""
        raise NotImplementedError(
            f"`{type(self).__name__}.run()` is not defined. Override it in a subclass of `Fabric`, or use `launch()`."
        )

    def teardown(self) -> None:
        """Leave the process group and take away the hooks and signal handlers that `launch()` installed."""
        if not self._launched:
            return
        try:
            self._strategy.saves.close()
        finally:
            self._agreement = Agreement()  # leaving the group waits for the votes that nobody has asked for
            self._checks.leave()
            self._strategy.teardown()
            self._launcher.teardown()
            self._launched = False

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
        """Seed Python, NumPy and PyTorch, and with `workers=True` the data loaders' workers; returns the seed."""
        return seed_everything(seed, workers=workers, verbose=verbose)

    # set up

    @overload
    def setup(self, module: Module, *, move_to_device: bool = ..., _reapply_compile: bool = ...) -> _FabricModule: ...
    @overload
    def setup(
        self,
        module: Module,
        *optimizers: Optimizer,
        scheduler: Any = ...,
        move_to_device: bool = ...,
        _reapply_compile: bool = ...,
    ) -> Any: ...
    def setup(
        self,
        module: Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Set up a module and its optimizers for the devices, the strategy and the precision.

        Args:
            module: A plain or compiled module.
            *optimizers: Its optimizers.
            scheduler: A learning-rate scheduler that the strategy has to know about.
            move_to_device: Whether to move the module to the rank's device. What is sharded, or cut into stages, is
                moved with its parts in any case.
            _reapply_compile: A compiled module is compiled again around what the strategy makes of it.

        Returns:
            The wrapped module, followed by the wrapped optimizers (and the scheduler, if there is one).
        """
        self._require_launch("setup", module)
        validation._validate_module(module, self._set_up, self._strategy)
        validation._validate_optimizers(optimizers, self._set_up)
        plain, compile_again = _unwrap_compiled(module) if _reapply_compile else (module, None)
        module = module if compile_again is None else plain
        with self._strategy.parameters.follow(module):
            module = self._precision.convert_module(module)
            if move_to_device and not self._strategy.shards_parameters:  # sharding moves its units one by one
                self._strategy.module_to_device(module)
        forward_module, plain_optimizers, scheduler = self._strategy.setup_module_and_optimizers(
            module, optimizers, scheduler
        )
        self._checks.watch(forward_module, module, compiled=compile_again is not None)
        self._checks.watch_optimizers(plain_optimizers)
        self._only_module = (
            _no_module if any(isinstance(w, Module) for w in self._set_up.values()) else ref(forward_module)
        )
        if compile_again is not None:
            forward_module = compile_again(forward_module)
        wrapped = _FabricModule(forward_module, self._strategy, original_module=module)
        results = [wrapped, *(_FabricOptimizer(optimizer, self._strategy) for optimizer in plain_optimizers)]
        self._set_up.update((id(user), wrapper) for user, wrapper in zip((plain, *optimizers), results, strict=True))
        results += [] if scheduler is None else [scheduler]
        return tuple(results) if len(results) > 1 else wrapped

    def setup_module(self, module: Module, move_to_device: bool = True, _reapply_compile: bool = True) -> _FabricModule:
        """Set up a module alone; set up its optimizers afterwards with `setup_optimizers`."""
        self._require_launch("setup_module")
        return self.setup(module, move_to_device=move_to_device, _reapply_compile=_reapply_compile)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up optimizers alone; returns one, or a tuple of them."""
        self._require_launch("setup_optimizers")
        validation._validate_optimizers(optimizers, self._set_up, at_least_one=True)
        plain_optimizers = [self._strategy.setup_optimizer(optimizer) for optimizer in optimizers]
        self._checks.watch_optimizers(plain_optimizers)
        wrapped = tuple(_FabricOptimizer(optimizer, self._strategy) for optimizer in plain_optimizers)
        self._set_up.update((id(user), wrapper) for user, wrapper in zip(optimizers, wrapped, strict=True))
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def setup_dataloaders(
        self,
        *dataloaders: Iterable[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        prefetch: int = 0,
        uneven: Literal["pad", "stop"] = "pad",
        replay: bool = False,
    ) -> Any:
        """Shard data loaders over the ranks and move their batches.

        Args:
            *dataloaders: PyTorch loaders, which are not changed. The batches of any other iterable are only moved.
            use_distributed_sampler: False leaves the samplers, and streams, as they are.
            move_to_device: False leaves the batches where the loader put them.
            prefetch: So many batches are moved to the device before the loop asks for them. Where nothing is moved, as
                on the CPU, there is nothing to do ahead.
            uneven: What a rank does whose stream ends before another's: `pad` repeats a batch, whose `loader.share` has
                no valid samples, until all have ended; with `stop` all end with the first.
            replay: Go on in the middle of data that has no place to go to by loading its first batches once more.

        Returns:
            One wrapped loader, or a list of them.
        """
        self._require_launch("setup_dataloaders")
        validation._validate_dataloaders(dataloaders)
        validation._validate_loading(prefetch, uneven)
        strategy = self._strategy
        move = strategy.batch_to_device if move_to_device and strategy.moves_batches else None
        moving = data.Moving(self._checks.batches(move), prefetch, strategy.root_device)
        ranks = data.Ranks(
            **strategy.distributed_sampler_kwargs,
            decide=strategy.start_boolean_decision,
            gather=strategy.gather_objects,
        )
        seeds = strategy.broadcast([data.sampling_seed(loader) for loader in dataloaders])
        wrapped = []
        for loader, seed in zip(dataloaders, seeds, strict=True):
            if isinstance(loader, DataLoader):
                if use_distributed_sampler:
                    loader = data.shard_dataloader(loader, num_replicas=ranks.num_replicas, rank=ranks.rank, seed=seed)
                loader = strategy.process_dataloader(loader)
            reading = data.Reading(ranks, shard=use_distributed_sampler, uneven=uneven, replay=replay, seed=seed)
            wrapped.append(data._FabricDataLoader(loader, reading=reading, moving=moving))
        return wrapped[0] if len(wrapped) == 1 else wrapped

    # step

    def backward(self, tensor: Tensor, *args: Any, model: Module | None = None, **kwargs: Any) -> None:
        """Run backward from `tensor` in the place of `tensor.backward(*args, **kwargs)`.

        Args:
            tensor: The loss. It is not rescaled, but by a loss scaler.
            model: The set-up module that it came from, where a strategy needs to know and there are several.
        """
        module = (
            self._only_module() if model is None else validation._forward_module_of(model, "backward(model=module)")
        )
        self._strategy.backward(tensor, module, *args, **kwargs)

    def forward_backward(
        self, model: Module, *inputs: Any, target: Any = None, loss_fn: Callable[[Any, Any], Tensor], **kwargs: Any
    ) -> Tensor:
        """Forward, loss and backward of one batch in one call, under every strategy; a pipeline needs it.

        It stands for `loss = loss_fn(model(*inputs, **kwargs), target)` and `fabric.backward(loss)`.

        Args:
            model: The set-up model.
            *inputs: What its forward takes.
            target: What `loss_fn` is given beside the output, in any nesting of containers.
            loss_fn: From output and target to a scalar, the mean over the samples that it is given: a pipeline calls it
                for each micro-batch.
            **kwargs: Further inputs of the forward, by name.

        Returns:
            The loss on this rank's batch, without a graph; in a pipeline the mean over its micro-batches, on each rank.

        Example::

            loss = fabric.forward_backward(model, x, target=y, loss_fn=torch.nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        """
        module = validation._forward_module_of(model, "forward_backward(model, ...)")
        return self._strategy.forward_backward(module, model, inputs, kwargs, target=target, loss_fn=loss_fn)

    def clip_gradients(
        self,
        module: Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters, all of the model's shards together.

        Args:
            module: The module.
            optimizer: Its optimizer.
            clip_val: Clamp each element to `[-clip_val, clip_val]`.
            max_norm: Scale all gradients so that their joint norm is at most this.
            norm_type: The p of the p-norm.
            error_if_nonfinite: Raise if the norm is infinite or NaN; under a loss scaler the step is skipped instead.

        Returns:
            The total norm before clipping, a scalar; None with `clip_val`.
        """
        validation._validate_clipping(module, optimizer, clip_val, max_norm)
        module, optimizer = _unwrap_objects((module, optimizer))
        if clip_val is not None:
            self._strategy.clip_gradients_value(module, optimizer, clip_val)
            return None
        return self._strategy.clip_gradients_norm(
            module, optimizer, cast(float, max_norm), norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's forward context, for code outside of a module's forward."""
        return self._precision.forward_context()

    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Accumulate gradients inside without synchronising them over the ranks.

        Args:
            module: A set-up module.
            enabled: False changes nothing, for the last micro-batch: `no_backward_sync(model, enabled=not last)`.
        """
        return self._strategy.no_backward_sync(
            validation._forward_module_of(module, "no_backward_sync(module)"), enabled
        )


def _no_module() -> None:
    """There is none, or there are several."""


def _create_checks(plan: Plan) -> debugging.Checks:
    debug = plan.debug.value
    if debug is None:
        return debugging.Checks()
    return debugging.DebugChecks(plan.strategy.value, timeout=debug.timeout, every=debug.every)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
