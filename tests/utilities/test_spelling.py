# SPDX-License-Identifier: Apache-2.0
import pytest

from fabric.utilities.spelling import suggest


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("cdua", "Did you mean 'cuda'? Choose one of 'cpu', 'cuda'."),
        ("CUDA", "Did you mean 'cuda'? Choose one of 'cpu', 'cuda'."),
        ("nothing like it", "Choose one of 'cpu', 'cuda'."),
    ],
)
def test_suggest(name: str, end: str) -> None:
    assert suggest(name, ["cpu", "cuda"]) == end
