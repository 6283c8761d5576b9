# SPDX-License-Identifier: Apache-2.0
"""Where things are made and put."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.nn import Module

from fabric.facade.identity import Identity


class Place(Identity):
    """Making models and tensors where they belong, moving them there, and giving each rank its part of them."""

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Generator[None]:
        """Create modules inside on the rank's device and in the precision's dtype.

        Args:
            empty_init: True skips the random initialisation, for weights that are loaded afterwards. Under a strategy
                that shards parameters the model is then on the meta device, without memory, and `setup` makes each
                rank's shards with the values that the constructor would have given them. False or None makes it for
                real, under such a strategy on the CPU.
        """
        self._require_launch("init_module")
        with self._precision.module_init_context(), self._strategy.module_init_context(empty_init):
            yield

    def sharded_model(self) -> AbstractContextManager[None]:
        """Create a model inside that may be too large for one rank; its values are the same under every strategy.

        A strategy that shards parameters makes it at `setup`, shard by shard: `init_module(empty_init=True)`. Any other
        makes it right away: `init_module()`.
        """
        return self.init_module(empty_init=self._strategy.starts_on_meta)

    @contextmanager
    def init_tensor(self) -> Generator[None]:
        """Create tensors inside on the rank's device and in the precision's dtype."""
        self._require_launch("init_tensor")
        with self._precision.tensor_init_context(), self._strategy.tensor_init_context():
            yield

    def to_device(self, obj: Any) -> Any:
        """Move a module (in place), a tensor, or the tensors in any nesting of containers to the rank's device."""
        self._require_launch("to_device")
        if isinstance(obj, Module):
            self._strategy.module_to_device(obj)
            return obj
        return self._strategy.batch_to_device(obj)

    def context_parallel(self, tensors: Any, seq_dims: Any) -> AbstractContextManager[Any]:
        """Divide long sequences over the ranks that share them; attention sees the whole sequence inside.

        Inside, `torch.nn.functional.scaled_dot_product_attention` goes over the tokens of all these ranks, in forward
        and in backward. Everything else sees this rank's tokens only, so positions have to be divided too. Without
        `ModelParallelStrategy(context_parallel_size=...)` the tensors come as they are.

        Args:
            tensors: Inputs, targets, positions, ...: a tensor or any nesting of containers. They are not changed.
            seq_dims: The dimension of the sequence: one for all tensors, or the same nesting of them; None leaves a
                tensor whole.

        Returns:
            A context whose value is this rank's part of `tensors`. Run backward inside of it, too.

        Raises:
            RuntimeError: On entering it inside of another one.
            TypeError, ValueError: On entering it, on every rank, if tensors and dimensions do not belong together, or
                if the length of the sequence can't be divided by the number of ranks.

        Example::

            positions = torch.arange(tokens.size(1), device=fabric.device)
            with fabric.context_parallel((tokens, targets, positions), (1, 1, 0)) as (x, y, p):
                loss = cross_entropy(model(x, p).flatten(0, 1), y.flatten())
                fabric.backward(loss)
        """
        self._require_launch("context_parallel")
        self._checks.same_data("the tensors of `fabric.context_parallel`", tensors)
        return self._strategy.context_parallel(tensors, seq_dims)
