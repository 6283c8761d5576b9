# SPDX-License-Identifier: Apache-2.0
"""What one Fabric has set up."""

from typing import Any
from weakref import WeakValueDictionary


class SetUpObjects(WeakValueDictionary[int, Any]):
    """By the `id` of the user's module or optimizer the wrapper that it got, for as long as that wrapper lives."""

    def __reduce__(self) -> Any:
        return SetUpObjects, ()  # in a new process nothing is set up yet
