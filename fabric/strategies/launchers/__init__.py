# SPDX-License-Identifier: Apache-2.0
"""Starting the ranks of this machine."""

from fabric.strategies.launchers.create import create_launcher
from fabric.strategies.launchers.external import ExternalLauncher
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.multiprocessing import MultiprocessingLauncher
from fabric.strategies.launchers.subprocess import SubprocessLauncher

__all__ = ["ExternalLauncher", "Launcher", "MultiprocessingLauncher", "SubprocessLauncher", "create_launcher"]
