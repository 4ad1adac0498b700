"""For `pytest tests/exercises`: each grader works in a folder of its own, as `nanobot exercises` runs it."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path
