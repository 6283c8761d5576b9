# SPDX-License-Identifier: Apache-2.0
"""`fabric consolidate`: one file from a folder to which each rank wrote its part."""

import argparse
import os
from typing import Any

from fabric.cli.convert import add_common_options, rewrite
from fabric.cli.words import attempt, format_of

_EPILOG = """\
The file is what `fabric.save` writes under a strategy that does not shard: `torch.load` reads it, and so does
`fabric.load`, under any strategy. One tensor is in memory at a time, and nothing in DIR is run.

  fabric consolidate runs/step-100
  fabric consolidate runs/step-100 --output model.safetensors
  fabric consolidate runs/step-100 --format safetensors --output hub
"""


def add_consolidate_command(commands: Any) -> argparse.ArgumentParser:
    """Describe `fabric consolidate` to the parser of `fabric`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "consolidate",
        help="make one file of a sharded checkpoint",
        description="Make one file of a checkpoint that several ranks wrote as a folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder")
    parser.add_argument("--output", metavar="FILE", help="where to (DIR.pt or DIR.safetensors)")
    parser.add_argument("--format", choices=("torch", "safetensors"), help="what to write (torch)")
    add_common_options(parser)
    return parser


def consolidate(options: argparse.Namespace) -> int:
    """Carry out `fabric consolidate`; returns the exit code."""
    return attempt("consolidate", lambda: _consolidate(options))


def _consolidate(options: argparse.Namespace) -> None:
    folder = options.folder.rstrip("/")
    if os.path.isfile(folder):
        raise ValueError(f"`{folder}` is one file already. To write it in another format, type `fabric convert`.")
    layout = options.format or format_of(options.output or "") or "torch"
    output = options.output or f"{folder}.{'safetensors' if layout == 'safetensors' else 'pt'}"
    rewrite(folder, output, layout, options.max_shard_size, force=options.force)
