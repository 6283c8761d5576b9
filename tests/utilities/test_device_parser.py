# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import pytest

from fabric.utilities.device_parser import DeviceSpec, parse_devices, select_devices

USAGE = 'Write a number of devices, a list of indices such as `[0, 2]`, "auto", or -1 for all of them.'


@pytest.mark.parametrize(
    ("devices", "spec"),
    [
        (None, None),
        ("auto", None),
        (2, 2),
        ("2", 2),
        (" 2 ", 2),
        (-1, -1),
        ("-1", -1),
        ([0, 2], (0, 2)),
        ((2, 0), (2, 0)),
        (range(2), (0, 1)),
        ("0,2", (0, 2)),
        ("0, 2", (0, 2)),
        ("3,", (3,)),
        ([3], (3,)),
    ],
)
def test_forms(devices: Any, spec: DeviceSpec) -> None:
    assert parse_devices(devices, said="devices") == spec


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (True, TypeError, f"`devices=True` is of type `bool`. {USAGE}"),
        (2.0, TypeError, f"`devices=2.0` is of type `float`. {USAGE}"),
        ({0}, TypeError, f"`devices={{0}}` is of type `set`. {USAGE}"),
        (b"2", TypeError, f"`devices=b'2'` is of type `bytes`. {USAGE}"),
        (0, ValueError, f'`devices=0` asks for no device. {USAGE} To train on the CPU, write `accelerator="cpu"`.'),
        (
            "0",
            ValueError,
            f"`devices='0'` asks for no device. {USAGE} To train on the CPU, write `accelerator=\"cpu\"`.",
        ),
        (-2, ValueError, f"`devices=-2` is negative. {USAGE}"),
        ("-2", ValueError, f"`devices='-2'` is negative. {USAGE}"),
        ("two", ValueError, f"`devices='two'` is neither a number nor a list of indices. {USAGE}"),
        ("", ValueError, f"`devices=''` is neither a number nor a list of indices. {USAGE}"),
        ("0,,1", ValueError, f"`devices='0,,1'` is neither a number nor a list of indices. {USAGE}"),
        ("0;1", ValueError, f"`devices='0;1'` is neither a number nor a list of indices. {USAGE}"),
        ([], ValueError, f"`devices=[]` names no device. {USAGE}"),
        ([0, 0], ValueError, "`devices=[0, 0]` names index 0 twice. Name every device once."),
        ("1,1", ValueError, "`devices='1,1'` names index 1 twice. Name every device once."),
        ([-1], ValueError, f"`devices=[-1]` contains the negative index -1. {USAGE}"),
        ("0,-1", ValueError, f"`devices='0,-1'` contains the negative index -1. {USAGE}"),
        (["0"], TypeError, f"`devices=['0']` contains '0', which is of type `str`. {USAGE}"),
        ([0, True], TypeError, f"`devices=[0, True]` contains True, which is of type `bool`. {USAGE}"),
        ([0.0], TypeError, f"`devices=[0.0]` contains 0.0, which is of type `float`. {USAGE}"),
    ],
)
def test_refused(devices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        parse_devices(devices, said=f"devices={devices!r}")


@pytest.mark.parametrize(
    ("spec", "available", "indices"),
    [
        (None, 3, (0, 1, 2)),
        (-1, 3, (0, 1, 2)),
        (2, 3, (0, 1)),
        (3, 3, (0, 1, 2)),
        ((2, 0), 3, (2, 0)),
        (None, 0, ()),
    ],
)
def test_select(spec: DeviceSpec, available: int, indices: tuple[int, ...]) -> None:
    assert select_devices(spec, available=available, kind="CUDA", said="devices") == indices


@pytest.mark.parametrize(
    ("spec", "available", "message"),
    [
        (
            4,
            2,
            "`devices=4` asks for 4 devices, but 2 CUDA devices are visible."
            " Choose at most 2 devices, with indices from 0 to 1.",
        ),
        (2, 1, "`devices=2` asks for 2 devices, but 1 CUDA device is visible. Write `devices=1`, or leave it out."),
        (
            1,
            0,
            "`devices=1` asks for 1 device, but no CUDA device is visible."
            ' Write `accelerator="cpu"` to train on the CPU.',
        ),
        (
            (0, 5),
            4,
            "`devices=(0, 5)` names index 5, but 4 CUDA devices are visible."
            " Choose at most 4 devices, with indices from 0 to 3.",
        ),
        ((1,), 1, "`devices=(1,)` names index 1, but 1 CUDA device is visible. Write `devices=1`, or leave it out."),
    ],
)
def test_too_many(spec: DeviceSpec, available: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        select_devices(spec, available=available, kind="CUDA", said=f"devices={spec!r}")
