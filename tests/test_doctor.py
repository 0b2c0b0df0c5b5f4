# SPDX-License-Identifier: Apache-2.0
"""``doctor`` on real installations: a sound one, and each thing that can be wrong with one."""

import subprocess

from environments import Environment, Site


def _doctor(environment: Environment) -> subprocess.CompletedProcess[str]:
    done = environment.plugins("doctor")
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_sound_installation(site: Site) -> None:
    """Nothing is wrong with the host and a good plugin."""
    site.plugin("good", "def register():\n    pass\n")
    done = _doctor(site.environment)
    assert (done.returncode, done.stdout) == (0, "Nothing is wrong.\n")


def test_another_distribution_with_our_files(site: Site) -> None:
    """A distribution whose RECORD owns files of the package is named."""
    site.info(None, name="rival")
    site.file("rival-1.0.dist-info/RECORD", "tokenspeed_kernel/ops/gemm.py,,\nrival/__init__.py,,\n")
    done = _doctor(site.environment)
    assert done.returncode == 1
    assert done.stdout.startswith("rival owns files in tokenspeed_kernel/")


def test_a_pin_that_would_replace_the_host(site: Site) -> None:
    """A requirement on the published version is met for loading, but pip would act on it: doctor says so."""
    site.file("pinned.py", "def register():\n    pass\n")
    site.info("pinned = pinned:register", name="pinned", metadata="Requires-Dist: tokenspeed-kernel==0.1.4")
    done = _doctor(site.environment)
    assert done.returncode == 1
    assert "pinned requires tokenspeed-kernel==0.1.4" in done.stdout
    assert "--no-deps pinned" in done.stdout


def test_entry_points_that_stop_torch(site: Site) -> None:
    """A distribution that is none of ours, but whose entry points are not UTF-8, is named with the way out."""
    site.info(b"[console_scripts]\ncaf\xe9 = cafe:main\n", name="cafe")
    done = _doctor(site.environment)
    assert done.returncode == 1
    assert "the entry points of cafe are not UTF-8" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout


def test_a_mixed_installation(site: Site) -> None:
    """Metadata of another version of the package, beside ours, is a mixture."""
    site.info(None, name="tokenspeed-kernel", version="0.1.4")
    done = _doctor(site.environment)
    assert done.returncode == 1
    assert "tokenspeed-kernel 0.1.4 is installed" in done.stdout


def test_a_plugin_that_failed(site: Site) -> None:
    """What discovery found is repeated, with its reason."""
    site.plugin("bad", "raise RuntimeError('boom')\n")
    done = _doctor(site.environment)
    assert done.returncode == 1
    assert "plugin 'bad' of bad-dist is failed: RuntimeError: boom" in done.stdout
