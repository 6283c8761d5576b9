# SPDX-License-Identifier: Apache-2.0
import warnings

import pytest

from fabric.utilities.exceptions import MisconfigurationException
from fabric.utilities.warnings import PossibleUserWarning, disable_possible_user_warnings


def test_possible_user_warnings_can_be_switched_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_possible_user_warnings()
        warnings.warn("perhaps a mistake", PossibleUserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match=r"^certainly one$"):
            warnings.warn("certainly one", UserWarning, stacklevel=1)


def test_a_misconfiguration_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"^no$"):
        raise MisconfigurationException("no")
