# SPDX-License-Identifier: Apache-2.0
"""Entry of ``python -m tokenspeed_kernel.testing``."""

import io
import sys

from tokenspeed_kernel.testing.cli import main

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # an error message may hold what the terminal cannot show
sys.exit(main())
