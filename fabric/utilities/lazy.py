# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importing_on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562), so that importing the package does not import all that it offers.

    Args:
        package: Its name, for the error.
        homes: Name to the module that defines it.

    Example:
        >>> get = importing_on_use("here", {"sqrt": "math"})
        >>> get("sqrt")(4.0)
        2.0
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        return getattr(import_module(homes[name]), name)

    return get
