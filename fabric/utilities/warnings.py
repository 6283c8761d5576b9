# SPDX-License-Identifier: Apache-2.0
"""Warnings that can be switched off by their class."""

import warnings


class PossibleUserWarning(UserWarning):
    """Something that is probably, but not certainly, a mistake of the user's."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings of the class `PossibleUserWarning` from now on, in this process.

    Args:
        module: Regular expression for the modules whose warnings are ignored; the default is all of them.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     disable_possible_user_warnings()
        ...     warnings.warn("you will not see this", PossibleUserWarning)
    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
