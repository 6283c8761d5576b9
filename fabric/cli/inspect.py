# SPDX-License-Identifier: Apache-2.0
"""`fabric inspect`: what a checkpoint holds, without reading its tensors."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from fabric.cli.words import attempt, size_of

_EPILOG = """\
PATH is a file of `torch.save`, a folder of `fabric.save` or `torch.distributed.checkpoint`, or weights as Hugging Face
writes them. Nothing in it is run, and no tensor is read.

  fabric inspect checkpoint.pt
  fabric inspect runs/step-100
  fabric inspect s3://bucket/model.safetensors
"""
_LONGEST_VALUE = 60


def add_inspect_command(commands: Any) -> argparse.ArgumentParser:
    """Describe `fabric inspect` to the parser of `fabric`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds: tensors, shapes, dtypes, sizes, values",
        description="Show what a checkpoint of any layout holds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="a file, a folder, or a URL that fsspec knows")
    return parser


def inspect(options: argparse.Namespace) -> int:
    """Carry out `fabric inspect`; returns the exit code."""
    return attempt("inspect", lambda: _show(options.path))


def _show(path: str) -> None:
    from fabric.checkpoint.anything import open_later, tensors_in  # torch: not for `fabric --help`
    from fabric.checkpoint.state.later import Later

    opened = open_later(path)
    leaves = [(".".join(map(str, keys)), value) for keys, value in tensors_in(opened.content)]
    tensors = {name: value for name, value in leaves if isinstance(value, Later)}
    distinct = {(value.key, value.shape): value.nbytes for value in tensors.values()}
    total = size_of(sum(distinct.values()))
    lines = [f"{path}: {opened.description}, {len(tensors)} tensors, {total}"]
    values = [(name, _shortened(value)) for name, value in leaves if not isinstance(value, Later)]
    if values:
        lines += ["", *_table([("value", ""), *values])]
    rows = [(name, _shape(value), _dtype(value), size_of(value.nbytes)) for name, value in tensors.items()]
    if rows:
        lines += ["", *_table([("tensor", "shape", "dtype", "size"), *rows])]
    sys.stdout.write("\n".join(lines) + "\n")


def _shape(value: Any) -> str:
    return " x ".join(map(str, value.shape)) or "scalar"


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _shortened(value: Any) -> str:
    text = repr(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    if isinstance(value, list | tuple | dict | set):
        return f"{type(value).__name__} of {len(value)}"
    return f"{text[: _LONGEST_VALUE - 3]}..."


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
