# SPDX-License-Identifier: Apache-2.0
"""What the strategies that split parameters over ranks are made of."""
