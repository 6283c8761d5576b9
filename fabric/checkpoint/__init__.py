# SPDX-License-Identifier: Apache-2.0
"""Saving and loading: from the user's objects to one file and back, with every rank of one mind."""

from fabric.checkpoint.access import Attempts, StateAccess
from fabric.checkpoint.load import load, load_raw
from fabric.checkpoint.save import save
from fabric.checkpoint.tree import is_stateful

__all__ = ["Attempts", "StateAccess", "is_stateful", "load", "load_raw", "save"]
