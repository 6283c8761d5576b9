# SPDX-License-Identifier: Apache-2.0
"""Numbers that are right over all ranks: gathering what was computed, means, accumulation windows, votes."""

from typing import TYPE_CHECKING

from fabric.evaluation.agreement import Agreement
from fabric.utilities.lazy import importing_on_use

if TYPE_CHECKING:
    from fabric.evaluation.accumulation import Accumulation, MicroBatches
    from fabric.evaluation.gathering import gather_for_metrics
    from fabric.evaluation.weighted import weighted_mean

__all__ = ["Accumulation", "Agreement", "MicroBatches", "gather_for_metrics", "weighted_mean"]

# Resolved on first use: most programs need one of them, or none.
_EXPORTS = {
    "Accumulation": "fabric.evaluation.accumulation",
    "MicroBatches": "fabric.evaluation.accumulation",
    "gather_for_metrics": "fabric.evaluation.gathering",
    "weighted_mean": "fabric.evaluation.weighted",
}

__getattr__ = importing_on_use(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
