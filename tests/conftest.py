"""Every test starts with a home of its own, no keys in the environment and nothing of this machine."""

import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

import tools

# Started by nohup, all programs that the tests start would inherit ignored signals: their Ctrl-C would do nothing.
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    number = getattr(signal, name, None)  # there is no SIGHUP on Windows
    if number and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


if os.name == "nt":  # `read_text()` and `write_text(…)` of tests are UTF-8 with \n, as elsewhere
    io.text_encoding = lambda encoding, level=2: encoding or "utf-8"
    Path.write_text = functools.partialmethod(Path.write_text, newline="\n")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_BASE_URL")) or name in (
            "NANOBOT_MODEL",
            "NANOBOT_WORKSPACE",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))  # HOME on Windows
    return home


@pytest.fixture(autouse=True)
def few_open_files():
    """Sockets of clients that a test dropped are collected before they are too many: `ulimit -n` is 256 on macOS, and a
    server that gets no descriptor hangs."""
    yield
    opened = Path("/dev/fd")
    if opened.exists() and len(list(opened.iterdir())) > 80:
        gc.collect()


# Tests run the program in hundreds of processes: they are forked from one that has loaded the SDK, and the tests.
FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
FORKS.set_forkserver_preload(
    ["nanobot", "openai", "json_repair", "test_command_line", "test_long_run"]
)


def fork(target, *arguments) -> multiprocessing.Process:
    if hasattr(os, "fork"):
        with pytest.MonkeyPatch.context() as patch:  # Python forgets to tell this server the path
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            forkserver.ensure_running()
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def lines_of(path: Path) -> list[dict]:
    """The objects of a JSON Lines file; a kill may have torn the last line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def need_bash() -> None:
    """For tests with commands of bash, which a Windows without Git does not have."""
    if "-c" not in tools.find_shell():
        pytest.skip("there is no bash")


def link(path: Path, target: Path | str) -> None:
    """Make a symbolic link or skip the test: on Windows, links need rights; wine makes none."""
    with contextlib.suppress(OSError):
        path.symlink_to(target)
    if not path.is_symlink():
        pytest.skip("there are no links")
