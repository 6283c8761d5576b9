# SPDX-License-Identifier: Apache-2.0
"""Exceptions that programs catch by name."""


class MisconfigurationException(ValueError):  # noqa: N818 - the name that programs catch
    """What the user asked for cannot work. A `ValueError`, so that `except ValueError` catches it too."""
