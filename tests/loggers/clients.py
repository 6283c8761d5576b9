# SPDX-License-Identifier: Apache-2.0
"""A program that logs through a real client library, in a process of its own: clients leave threads and hooks."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.imports import RequirementCache

from tests.processes.jobs import python, script

# A run that says that it failed, and one that goes on with it until the program just ends.
PROGRAM = """
import atexit
import json
from pathlib import Path

{read}

said = {{}}


def say():  # Of Python's exit handlers the first comes last: so this one is after the loggers' and the client's.
    said["after"] = read()
    Path("said").write_text(json.dumps(said))


from fabric.utilities.rank_zero import global_rank

if global_rank() == 0:
    atexit.register(say)

from fabric import Fabric
from fabric.loggers import {logger}

logger = {logger}({arguments})
fabric = Fabric(accelerator="cpu", devices={devices}, loggers=logger)
fabric.launch()
fabric.logger.log_hyperparams({{"optimizer": {{"lr": 0.5}}, "rank": fabric.global_rank}})
fabric.log("loss", 0.5 + fabric.global_rank, step=3)
fabric.log("loss", 0.25 + fabric.global_rank, step=4)
said["kinds"] = fabric.strategy.gather_objects(type(logger.experiment).__name__)
said["named"] = [logger.name, logger.version]
logger.finalize("failed")
logger.finalize("failed")
said["before"] = None if {apart} or fabric.global_rank else read()
fabric.barrier()
{logger}({arguments}, version=logger.version, prefix="more"{again}).log_metrics({{"loss": 0.125}}, step=5)
"""

# A reader of LevelDB logs, which several clients keep their runs in: records in blocks of 32 KiB, behind a header of 7
# bytes. To be put before a client's `read`.
LEVELDB = """
def records(path, parse):
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parse(parts)
            parts = b""
"""


@dataclass(frozen=True)
class Said:
    """What the program says.

    Attributes:
        kinds: The class of each rank's experiment.
        named: The logger's name and version, once the run has started.
        before: What the client had written when the run had failed; None for a client that writes `apart`.
        after: What it had written in the end.
    """

    kinds: list[str]
    named: list[Any]
    before: Any
    after: Any


@dataclass(frozen=True)
class Client:
    """A logger, how it is made for working offline in its folder, and how to read what it wrote.

    Args:
        logger: Name of the class.
        package: The requirement that it has.
        arguments: Of the constructor, as source text.
        read: Source text of a function `read()` that returns what the client has written, for JSON.
        environ: Variables of the client.
        devices: Number of ranks.
        apart: Whether it writes what comes after going on apart from what was before, and may do so in the background
            until the program ends.
        again: Further arguments for going on with the run.
    """

    logger: str
    package: str
    arguments: str
    read: str
    environ: dict[str, str] = field(default_factory=dict)
    devices: int = 1
    apart: bool = False
    again: str = ""

    def skip_unless_installed(self) -> None:
        """Skip the test module where the client is not there. It is not imported: that would leave its traces here."""
        if not RequirementCache(self.package):
            pytest.skip(f"needs {self.package}", allow_module_level=True)

    def run(self, folder: Path) -> Said:
        """Run the program in a folder."""
        text = PROGRAM.format(
            logger=self.logger,
            arguments=self.arguments,
            again=f", {self.again}" if self.again else "",
            read=self.read.strip(),
            devices=self.devices,
            apart=self.apart,
        )
        # The user's own settings and logins have no part in it.
        environ = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), **self.environ}
        job = python(script(folder, text), folder=folder, environ=environ)
        job.until(lambda: job.process.poll() is not None, "the program to end")
        assert job.wait() == 0, job.stderr
        return Said(**json.loads((folder / "said").read_text()))
