# SPDX-License-Identifier: Apache-2.0
"""Entry of ``python -m tokenspeed_kernel.plugins``."""

import sys

from tokenspeed_kernel.plugins.cli import main

sys.exit(main())
