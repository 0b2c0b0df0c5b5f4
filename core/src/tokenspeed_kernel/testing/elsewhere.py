# SPDX-License-Identifier: Apache-2.0
"""Checks in a process of their own, which loads the plugin as an application would: by discovery."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import torch

from tokenspeed_kernel.testing.checks import Check
from tokenspeed_kernel.testing.grid import Call
from tokenspeed_kernel.testing.installed import kernels_of, record_of
from tokenspeed_kernel.testing.report import NotExamined
from tokenspeed_kernel.testing.subject import Declined, Subject

__all__ = ["CHECKS", "answer", "ask"]

_SECONDS = 300


def ask(subject: Subject, question: str, **variables: str) -> list[str]:
    """Return the answer of another process, whose environment has these variables too, and take over its notes.

    Raises:
        NotExamined: that process says so, or cannot load the kernel because no installed plugin has it.
    """
    if subject.registration.owner is None:
        raise NotExamined("no installed plugin has the kernel, so that another process cannot load it")
    names = [question, subject.registration.owner, subject.name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "tokenspeed_kernel.testing", "answer", *names],
        capture_output=True,
        text=True,
        env=environment,
        timeout=_SECONDS,
        check=False,
    )
    try:
        said: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr.strip()[-500:]}") from None
    if "not examined" in said:
        raise NotExamined(said["not examined"][0])
    subject.notes += said["notes"]
    return said["answer"]


def answer(question: str, plugin: str, kernel: str) -> dict[str, list[str]]:
    """Return what :func:`ask` hears, in the process that it started."""
    from tokenspeed_kernel.testing.cuda import capture_and_replay
    from tokenspeed_kernel.testing.interpreted import compare

    record = record_of(plugin)
    found = [] if record is None else [r for r in kernels_of(record) if r.spec.name == kernel]
    if not found:
        return {"not examined": [f"in a process of its own, {plugin!r} has no kernel {kernel!r}"]}
    answers = {"capture": capture_and_replay, "digests": _digests, "interpreted": compare}
    subject = Subject(found[0])
    try:
        return {"answer": answers[question](subject), "notes": subject.notes}
    except NotExamined as reason:
        return {"not examined": [str(reason)]}


def _digests(subject: Subject) -> list[str]:
    """Return, for a call of every kind, a digest of the result's bits; NaN counts as one value."""
    return [
        f"{case.group}, {case.name}: {_digest(subject, call)}" for case, call in subject.accepted("dtypes", "options")
    ]


def _digest(subject: Subject, call: Call) -> str:
    try:
        result = subject.run(call)
    except Declined:
        return "declined"
    bits = torch.nan_to_num(result.detach().double(), nan=0.5, posinf=float("inf"), neginf=float("-inf"))
    return hashlib.sha256(bytes(bits.cpu().reshape(-1).view(torch.uint8).tolist())).hexdigest()[:16]


def same_bits_elsewhere(subject: Subject) -> list[str]:
    """A fresh process, which discovers the plugin anew, computes the same bits."""
    here = _digests(subject)
    there = ask(subject, "digests")
    return [f"{mine} here, {theirs} there" for mine, theirs in zip(here, there, strict=True) if mine != theirs]


CHECKS: dict[str, Check] = {"same_bits_elsewhere": same_bits_elsewhere}
"""By name, in the order in which they run."""
