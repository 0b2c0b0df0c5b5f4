# SPDX-License-Identifier: Apache-2.0
"""Entry of ``python -m tokenspeed_kernel.plugins``."""

import io
import sys

from tokenspeed_kernel.plugins.cli import main

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # a plugin may have a name that the terminal cannot show
sys.exit(main())
