# SPDX-License-Identifier: Apache-2.0
"""Sorting `plugins=` by what each of them is."""

from typing import Any, NamedTuple

from fabric.plan.arguments import describe
from fabric.plugins.environments import ClusterEnvironment
from fabric.plugins.io import CheckpointIO
from fabric.plugins.precision import Precision


class Plugins(NamedTuple):
    """The user's plugins, at most one of each kind."""

    environment: ClusterEnvironment | None = None
    precision: Precision | None = None
    checkpoint_io: CheckpointIO | None = None


_KINDS = {"environment": ClusterEnvironment, "precision": Precision, "checkpoint_io": CheckpointIO}


def sort_plugins(plugins: Any) -> Plugins:
    """Tell the plugins apart.

    Args:
        plugins: None, one plugin, or a list or tuple of them.

    Raises:
        TypeError: For anything that is no plugin, and for a class where an instance is needed.
        ValueError: For two plugins of one kind.
    """
    found: dict[str, Any] = {}
    if plugins is None:
        return Plugins()
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [plugins]:
        kind = _kind_of(plugin)
        if kind in found:
            raise ValueError(
                f"`Fabric(plugins=...)` contains two plugins of type `{_KINDS[kind].__name__}`:"
                f" {describe(found[kind])} and {describe(plugin)}. Pass one of them."
            )
        found[kind] = plugin
    return Plugins(**found)


def _kind_of(plugin: object) -> str:
    for name, kind in _KINDS.items():
        if isinstance(plugin, kind):
            return name
        if isinstance(plugin, type) and issubclass(plugin, kind):
            raise TypeError(
                f"`Fabric(plugins=...)` contains the class `{plugin.__name__}`."
                f" Pass an instance: `{plugin.__name__}(...)`."
            )
    names = ", ".join(f"`{kind.__name__}`" for kind in _KINDS.values())
    raise TypeError(
        f"`Fabric(plugins=...)` contains `{describe(plugin)}` of type `{type(plugin).__name__}`."
        f" Pass instances of {names}; names of strategies and precisions go into `strategy=` and `precision=`."
    )
