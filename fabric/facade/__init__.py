# SPDX-License-Identifier: Apache-2.0
"""The groups of `Fabric`'s methods that only hand on: who am I, placing, talking to the other ranks, watching."""

from fabric.facade.identity import Identity
from fabric.facade.observe import Observe
from fabric.facade.place import Place
from fabric.facade.talk import Talk

__all__ = ["Identity", "Observe", "Place", "Talk"]
