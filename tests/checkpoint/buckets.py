# SPDX-License-Identifier: Apache-2.0
"""An S3 of our own, for tests of checkpoints behind URLs."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

KEYS = {"key": "tests", "secret": "tests"}


@contextmanager
def running_s3() -> Iterator[str]:
    """Its address, while it runs in a thread of this process. It keeps everything in memory."""
    from moto.server import ThreadedMotoServer

    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.ERROR)  # it would print each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        log.setLevel(level)


@contextmanager
def using_s3(address: str, **options: Any) -> Iterator[Any]:
    """The file system; inside, `s3://` is at this address, for this process."""
    import fsspec
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        settings = {"endpoint_url": address, **KEYS, **options}
        patch.setitem(fsspec.config.conf, "s3", settings)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield s3fs.S3FileSystem()
        finally:
            s3fs.S3FileSystem.clear_instance_cache()


def uploads(files: Any, bucket: str) -> list[str]:
    """What has begun to be uploaded and is not complete."""
    return [upload["Key"] for upload in files.list_multipart_uploads(bucket)]


def in_bucket(files: Any, path: str) -> list[str]:
    """The names of all objects below a path, without it."""
    files.invalidate_cache()
    return sorted(os.path.relpath(name, path) for name in files.find(path))
