# SPDX-License-Identifier: Apache-2.0
"""The `fabric` command and its subcommands."""

import argparse
import sys
from collections.abc import Sequence

import fabric
from fabric.cli.consolidate import add_consolidate_command, consolidate
from fabric.cli.convert import add_convert_command, convert
from fabric.cli.inspect import add_inspect_command, inspect
from fabric.cli.run import add_run_command, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The words after `fabric`; by default those of the command line.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="fabric",
        description="Fabric scales a plain PyTorch loop without hiding it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fabric {fabric.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_parser = add_run_command(commands)
    add_inspect_command(commands).set_defaults(carry_out=inspect)
    add_consolidate_command(commands).set_defaults(carry_out=consolidate)
    add_convert_command(commands).set_defaults(carry_out=convert)
    if words[:1] == ["run"]:
        return run(run_parser, words[1:])
    options = parser.parse_args(words)
    code: int = options.carry_out(options)
    return code
