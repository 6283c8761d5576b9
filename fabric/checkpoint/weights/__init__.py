# SPDX-License-Identifier: Apache-2.0
"""Weights as Hugging Face writes them, one file or several and an index."""
