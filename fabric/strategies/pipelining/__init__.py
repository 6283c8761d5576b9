# SPDX-License-Identifier: Apache-2.0
"""What the pipeline strategy is made of."""
