# SPDX-License-Identifier: Apache-2.0
import pytest

from fabric.utilities.imports import require_extra


def test_an_extra_that_is_installed_is_no_error() -> None:
    require_extra("load", extra="anything", requirement="torch>=2.0")


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        (None, "`Feature(x)` needs 'no-such-extra'. Install it with: pip install 'fabric-runtime[no-such-extra]'"),
        ("torch>=99", "`Feature(x)` needs 'torch>=99'. Install it with: pip install 'fabric-runtime[no-such-extra]'"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(requirement: str | None, message: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        require_extra("Feature(x)", extra="no-such-extra", requirement=requirement)
    assert str(error.value) == message
