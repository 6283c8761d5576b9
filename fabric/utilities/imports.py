# SPDX-License-Identifier: Apache-2.0
"""Optional dependencies: asked for where a feature is used, never at import."""


def is_installed(requirement: str) -> bool:
    """Whether a package is there, in the version that the requirement asks for, if it asks for one.

    Example:
        >>> is_installed("torch>=2"), is_installed("torch>=200")
        (True, False)
    """
    from lightning_utilities.core.imports import RequirementCache  # compiles a grammar, which most programs never need

    return bool(RequirementCache(requirement))


def require_extra(feature: str, *, extra: str, requirement: str | None = None) -> None:
    """Raise unless the optional dependency of a feature is installed. Call it where the user asks for the feature.

    Args:
        feature: What the user wrote, such as `TensorBoardLogger`.
        extra: The extra of `fabric-runtime` that brings the dependency.
        requirement: The requirement to look for, with a version if one is needed; by default the name of the extra.

    Raises:
        ModuleNotFoundError: If the requirement is not met; the message names the command that installs it.

    Example:
        >>> require_extra("load", extra="checkpoint", requirement="fsspec")
    """
    needed = requirement or extra
    if not is_installed(needed):
        raise ModuleNotFoundError(
            f"`{feature}` needs '{needed}'. Install it with: pip install 'fabric-runtime[{extra}]'"
        )
