# SPDX-License-Identifier: Apache-2.0
"""The folder of one run, `root_dir/name/version`, and which number a new version gets."""

import os
import re

from fabric.utilities.cloud_io import local_path, split_url
from fabric.utilities.types import PathLike


class RunFolder:
    """Chooses and makes the folder of a run, on a local disk or at a URL. It exists once `make` was called.

    Args:
        root_dir: Folder or fsspec URL that holds all experiments.
        name: Name of the experiment; with `""` or None the versions lie in `root_dir` itself.
        version: A number `n` (folder `version_n`) or the name of the folder. By default the first number above those
            that exist; where another job takes it before `make`, the next free one is used, unless `version` or `path`
            was read before.

    Raises:
        ValueError: If no file system has the URL's protocol.
        ModuleNotFoundError: If the package of that file system is not installed.
    """

    def __init__(self, root_dir: PathLike, name: str | None, version: int | str | None) -> None:
        self.root_dir = os.fspath(root_dir)
        self.name = name or ""
        self._local_root = local_path(self.root_dir)
        if self._local_root is None:
            split_url(self.root_dir)
        self._free_to_move = version is None
        self._version = self._next_version() if version is None else version

    @property
    def is_local(self) -> bool:
        """Whether it is on a local disk, `file://` URLs included."""
        return self._local_root is not None

    @property
    def version(self) -> int | str:
        """The number, or the name that was given; it stays from now on."""
        self._free_to_move = False
        return self._version

    @property
    def path(self) -> str:
        """Where the folder is, under `root_dir` as it was written; it stays from now on."""
        self._free_to_move = False  # the caller may make this folder
        return self._join(self.root_dir)

    def make(self) -> str:
        """Make a local folder and return its plain path; of a URL, which needs no folders, return that."""
        if self._local_root is None:
            return self.path
        while True:
            try:
                os.makedirs(self._join(self._local_root), exist_ok=not self._free_to_move)
            except FileExistsError:
                if not self._free_to_move:
                    raise
                self._version = self._next_version()  # another job has taken the number that we chose
            else:
                self._free_to_move = False
                return self._join(self._local_root)

    def _join(self, root: str) -> str:
        folder = self._version if isinstance(self._version, str) else f"version_{self._version}"
        separator = os.sep if self.is_local else "/"
        return separator.join(part for part in (root.rstrip("/") or root, self.name, folder) if part)

    def _next_version(self) -> int:
        folders = [os.path.basename(path.rstrip("/\\")) for path in self._list_versions()]
        numbers = [int(match[1]) for folder in folders if (match := re.fullmatch(r"version_(\d+)", folder))]
        return max(numbers, default=-1) + 1

    def _list_versions(self) -> list[str]:
        try:
            if self._local_root is not None:
                return os.listdir(os.path.join(self._local_root, self.name))
            filesystem, path = split_url(f"{self.root_dir.rstrip('/')}/{self.name}")
            return list(filesystem.ls(path, detail=False))
        except FileNotFoundError:
            return []
