# SPDX-License-Identifier: Apache-2.0
"""Seeing a run: progress, profiles, and what a model is made of."""

from fabric.watching.communication import Communication
from fabric.watching.displays import Screen, validate_kind
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
