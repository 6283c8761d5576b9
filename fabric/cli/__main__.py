# SPDX-License-Identifier: Apache-2.0
"""`python -m fabric.cli` is the `fabric` command."""

import sys

from fabric.cli.main import main

sys.exit(main())
