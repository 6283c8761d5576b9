# SPDX-License-Identifier: Apache-2.0
"""Double precision throughout."""

import torch

from fabric.plugins.precision.true import TruePrecision


class DoublePrecision(TruePrecision):
    """Parameters, inputs, arithmetic and outputs in float64."""

    precision = "64-true"
    dtype = torch.float64
