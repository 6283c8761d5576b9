# SPDX-License-Identifier: Apache-2.0
"""Folders to which each rank writes its own part, in the format of `torch.distributed.checkpoint`."""
