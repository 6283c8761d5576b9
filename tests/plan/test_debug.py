# SPDX-License-Identifier: Apache-2.0
import pytest

from fabric.plan.plan import DebugOptions
from tests.plan.cases import plan, refused


@pytest.mark.parametrize("written", [None, "", "0", "false", "False", " "])
def test_off(written: str | None) -> None:
    found = plan({} if written is None else {"FABRIC_DEBUG": written})
    assert found.debug.value is None
    assert "debug" not in found.explain()


@pytest.mark.parametrize("written", ["1", "true", "TRUE"])
def test_on(written: str) -> None:
    found = plan({"FABRIC_DEBUG": written})
    assert found.debug.value == DebugOptions(timeout=60, every=100)
    row = found.explain().splitlines()[-1].split("  ")
    assert row[0] == "debug"
    assert row[-1] == f"FABRIC_DEBUG={written}"


def test_its_numbers() -> None:
    found = plan({"FABRIC_DEBUG": "1", "FABRIC_DEBUG_TIMEOUT": "2.5", "FABRIC_DEBUG_EVERY": "7"})
    assert found.debug.value == DebugOptions(timeout=2.5, every=7)
    assert str(found.debug) == "timeout 2.5 s, replicas every 7 steps"


def test_no_switch() -> None:
    text = "`FABRIC_DEBUG=yes` is not a switch. Write `FABRIC_DEBUG=1` or `FABRIC_DEBUG=0`."
    refused(ValueError, text, {"FABRIC_DEBUG": "yes"})


@pytest.mark.parametrize("written", ["soon", "0", "-1", "inf", "nan"])
@pytest.mark.parametrize("on", ["1", "0"])
def test_no_timeout(written: str, on: str) -> None:
    text = f"`FABRIC_DEBUG_TIMEOUT={written}` is not a number of seconds above 0, such as `FABRIC_DEBUG_TIMEOUT=300`."
    refused(ValueError, text, {"FABRIC_DEBUG": on, "FABRIC_DEBUG_TIMEOUT": written})


@pytest.mark.parametrize("written", ["often", "0", "-1", "1.5"])
def test_no_number_of_steps(written: str) -> None:
    text = f"`FABRIC_DEBUG_EVERY={written}` is not a number of steps of at least 1, such as `FABRIC_DEBUG_EVERY=10`."
    refused(ValueError, text, {"FABRIC_DEBUG": "1", "FABRIC_DEBUG_EVERY": written})
