# SPDX-License-Identifier: Apache-2.0
"""From what a checkpoint holds back into the user's objects, once all of it was compared."""
