# SPDX-License-Identifier: Apache-2.0
"""What Fabric costs, beside raw PyTorch, Lightning Fabric and Accelerate: `python -m benchmarks`."""
