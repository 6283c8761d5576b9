# SPDX-License-Identifier: Apache-2.0
"""Single files, written and read one tensor at a time."""
