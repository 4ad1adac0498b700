"""Every test starts with a home of its own, no keys in the environment and nothing of this machine."""

import gc
import os
import signal
from pathlib import Path

import pytest

# What was started in the background or by nohup inherits signals that are ignored, and so would all
# programs that the tests start: their Ctrl-C would do nothing.
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    number = getattr(signal, name, None)  # there is no SIGHUP on Windows
    if number and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_BASE_URL")) or name in ("NANOBOT_MODEL", "NANOBOT_WORKSPACE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def few_open_files():
    """A test that drops a client without closing it leaves its sockets to the garbage collector. It
    runs before they are too many: `ulimit -n` is 256 on macOS, and a server that gets no descriptor
    hangs."""
    yield
    opened = Path("/dev/fd")
    if opened.exists() and len(list(opened.iterdir())) > 80:
        gc.collect()
