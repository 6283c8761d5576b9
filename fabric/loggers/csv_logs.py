# SPDX-License-Identifier: Apache-2.0
"""Metrics as rows of a CSV file."""

import csv
import io
import json
import os
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from fabric.loggers.ending import Ending
from fabric.loggers.growing_file import GrowingFile, LocalFile, RemoteFile
from fabric.loggers.logger import Logger
from fabric.loggers.run_folder import RunFolder
from fabric.loggers.values import as_dict, as_numbers
from fabric.utilities.rank_zero import rank_zero_only
from fabric.utilities.types import PathLike


class CSVLogger(Logger):
    """Writes each call of `log_metrics` as one row of `root_dir/name/version/metrics.csv`, on global rank 0.

    On a local disk a row is in the file when `log_metrics` returns, so it is there however the run ends. At a URL
    (`s3://...`, anything fsspec knows) rows go out in steps, and at `save`, `finalize` and the end of the process.
    A column may appear at any time; earlier rows are kept and stay empty there. A version that exists is continued.

    Args:
        root_dir: Folder or fsspec URL that holds all experiments.
        name: Name of the experiment; with `""` or None the versions lie in `root_dir` itself.
        version: A number `n` (folder `version_n`) or the name of the folder. By default the first number above those
            that exist. It is chosen here, so that all ranks agree where the logger is made before `launch()`. Where
            another job takes the same number before the first row is written, the next free one is used, unless
            `version` or `log_dir` was read before.
        prefix: Put before the name of each metric, with a `-` between.
        flush_logs_every_n_steps: At a URL: write out at the latest after so many rows.

    Raises:
        ValueError: If `flush_logs_every_n_steps` is below 1, or a metric is not one number.

    Example::

        fabric = Fabric(loggers=CSVLogger("runs", name="gpt"))
        fabric.log("loss", loss, step=step)
    """

    def __init__(
        self,
        root_dir: PathLike,
        name: str | None = "fabric_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ValueError(f"`CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps})` must be at least 1.")
        self._folder = RunFolder(root_dir, name, version)
        self._prefix = prefix
        self._every_n = flush_logs_every_n_steps
        self._table: _Table | None = None

    @property
    @override
    def name(self) -> str:
        return self._folder.name

    @property
    @override
    def version(self) -> int | str:
        return self._folder.version

    @property
    @override
    def root_dir(self) -> str:
        return self._folder.root_dir

    @property
    @override
    def log_dir(self) -> str:
        """The folder of this run. It exists once something was written."""
        return self._folder.path

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        row = as_numbers(metrics, self._prefix)
        if self._table is None:
            self._table = _Table(self._open("metrics.csv"))
        self._table.add(row, step)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Merge them into `hparams.json` beside the metrics; what JSON has no form for is written as its `str`."""
        file = self._open("hparams.json")
        merged = {**json.loads(file.read() or "{}"), **as_dict(params)}
        file.replace(json.dumps(merged, indent=2, default=str) + "\n")

    @override
    @rank_zero_only
    def save(self) -> None:
        if self._table is not None:
            self._table.file.flush()

    def __getstate__(self) -> dict[str, Any]:
        self.save()
        return {**self.__dict__, "_table": None}

    def _open(self, filename: str) -> GrowingFile:
        folder = self._folder.make()
        if self._folder.is_local:
            return LocalFile(os.path.join(folder, filename))
        file = RemoteFile(f"{folder}/{filename}", every_n=self._every_n)
        Ending(self, lambda status: file.flush())
        return file


class _Table:
    """Rows under a header in a file. The first column is the step."""

    def __init__(self, file: GrowingFile) -> None:
        self.file = file
        text = file.read()
        if text and not text.endswith("\n"):
            file.append("\n")
        rows = _read_rows(text)
        self._columns = rows[0] if rows else []
        self._length = max(len(rows) - 1, 0)

    def add(self, row: dict[str, Any], step: int | None) -> None:
        if step is not None or "step" not in row:
            row = {**row, "step": self._length if step is None else step}
        new = [name for name in ("step", *row) if name not in self._columns]
        if new:
            self._add_columns(list(dict.fromkeys(new)))
        self.file.append(_format_rows([[row.get(name, "") for name in self._columns]]))
        self._length += 1

    def _add_columns(self, new: list[str]) -> None:
        rows = _read_rows(self.file.read())[1:]
        self._columns = [*self._columns, *new]
        padded = [row + [""] * (len(self._columns) - len(row)) for row in rows]
        self.file.replace(_format_rows([self._columns, *padded]))


def _read_rows(text: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline="")) if row]


def _format_rows(rows: list[list[Any]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
