# SPDX-License-Identifier: Apache-2.0
"""A model in stages, each on a rank of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from fabric.plugins.precision import FSDPPrecision, Precision
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.pipelining.absent import strip
from fabric.strategies.pipelining.arguments import validate_division, validate_numbers
from fabric.strategies.pipelining.division import Shared, divide_tensors
from fabric.strategies.pipelining.holdings import Holdings, adopt_rank_zero
from fabric.strategies.pipelining.pipeline import Pipeline
from fabric.strategies.pipelining.place import Place
from fabric.strategies.pipelining.schedules import find_kind, validate_num_microbatches, validate_num_stages
from fabric.strategies.pipelining.shared import SharedGradients, average_gradients
from fabric.strategies.pipelining.stages import Stage, Stages, create_stages
from fabric.strategies.sharding.clipping import clip_by_norm, refuse_nonfinite, total_norm
from fabric.strategies.sharding.mesh import build_mesh, divide, release_groups
from fabric.strategies.sharding.options import validated_state_dict_type
from fabric.utilities.init import skip_init_context

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_CALL = "PipelineParallelStrategy"


class PipelineParallelStrategy(ParallelStrategy):
    """Pipeline parallel: each rank holds some stages of the model, and micro-batches go from rank to rank.

    One call trains a batch, on every rank: `loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_fn)`.
    All ranks of a pipeline get the same batch. `fabric.backward` raises, and `model(x)` evaluates, without gradients.

    Args:
        split_at: Names of the submodules that begin a stage, such as `["layers.4", "layers.8"]` for three stages.
        stages: In the place of `split_at`: for each stage the names of modules that are called one after another, or a
            function `(module, stage_index, num_stages)` that returns a module made of the model's own submodules. It
            is called for all stages on every rank; the first is given the model's inputs, each other one what the
            stage before returned, a tensor or a tuple of tensors.
        schedule: `1f1b`, `gpipe`, `interleaved_1f1b`, `looped_bfs`, `interleaved_zero_bubble` or `zbv_zero_bubble`. The
            first two run one stage on each rank, the last one two, and the others any number.
        num_microbatches: How many equal parts a batch is divided into; by default as many as there are stages.
        stages_per_rank: How many stages each rank runs, where `stages` is a function; by default what suits the
            schedule.
        pipeline_parallel_size: Ranks of one pipeline; "auto" takes all that `data_parallel_size` leaves.
        data_parallel_size: Copies of the pipeline, which read different data and average their gradients.
        state_dict_type: Whether checkpoints are `sharded` folders or `full` files. Both are read.
        process_group_backend: `nccl`, `gloo`, ...; by default what suits the accelerator.
        timeout: How long a collective may wait for the other ranks; by default 30 minutes.
        start_method: How the ranks of a machine start: `subprocess`, `spawn`, `fork` or `forkserver`.

    Raises:
        ValueError: If a choice is unknown, or two of them contradict each other.

    Example::

        strategy = PipelineParallelStrategy(split_at=["layers.4"], schedule="1f1b", num_microbatches=8)
        fabric = Fabric(devices=2, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        for x, y in loader:
            loss = fabric.forward_backward(model, x, target=y, loss_fn=torch.nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    """

    shards_parameters = True
    state_is_distributed = True

    def __init__(
        self,
        *,
        split_at: Sequence[str] | None = None,
        stages: Stages | None = None,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = 1,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "subprocess",
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self._kind = find_kind(schedule)
        validate_division(split_at, stages, stages_per_rank)
        validate_numbers(num_microbatches, stages_per_rank, pipeline_parallel_size, data_parallel_size)
        self.state_dict_type = validated_state_dict_type("PipelineParallelStrategy", state_dict_type)
        self._split_at = None if split_at is None else list(split_at)
        self._stages = stages
        self._num_microbatches = num_microbatches
        self._stages_per_rank = stages_per_rank or self._kind.default_stages_per_rank
        self._wanted_sizes = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
        }
        self._mesh: DeviceMesh | None = None
        self._tied_groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._holdings = Holdings()
        self._rows: list[tuple[str, str, str]] = []

    # who am I

    @property
    def _sizes(self) -> dict[str, int]:
        return divide(_CALL, self.world_size, self._wanted_sizes)

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks of one pipeline."""
        return self._sizes["pipeline_parallel_size"]

    @property
    def data_parallel_size(self) -> int:
        """Number of pipelines, which read different data."""
        return self._sizes["data_parallel_size"]

    @property
    def pipeline_parallel_rank(self) -> int:
        """Where this rank stands in its pipeline; the global rank is this times `data_parallel_size`, plus the next."""
        return self.global_rank // self.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self.global_rank % self.data_parallel_size

    @property
    def num_stages(self) -> int:
        """Number of stages that a model is cut into."""
        if self._split_at is not None:
            return len(self._split_at) + 1
        if isinstance(self._stages, Sequence):
            return len(self._stages)
        return self.pipeline_parallel_size * self._stages_per_rank

    @property
    def num_microbatches(self) -> int:
        """Number of equal parts that a batch is divided into."""
        return self._num_microbatches or self.num_stages

    @property
    @override
    def parts_of_batch(self) -> int:
        return self.num_microbatches  # `loss_fn` sees one of them at a time

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the dimensions `pipeline_parallel` and `data_parallel`."""
        if self._mesh is None:
            raise RuntimeError(f"`{_CALL}.device_mesh` is made by `fabric.launch()`. Call that first.")
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    @override
    def replica_ranks(self) -> tuple[int, ...]:
        first = self.pipeline_parallel_rank * self.data_parallel_size
        return tuple(range(first, first + self.data_parallel_size))

    @override
    def setup_rows(self) -> list[tuple[str, str, str]]:
        return list(self._rows)

    # join and leave

    @override
    def bind(self, **kwargs: Any) -> None:
        precision = kwargs["precision"]
        if precision.skips_nonfinite_steps and not isinstance(precision, FSDPPrecision):
            raise ValueError(
                f"`{_CALL}` can't run with `{type(precision).__name__}('{precision.precision}')`, whose loss scaler"
                " knows one rank's gradients only. Write `Fabric(precision='16-mixed')`, which makes one that agrees"
                " over the stages."
            )
        super().bind(**kwargs)

    @override
    def create_precision(self, name: str, device_type: str) -> Precision:
        return (
            FSDPPrecision("16-mixed", device_type)
            if name == "16-mixed"
            else super().create_precision(name, device_type)
        )

    @override
    def setup_environment(self) -> None:
        size = self.pipeline_parallel_size
        validate_num_stages(self._kind, self.num_stages, size)
        validate_num_microbatches(self._kind, self.num_microbatches, self.num_stages, size)
        super().setup_environment()
        dimensions = {"pipeline_parallel": size, "data_parallel": self.data_parallel_size}
        self._mesh = build_mesh(self.root_device.type, dimensions, self.timeout)

    @override
    def teardown(self) -> None:
        if self._mesh is not None:
            release_groups(self._mesh)
        self._mesh = None
        self._tied_groups.clear()
        super().teardown()

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Modules are created on the CPU, from where setup moves this rank's stages.

        Args:
            empty_init: True skips the random initialisation, for weights that are loaded afterwards.
        """
        cpu = torch.device("cpu")
        return skip_init_context(cpu) if empty_init else cpu

    # make it parallel

    @override
    def setup_module(self, module: Module) -> Module:
        rank = self.pipeline_parallel_rank
        ranks = self._kind.ranks_of_stages(self.num_stages, self.pipeline_parallel_size)
        stages = create_stages(module, self._split_at, self._stages, self.num_stages)
        division = divide_tensors(module, stages, ranks, rank)
        adopt_rank_zero(module, division.kept, self)
        self._holdings.note(module, division.kept)
        strip(module, division.kept)
        with self.parameters.follow(module):
            module.to(self.root_device)
        self._holdings.note(module, [id(parameter) for parameter in module.parameters()])
        own = {index: stage for index, stage in enumerate(stages) if ranks[index] == rank}
        for stage in own.values():
            stage.prepare(self.root_device)
        pipeline = Pipeline(
            module,
            own,
            ranks,
            place=self._place(),
            kind=self._kind,
            num_microbatches=self.num_microbatches,
            precision=self.precision,
            shared=self._share(division.shared),
        )
        self._rows += self._describe(type(module).__name__, stages, ranks)
        return pipeline

    def _place(self) -> Place:
        group = self.device_mesh.get_group("pipeline_parallel")
        return Place(group, self.pipeline_parallel_rank, dist.get_process_group_ranks(group), self.root_device)

    def _share(self, shared: Sequence[Shared]) -> SharedGradients:
        """Make a group for each set of ranks that hold a tied parameter; every rank takes part in making each."""
        copies = self.data_parallel_size
        found = []
        for tied in shared:
            for copy in range(copies):
                members = tuple(rank * copies + copy for rank in tied.ranks)
                if members not in self._tied_groups:
                    self._tied_groups[members] = dist.new_group(list(members), timeout=self.timeout)
                if self.global_rank in members:
                    found.append((self.parameters.current(tied.parameter), self._tied_groups[members], tied.ranks[0]))
        first = self.pipeline_parallel_rank
        self._holdings.note_counted_elsewhere(tied for tied, _, counts in found if counts != first)
        return SharedGradients([(tied, group) for tied, group, _ in found])

    def _describe(self, name: str, stages: Sequence[Stage], ranks: Sequence[int]) -> list[tuple[str, str, str]]:
        copies = self.data_parallel_size
        text = f"{name}: {self._kind.name}, {self.num_microbatches} micro-batches, {len(ranks)} stages on"
        text += f" {self.pipeline_parallel_size} ranks" + (f", {copies} copies" if copies > 1 else "")
        rows = [("pipeline", text, "argument" if self._num_microbatches else "as many micro-batches as stages")]
        for index, (stage, rank) in enumerate(zip(stages, ranks, strict=True)):
            holders = ", ".join(str(rank * copies + copy) for copy in range(copies))
            cut = "split_at" if self._split_at is not None else "stages"
            rows.append((f"stage {index}", _shortened(stage.names), f"on rank {holders} ({cut})"))
        return rows

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.parameters.repoint(optimizer)
        self._holdings.keep_own(optimizer)
        return super().setup_optimizer(optimizer)

    # one step

    @override
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
        pipeline = _pipeline_of(module)
        loss = pipeline.step(args, kwargs, target, loss_fn)
        if self.data_parallel_size > 1 and pipeline.sends_gradients:
            average_gradients(module.parameters(), self.device_mesh.get_group("data_parallel"))
        return loss

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"`fabric.backward(loss)` can't run under `{_CALL}`, where forward and backward of micro-batches overlap."
            " Write `loss = fabric.forward_backward(model, x, target=y, loss_fn=loss_fn)` in the place of forward, loss"
            " and backward; it runs under every strategy."
        )

    @override
    @contextmanager
    def no_backward_sync(self, module: Module, enabled: bool = True) -> Iterator[None]:
        pipeline = _pipeline_of(module)
        before = pipeline.sends_gradients
        pipeline.sends_gradients = before and not enabled
        try:
            yield
        finally:
            pipeline.sends_gradients = before

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        stages = self.device_mesh.get_group("pipeline_parallel")
        total = total_norm(self._holdings.counted(optimizer), norm_type, self.root_device, stages)
        total = total.to(torch.float64 if self.precision.precision == "64-true" else torch.float32)
        if error_if_nonfinite and not self.precision.skips_nonfinite_steps:
            refuse_nonfinite(total, norm_type)
        clip_by_norm([parameter for group in optimizer.param_groups for parameter in group["params"]], max_norm, total)
        return total

    # state

    @override
    def parameter_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        return self._holdings.names(optimizer)


def _pipeline_of(module: Module) -> Pipeline:
    if not isinstance(module, Pipeline):
        raise RuntimeError(
            "A model that was compiled as a whole can't run in a pipeline. Call `block.compile()` on its submodules"
            " before `fabric.setup(...)`, and leave `torch.compile(model)` out."
        )
    return module


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, ..., {', '.join(names[-2:])}"
