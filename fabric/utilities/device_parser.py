# SPDX-License-Identifier: Apache-2.0
"""What `devices=` may look like, and which devices of a machine it then means."""

from collections.abc import Sequence

# A number of devices (-1: all of them), their indices, or None where nobody said.
DeviceSpec = int | tuple[int, ...] | None

_USAGE = 'Write a number of devices, a list of indices such as `[0, 2]`, "auto", or -1 for all of them.'


def parse_devices(devices: object, *, said: str) -> DeviceSpec:
    """Bring `devices` into one form: a count, -1 for all, a tuple of indices, or None for "auto".

    Args:
        devices: `2`, `"2"`, `"0,2"`, `[0, 2]`, `"auto"`, `-1`, `"-1"` or None.
        said: How the user said it, for the error: `devices=2`.

    Raises:
        TypeError: For anything that is neither a number, a string nor a list of numbers.
        ValueError: For 0, other negative numbers, an empty list, a repeated or negative index, and other strings.
    """
    if devices is None or devices == "auto":
        return None
    if isinstance(devices, str):
        return _parse_text(devices, said=said)
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _validate_count(devices, said=said)
    if isinstance(devices, Sequence) and not isinstance(devices, bytes):
        return _validate_indices(devices, said=said)
    raise TypeError(f"`{said}` is of type `{type(devices).__name__}`. {_USAGE}")


def select_devices(devices: DeviceSpec, *, available: int, kind: str, said: str) -> tuple[int, ...]:
    """The indices that `devices` means where `available` devices of this kind are visible.

    Args:
        devices: The result of `parse_devices`; None and -1 mean all.
        available: How many devices are visible.
        kind: What to call them in the error: `CUDA`.
        said: How the user said it, for the error.

    Raises:
        ValueError: Where there are fewer devices than asked for, or none with an index.
    """
    if isinstance(devices, tuple):
        for index in devices:
            if index >= available:
                raise ValueError(f"`{said}` names index {index}, but {_visible(available, kind)}. {_remedy(available)}")
        return devices
    count = available if devices in (None, -1) else devices
    if count > available:
        wanted = f"{count} device{'s' if count > 1 else ''}"
        raise ValueError(f"`{said}` asks for {wanted}, but {_visible(available, kind)}. {_remedy(available)}")
    return tuple(range(count))


def _parse_text(text: str, *, said: str) -> DeviceSpec:
    parts = [part.strip() for part in text.strip().removesuffix(",").split(",")]
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"`{said}` is neither a number nor a list of indices. {_USAGE}") from None
    if "," in text:
        return _validate_indices(numbers, said=said)
    return _validate_count(numbers[0], said=said)


def _validate_count(count: int, *, said: str) -> int:
    if count == 0:
        raise ValueError(f'`{said}` asks for no device. {_USAGE} To train on the CPU, write `accelerator="cpu"`.')
    if count < -1:
        raise ValueError(f"`{said}` is negative. {_USAGE}")
    return count


def _validate_indices(indices: Sequence[object], *, said: str) -> tuple[int, ...]:
    if not indices:
        raise ValueError(f"`{said}` names no device. {_USAGE}")
    found: list[int] = []
    for index in indices:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"`{said}` contains {index!r}, which is of type `{type(index).__name__}`. {_USAGE}")
        if index < 0:
            raise ValueError(f"`{said}` contains the negative index {index}. {_USAGE}")
        if index in found:
            raise ValueError(f"`{said}` names index {index} twice. Name every device once.")
        found.append(index)
    return tuple(found)


def _visible(available: int, kind: str) -> str:
    if available == 0:
        return f"no {kind} device is visible"
    return f"1 {kind} device is visible" if available == 1 else f"{available} {kind} devices are visible"


def _remedy(available: int) -> str:
    if available == 0:
        return 'Write `accelerator="cpu"` to train on the CPU.'
    if available == 1:
        return "Write `devices=1`, or leave it out."
    return f"Choose at most {available} devices, with indices from 0 to {available - 1}."
