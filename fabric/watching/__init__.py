# SPDX-License-Identifier: Apache-2.0
"""Seeing a run: progress, profiles, and what a model is made of."""

from typing import TYPE_CHECKING

from fabric.utilities.lazy import importing_on_use
from fabric.watching.displays import Screen, validate_kind

if TYPE_CHECKING:
    from fabric.watching.communication import Communication
    from fabric.watching.profiling import Profile, validated_schedule
    from fabric.watching.progress import ProgressBar, samples_of
    from fabric.watching.summary import Summary, summarize

__all__ = [
    "Communication",
    "Profile",
    "ProgressBar",
    "Screen",
    "Summary",
    "samples_of",
    "summarize",
    "validate_kind",
    "validated_schedule",
]

# Resolved on first use: most programs need one of them, or none.
_EXPORTS = {
    "Communication": "fabric.watching.communication",
    "Profile": "fabric.watching.profiling",
    "ProgressBar": "fabric.watching.progress",
    "Summary": "fabric.watching.summary",
    "samples_of": "fabric.watching.progress",
    "summarize": "fabric.watching.summary",
    "validated_schedule": "fabric.watching.profiling",
}

__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
