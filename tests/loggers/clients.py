# SPDX-License-Identifier: Apache-2.0
"""Programs that log through a real client library, each in processes of its own: clients leave threads and hooks."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.imports import RequirementCache

from tests.processes.jobs import python, script

# Two ranks log, and the program just ends.
JOB = """
import json
from pathlib import Path
from fabric import Fabric
from fabric.loggers import {logger}

logger = {logger}({arguments})
fabric = Fabric(accelerator="cpu", devices=2, loggers=logger)
fabric.launch()
fabric.logger.log_hyperparams({{"optimizer": {{"lr": 0.5}}, "rank": fabric.global_rank}})
fabric.log("loss", 0.5 + fabric.global_rank, step=3)
fabric.log("loss", 0.25 + fabric.global_rank, step=4)
if fabric.global_rank == 1:
    logger.experiment.anything("goes")
kind = type(logger.experiment).__name__
Path(f"said-{{fabric.global_rank}}").write_text(json.dumps([kind, logger.name, logger.version]))
fabric.barrier()
"""

# Another program looks at the run, goes on with it, fails, and looks again.
AGAIN = """
{read}

import json
from fabric.loggers import {logger}

before = read()
logger = {logger}({arguments}, version={version!r}, prefix="more")
logger.log_metrics({{"loss": 0.125}}, step=5)
logger.finalize("failed")
logger.finalize("failed")
with open("found", "w") as file:
    json.dump([before, read()], file)
"""

# A reader of LevelDB logs, which several clients keep their runs in: records in blocks of 32 KiB, behind a header of 7
# bytes. To be put before a client's `read`.
LEVELDB = """
from pathlib import Path

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


@dataclass
class Client:
    """A logger, how it is made for working offline in its folder, and how to read what it wrote.

    Args:
        logger: Name of the class.
        package: The requirement that it has.
        arguments: Of the constructor, as source text.
        environ: Variables of the client.
    """

    logger: str
    package: str
    arguments: str
    environ: dict[str, str] = field(default_factory=dict)

    def skip_unless_installed(self) -> None:
        """Skip the test module where the client is not there. It is not imported: that would leave its traces here."""
        if not RequirementCache(self.package):
            pytest.skip(f"needs {self.package}", allow_module_level=True)

    def log_on_two_ranks(self, folder: Path) -> tuple[list[Any], list[Any]]:
        """What each rank says of its experiment: the class, the name and the version."""
        self._run(folder, JOB.format(logger=self.logger, arguments=self.arguments))
        zero, one = (json.loads((folder / f"said-{rank}").read_text()) for rank in range(2))
        return zero, one

    def continue_and_fail(self, folder: Path, version: str, read: str) -> Any:
        """Another program logs to the same run and says that it failed.

        Args:
            folder: The same as before.
            version: The run.
            read: Source text of a function `read()` that returns what the client wrote.

        Returns:
            What it returned before and after that.
        """
        text = AGAIN.format(logger=self.logger, arguments=self.arguments, version=version, read=read)
        self._run(folder, text)
        return json.loads((folder / "found").read_text())

    def _run(self, folder: Path, text: str) -> None:
        # The user's own settings and logins have no part in it.
        environ = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), **self.environ}
        job = python(script(folder, text), folder=folder, environ=environ)
        job.until(lambda: job.process.poll() is not None, "the program to end")
        assert job.wait() == 0, job.stderr
