# SPDX-License-Identifier: Apache-2.0
"""`fabric convert`: a checkpoint in another layout."""

import argparse
import os
import sys
from typing import Any

from fabric.cli.words import attempt, format_of, return_large_memory, size_of

FORMATS = ("torch", "sharded", "safetensors")
_EPILOG = """\
The formats: `torch`, one file as `torch.save` writes it; `sharded`, a folder of `torch.distributed.checkpoint`;
`safetensors`, weights as Hugging Face writes them, with everything else beside them. By default TARGET's ending says
which. Any of them is read. One tensor is in memory at a time, and nothing in SOURCE is run.

  fabric convert checkpoint.pt model.safetensors
  fabric convert runs/step-100 hub --format safetensors --max-shard-size 2GB
  fabric convert checkpoint.pt folder --format sharded
"""


def add_convert_command(commands: Any) -> argparse.ArgumentParser:
    """Describe `fabric convert` to the parser of `fabric`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Write a checkpoint in another format.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint, of any format")
    parser.add_argument("target", metavar="TARGET", help="the file or folder to write")
    parser.add_argument("--format", choices=FORMATS, help="the format of TARGET")
    add_common_options(parser)
    return parser


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options of whatever writes a checkpoint."""
    parser.add_argument("--max-shard-size", metavar="SIZE", help="the largest file of weights in a folder (5GB)")
    parser.add_argument("--force", action="store_true", help="replace what is at the target")


def convert(options: argparse.Namespace) -> int:
    """Carry out `fabric convert`; returns the exit code."""
    return attempt("convert", lambda: _convert(options))


def _convert(options: argparse.Namespace) -> None:
    layout = options.format or format_of(options.target)
    if layout is None:
        raise ValueError(
            f"which format should `{options.target}` have? Its ending does not say it. Add `--format torch`,"
            " `--format sharded` or `--format safetensors`."
        )
    rewrite(options.source, options.target, layout, options.max_shard_size, force=options.force)


def _exists(target: str) -> bool:
    from fabric.utilities.cloud_io import local_path, split_url  # torch: not for `fabric --help`

    if local_path(target) is not None:
        return os.path.lexists(target)
    filesystem, inner = split_url(target)
    return bool(filesystem.exists(inner))


def rewrite(source: str, target: str, layout: Any, max_shard_size: str | None, *, force: bool) -> None:
    """Write what is at `source` to `target`, and say what that was."""
    if os.path.lexists(target) and os.path.realpath(target) == os.path.realpath(source):
        raise ValueError(f"`{target}` is the source. Name another target.")
    if not force and _exists(target):
        raise ValueError(f"`{target}` is there already. Name another target, or add `--force` to replace it.")
    if max_shard_size is not None and layout != "safetensors":
        raise ValueError(f"`--max-shard-size {max_shard_size}` is for `--format safetensors`. Leave it out.")

    from fabric.checkpoint.anything import open_later, tensors_in, write  # torch: not for `fabric --help`
    from fabric.checkpoint.state.later import Later
    from fabric.strategies import SingleDeviceStrategy

    return_large_memory()
    content = open_later(source).content
    try:
        write(content, target, layout, SingleDeviceStrategy(), max_shard_size)
    except ValueError as error:
        raise ValueError(f"`{source}` can't be written as {layout}: {str(error).rstrip('.')}.") from error
    tensors = [value for _, value in tensors_in(content) if isinstance(value, Later)]
    total = size_of(sum({(value.key, value.shape): value.nbytes for value in tensors}.values()))
    sys.stdout.write(f"{target}: {len(tensors)} tensors, {total} ({layout})\n")
