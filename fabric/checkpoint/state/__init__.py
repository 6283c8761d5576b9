# SPDX-License-Identifier: Apache-2.0
"""What the user's objects hold, under the names and in the shapes in which it is kept."""
