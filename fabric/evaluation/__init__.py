# SPDX-License-Identifier: Apache-2.0
"""Numbers that are right over all ranks: gathering what was computed, means, accumulation windows, votes."""

from fabric.evaluation.accumulation import Accumulation, MicroBatches
from fabric.evaluation.agreement import Agreement
from fabric.evaluation.gathering import gather_for_metrics
from fabric.evaluation.weighted import weighted_mean

__all__ = ["Accumulation", "Agreement", "MicroBatches", "gather_for_metrics", "weighted_mean"]
