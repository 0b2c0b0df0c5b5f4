# SPDX-License-Identifier: Apache-2.0
"""The kernel of the installed plugin, by every check of the conformance kit."""

import pytest

pytest.importorskip("torch")

from tokenspeed_kernel.testing import examine
from tokenspeed_kernel.testing.installed import record_of

if record_of("sdpa_policy") is None:
    pytest.skip("the plugin runs from its sources: no installed metadata names it", allow_module_level=True)

test_conformance = examine("sdpa_policy")
