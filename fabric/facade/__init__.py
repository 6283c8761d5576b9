# SPDX-License-Identifier: Apache-2.0
"""The groups of `Fabric`'s methods that only hand on: who am I, placing, talking to the others, watching, keeping."""

from fabric.facade.identity import Identity
from fabric.facade.keep import Keep
from fabric.facade.observe import Observe
from fabric.facade.place import Place
from fabric.facade.talk import Talk

__all__ = ["Identity", "Keep", "Observe", "Place", "Talk"]
