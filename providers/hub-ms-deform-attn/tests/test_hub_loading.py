# SPDX-License-Identifier: Apache-2.0
"""Loading: the real client, offline, on a repository written here; and every way in which it can fail."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from tokenspeed_kernel import settings
from tokenspeed_kernel_hub_ms_deform_attn import loading, ms_deform_attn
from tokenspeed_kernel_hub_ms_deform_attn.loading import REPOSITORY, REVISION, HubKernel

_SCRIPT = """
import json, socket, sys, warnings
tried = []
def refuse(*args, **kwargs):
    tried.append(repr(args))
    raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from tokenspeed_kernel_hub_ms_deform_attn import loading
assert "torch" not in sys.modules and "kernels" not in sys.modules
import torch
from tokenspeed_kernel_hub_ms_deform_attn import ms_deform_attn as provider
assert "kernels" not in sys.modules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    modules = [loading.DEFORMABLE_DETR.load() for _ in range(12)]
value = torch.arange(4.0).expand(3, 4).reshape(3, 4, 1, 1)
inputs = value, ((2, 2),), torch.full((3, 1, 1, 1, 1, 2), 0.5), torch.ones(3, 1, 1, 1, 1)
print(json.dumps({
    "out": None if modules[0] is None else provider._attend(modules[0], *inputs).flatten().tolist(),
    "same": all(module is modules[0] for module in modules),
    "warnings": [str(w.message) for w in caught if w.category is RuntimeWarning],
    "failure": loading.DEFORMABLE_DETR.failure,
    "tried": tried,
    "client": "kernels" in sys.modules,
}))
"""


def _run(cache: Path, **environment: str) -> dict[str, object]:
    """Load twelve times in a fresh process whose only cache is ``cache``, and return what it saw."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "KERNELS", "TOKENSPEED"))}
    kept |= {"HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub"), "HF_HUB_OFFLINE": "1", **environment}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("variant", ["torch-universal", "torch-cuda" if torch.version.cuda else "torch-cpu"])
def test_a_fresh_offline_process_loads_the_pinned_commit_from_a_warm_cache(
    write_repository: Callable[..., Path], tmp_path: Path, variant: str
) -> None:
    """HF_HUB_OFFLINE set before import: loaded once, no warning, no connection tried (case 52)."""
    write_repository(variant=variant)
    seen = _run(tmp_path)
    assert seen["out"] == [1.5, 1.5, 1.5]
    assert (seen["same"], seen["warnings"], seen["failure"], seen["tried"]) == (True, [], None, [])


def test_a_fresh_offline_process_with_an_empty_cache_warns_once(tmp_path: Path) -> None:
    """Twelve calls give one warning with repository, commit and cause, and no connection is tried (cases 52, 59)."""
    seen = _run(tmp_path)
    (message,) = cast(list[str], seen["warnings"])
    assert REPOSITORY in message
    assert REVISION in message
    assert "FileNotFoundError" in message
    assert (seen["out"], seen["same"], seen["tried"]) == (None, True, [])


def test_a_fresh_process_with_the_hub_switched_off_does_not_even_import_the_client(
    write_repository: Callable[..., Path], tmp_path: Path
) -> None:
    """TOKENSPEED_KERNEL_HUB=0: no client, no request, no warning, also with a warm cache."""
    write_repository()
    seen = _run(tmp_path, TOKENSPEED_KERNEL_HUB="0", HF_HUB_OFFLINE="0")
    assert (seen["out"], seen["warnings"], seen["tried"], seen["client"]) == (None, [], [], False)


def test_offline_mode_set_after_the_import_of_the_client_is_honoured(
    write_repository: Callable[..., Path], offline: list[object]
) -> None:
    """HF_HUB_OFFLINE set late loads from the cache without a connection; the client's setting is put back (case 52)."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    write_repository()
    assert HubKernel(REPOSITORY, REVISION).load() is not None
    assert offline == []
    assert before == constants.HF_HUB_OFFLINE


def _truncate_code(folder: Path) -> None:
    (folder / "__init__.py").write_text("")


def _replace_code(folder: Path) -> None:
    (folder / "__init__.py").write_text("This is not Python.")


def _exit_on_import(folder: Path) -> None:
    (folder / "__init__.py").write_text("raise SystemExit(3)")


def _truncate_library(folder: Path) -> None:
    (folder / "_kernel.so").write_bytes(b"\x7fELF")
    (folder / "__init__.py").write_text(
        "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).parent / '_kernel.so'))"
    )


def _dangle(folder: Path) -> None:
    (folder / "__init__.py").unlink()
    (folder / "__init__.py").symlink_to(folder / "missing-blob")


def _remove_metadata(folder: Path) -> None:
    (folder / "metadata.json").unlink()


def _empty_metadata(folder: Path) -> None:
    (folder / "metadata.json").write_text("")


def _cut_metadata(folder: Path) -> None:
    (folder / "metadata.json").write_text("{")


def _remove_variant(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (_truncate_code, "ms_deform_attn_forward"),
        (_replace_code, "SyntaxError"),
        (_exit_on_import, "SystemExit: 3"),
        (_truncate_library, "_kernel.so"),
        (_dangle, "FileNotFoundError"),
        (_remove_metadata, "metadata.json"),
        (_empty_metadata, "ValueError"),
        (_cut_metadata, "ValueError"),
        (_remove_variant, "FileNotFoundError"),
    ],
)
def test_a_spoiled_cache_gives_one_warning_and_is_left_alone(
    write_repository: Callable[..., Path],
    offline: list[object],
    kernel: HubKernel,
    spoil: Callable[[Path], None],
    cause: str,
) -> None:
    """Damaged code, library or metadata: one warning with the cause and the path, nothing deleted (cases 106, 113)."""
    folder = write_repository()
    spoil(folder)
    files = sorted(path for path in folder.parents[1].rglob("*") if "__pycache__" not in path.parts)
    with pytest.warns(RuntimeWarning, match="could not be loaded") as caught:
        answers = [kernel.load() for _ in range(3)]
    assert answers == [None, None, None]
    (message,) = [str(warning.message) for warning in caught]
    assert cause in message
    assert str(folder.parents[1]) in message
    assert message.startswith(f"{REPOSITORY} at commit {REVISION}")
    assert sorted(path for path in folder.parents[1].rglob("*") if "__pycache__" not in path.parts) == files
    assert offline == []


def test_unknown_metadata_fields_do_not_matter(write_repository: Callable[..., Path], offline: list[object]) -> None:
    """Fields of a newer client in metadata.json are no fault (case 113)."""
    path = write_repository() / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new-field": {"a": 1}}))
    assert HubKernel(REPOSITORY, REVISION).load() is not None
    assert offline == []


def test_a_failed_load_makes_the_kernel_decline(offline: list[object], kernel: HubKernel, cuda_like: None) -> None:
    """The first call answers NotImplemented with the one warning, and supports gives the cause from then on."""
    inputs = torch.ones(1, 4, 1, 1), [(2, 2)], torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1)
    with pytest.warns(RuntimeWarning, match="The portable path runs instead"):
        assert ms_deform_attn.ms_deform_attn(*inputs) is NotImplemented
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ms_deform_attn.ms_deform_attn(*inputs) is NotImplemented
        assert "FileNotFoundError" in str(ms_deform_attn.supports(*inputs))


@pytest.fixture
def cuda_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors pass the checks, so that what follows them can be seen without a GPU."""
    monkeypatch.setattr(ms_deform_attn, "_tensor_reason", lambda *tensors: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def _module(**extra: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(ms_deform_attn_forward=len, ms_deform_attn_backward=len, **extra)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Put an empty module in the place of the ``kernels`` client."""
    stub = types.ModuleType("kernels")
    stub.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]  # find_spec asks only whether there is one
    monkeypatch.setitem(sys.modules, "kernels", stub)
    return stub


def test_the_pinned_commit_is_asked_for_and_nothing_else(client: types.ModuleType) -> None:
    """A full hash as revision, no version, no trust_remote_code, whatever else the client takes (cases 38, 77)."""
    asked = []

    def get_kernel(repo_id: str, **options: object) -> object:
        asked.append((repo_id, options))
        return _module()

    client.get_kernel = get_kernel  # type: ignore[attr-defined]
    assert HubKernel(REPOSITORY, REVISION).load() is not None
    assert asked == [(REPOSITORY, {"revision": REVISION})]
    assert len(REVISION) == 40
    assert set(REVISION) <= set("0123456789abcdef")


def test_an_older_client_serves(client: types.ModuleType) -> None:
    """A get_kernel that knows only repository and revision is enough (case 77)."""
    client.get_kernel = lambda repo_id, revision="main": _module()  # type: ignore[attr-defined]
    assert HubKernel(REPOSITORY, REVISION).load() is not None


@pytest.mark.parametrize(
    "error",
    [
        TypeError("get_kernel() got an unexpected keyword argument 'revision'"),
        ValueError("Either a revision or a version must be specified"),
        RuntimeError("404 Client Error: Revision Not Found"),
        OSError("undefined symbol: bar"),
        ImportError("libcudart.so.11"),
        FileNotFoundError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_client_raises_is_asked_for_once(client: types.ModuleType, error: Exception) -> None:
    """A changed client, a missing commit, a broken library: one try, one warning, no other commit (case 77)."""
    asked = []

    def get_kernel(repo_id: str, revision: str) -> object:
        asked.append(revision)
        raise error

    client.get_kernel = get_kernel  # type: ignore[attr-defined]
    kernel = HubKernel(REPOSITORY, REVISION)
    with pytest.warns(RuntimeWarning) as caught:
        assert [kernel.load() for _ in range(12)] == [None] * 12
    (message,) = [str(warning.message) for warning in caught]
    assert type(error).__name__ in message
    assert str(error) in message
    assert asked == [REVISION]


def test_a_client_without_get_kernel_is_a_failed_load(client: types.ModuleType) -> None:
    """A kernels package that has lost the function makes the kernel decline (case 77)."""
    with pytest.warns(RuntimeWarning, match="AttributeError"):
        assert HubKernel(REPOSITORY, REVISION).load() is None


def test_another_commit_than_the_pinned_one_is_refused(client: types.ModuleType) -> None:
    """A module out of another snapshot is not used (case 77)."""
    file = f"/cache/snapshots/{'0' * 40}/build/torch-universal/__init__.py"
    client.get_kernel = lambda repo_id, revision: _module(__file__=file)  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="commit 0{40} came instead"):
        assert HubKernel(REPOSITORY, REVISION).load() is None


def test_a_keyboard_interrupt_passes_and_is_not_remembered(client: types.ModuleType) -> None:
    """Ctrl-C during a download reaches the user, and the next call tries again."""
    answers: list[object] = [KeyboardInterrupt(), _module()]

    def get_kernel(repo_id: str, revision: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    client.get_kernel = get_kernel  # type: ignore[attr-defined]
    kernel = HubKernel(REPOSITORY, REVISION)
    with pytest.raises(KeyboardInterrupt):
        kernel.load()
    assert kernel.failure is None
    assert kernel.load() is not None


def test_threads_that_call_together_load_once(client: types.ModuleType) -> None:
    """Eight threads at a barrier share one load and one module."""
    asked, barrier, results = [], threading.Barrier(8), []
    entered = threading.Event()

    def get_kernel(repo_id: str, revision: str) -> object:
        asked.append(revision)
        entered.wait(0.2)  # nobody sets it: the other threads get the time to arrive
        return _module()

    client.get_kernel = get_kernel  # type: ignore[attr-defined]
    kernel = HubKernel(REPOSITORY, REVISION)

    def call() -> None:
        barrier.wait()
        results.append(kernel.load())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [REVISION]
    assert len(results) == 8
    assert results[0] is not None
    assert all(result is results[0] for result in results)


@pytest.mark.parametrize("name", ["TOKENSPEED_KERNEL_HUB", "LIBREYOLO_HUB_KERNELS"])
def test_the_switch_keeps_the_client_untouched(
    client: types.ModuleType, kernel: HubKernel, monkeypatch: pytest.MonkeyPatch, cuda_like: None, name: str
) -> None:
    """Either variable set to 0 makes the kernel unavailable, and a direct call loads and warns of nothing."""
    monkeypatch.setenv(name, "0")
    settings.refresh()
    assert "TOKENSPEED_KERNEL_HUB" in str(loading.availability())
    inputs = torch.ones(1, 4, 1, 1), [(2, 2)], torch.full((1, 1, 1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 1, 1)
    assert "switched off" in str(ms_deform_attn.supports(*inputs))
    assert ms_deform_attn.ms_deform_attn(*inputs) is NotImplemented
    assert kernel.failure is None  # the client has no get_kernel: a try would have failed


def test_an_absent_client_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels package the reason holds the command, and nothing is tried."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install kernels" in str(loading.availability())
    assert HubKernel(REPOSITORY, REVISION).load() is None


def test_a_python_without_the_gil_is_refused_before_loading(
    client: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where importing the library would end the process, nothing is loaded (case 109)."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert "GIL" in str(loading.availability())
    kernel = HubKernel(REPOSITORY, REVISION)
    assert kernel.load() is None
    assert kernel.failure is None


def test_everything_in_place_is_available(client: types.ModuleType) -> None:
    """With the client installed and the Hub allowed the predicate is exactly True."""
    assert loading.availability() is True


def test_a_local_override_is_logged(
    client: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LOCAL_KERNELS names the repository, so the user asked for it; a log record says so (case 38)."""
    client.get_kernel = lambda repo_id, revision: _module(__file__="/home/me/build/__init__.py")  # type: ignore[attr-defined]
    monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel=/a:{REPOSITORY}=/home/me")
    with caplog.at_level(logging.WARNING):
        assert HubKernel(REPOSITORY, REVISION).load() is not None
    assert "LOCAL_KERNELS replaces" in caplog.text
    assert REVISION in caplog.text
