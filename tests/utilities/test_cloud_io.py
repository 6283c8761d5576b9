# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fabric.utilities.cloud_io import get_filesystem, local_path, split_url


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    assert type(get_filesystem(tmp_path)).__name__ == "LocalFileSystem"
    assert type(get_filesystem("file:///tmp/x")).__name__ == "LocalFileSystem"
    assert type(get_filesystem("memory://x/y")).__name__ == "MemoryFileSystem"
    assert split_url("memory://x/y")[1] == "/x/y"


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("runs/a.pt", "runs/a.pt"),
        (Path("/tmp/a.pt"), "/tmp/a.pt"),
        ("file:///tmp/a.pt", "/tmp/a.pt"),
        ("local://runs/a.pt", "runs/a.pt"),
        ("C:\\runs\\a.pt", "C:\\runs\\a.pt"),
        ("a:b/c.pt", "a:b/c.pt"),
        ("memory://a.pt", None),
        ("s3://bucket/a.pt", None),
        ("simplecache::s3://bucket/a.pt", None),
    ],
)
def test_local_paths(path: str, local: str | None) -> None:
    assert local_path(path) == local


def test_an_unknown_protocol_says_so() -> None:
    with pytest.raises(
        ValueError,
        match=r"^`fancy://x` has a protocol that fsspec does not know \(Protocol not known: fancy\)\."
        r" Write a local path, or a URL of a file system whose package is installed\.$",
    ):
        get_filesystem("fancy://x")


def test_a_missing_package_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^`dropbox://x` needs a package of its file system: .*dropbox.*"):
        get_filesystem("dropbox://x")
