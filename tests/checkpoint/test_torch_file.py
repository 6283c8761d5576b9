# SPDX-License-Identifier: Apache-2.0
"""Files of `torch.save` written and read tensor by tensor: PyTorch and Python's own `zipfile` must agree."""

import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fabric.checkpoint.files.torch_file import read_torch_file, write_torch_file
from fabric.checkpoint.state.later import Later, replaced


def content() -> dict[str, Any]:
    a = torch.arange(12.0).reshape(4, 3)
    return {
        "a": a,
        "tied": a,
        "transposed": a.t(),
        "row": a[1],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "others": [
            torch.arange(3).to(dtype) for dtype in (torch.uint16, torch.bfloat16, torch.bool, torch.float8_e5m2)
        ],
        "conjugate": torch.complex(torch.arange(2.0), torch.ones(2)).conj(),
        "parameter": torch.nn.Parameter(a + 1),
        "plain": OrderedDict(step=1, text="x", size=torch.Size([1, 2]), dtype=torch.float16, none=None, t=(1, [2])),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and (a.float() if a.itemsize == 1 else a).equal(b.float() if a.itemsize == 1 else b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("mmap", [False, True])
def test_pytorch_reads_what_was_written(mmap: bool, tmp_path: Path) -> None:
    write_torch_file(content(), tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
    assert equal(found, content() | {"parameter": content()["parameter"].data})
    assert found["a"].data_ptr() == found["tied"].data_ptr()
    assert found["a"].data_ptr() % 64 == found["parameter"].data_ptr() % 64 == 0
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None


def test_it_is_as_large_as_pytorchs_own(tmp_path: Path) -> None:
    state = {str(n): torch.randn(100, 100) for n in range(20)}
    torch.save(state, tmp_path / "a.pt")
    write_torch_file(state, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size <= (tmp_path / "a.pt").stat().st_size * 1.01


@pytest.mark.parametrize("where", ["", "memory://torch-file/"])
@pytest.mark.parametrize("ours", [False, True])
def test_tensors_are_read_when_they_are_wanted(ours: bool, where: str, tmp_path: Path) -> None:
    """Would also notice a PyTorch that does not tell any more where in a file a tensor is."""
    expected = content()
    path = where + "a.pt" if where else str(tmp_path / "a.pt")
    if ours or where:
        write_torch_file(expected, path)
    else:
        torch.save(expected, path)
    found = read_torch_file(path)
    assert isinstance(found["a"], Later)
    values = replaced(found, lambda tensor: tensor.read())
    assert equal(values, expected | {"parameter": expected["parameter"].data})
    assert torch.equal(values["conjugate"], expected["conjugate"])
    write_torch_file(found, tmp_path / "b.pt")
    assert equal(torch.load(tmp_path / "b.pt"), values)


def test_each_tensor_is_asked_for_once_in_its_turn(tmp_path: Path) -> None:
    asked: list[str] = []

    def stand_in(name: str) -> Later:
        return Later(torch.Size([2]), torch.float32, lambda: (asked.append(name), torch.ones(2))[1])

    first = stand_in("first")
    write_torch_file({"x": first, "y": [stand_in("second")], "again": first}, tmp_path / "a.pt")
    assert asked == ["first", "second"]


def test_a_file_of_before_pytorch_1_6_is_read_whole(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_torch_file(tmp_path / "a.pt")["a"], torch.ones(2))


def test_a_file_that_lost_its_end(tmp_path: Path) -> None:
    write_torch_file({"a": torch.ones(1000)}, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match=re.escape(f"`{tmp_path / 'a.pt'}` can't be read as a checkpoint.")):
        read_torch_file(tmp_path / "a.pt")
