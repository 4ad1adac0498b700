"""Every test starts with a home of its own, no keys in the environment and nothing of this machine."""

import os

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_BASE_URL")) or name in ("NANOBOT_MODEL", "NANOBOT_WORKSPACE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    return home
