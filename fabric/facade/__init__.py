# SPDX-License-Identifier: Apache-2.0
"""The groups of `Fabric`'s methods that only hand on: who am I, talking to the other ranks, watching the run."""

from fabric.facade.identity import Identity
from fabric.facade.observe import Observe
from fabric.facade.talk import Talk

__all__ = ["Identity", "Observe", "Talk"]
