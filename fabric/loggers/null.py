# SPDX-License-Identifier: Apache-2.0
"""What stands for a tracker's own object on the ranks that do not log."""

from collections.abc import Iterator
from typing import Any


class NullExperiment:
    """Whatever is done with it does nothing, so that code for rank 0 runs on all ranks.

    Example:
        >>> experiment = NullExperiment()
        >>> experiment.log({"loss": 0.5})
        NullExperiment()
        >>> with experiment.run(name="a") as run:
        ...     run.config["lr"] = 0.1
        >>> bool(run), list(run)
        (False, [])
    """

    def __getattr__(self, name: str) -> "NullExperiment":
        if name.startswith("__"):  # what Python, `copy` and `pickle` ask every object for
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "NullExperiment":
        return self

    def __getitem__(self, key: Any) -> "NullExperiment":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> "NullExperiment":
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NullExperiment()"
