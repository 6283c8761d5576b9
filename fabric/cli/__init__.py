# SPDX-License-Identifier: Apache-2.0
"""The `fabric` command. Nothing here imports torch."""

from fabric.cli.main import main

__all__ = ["main"]
