"""Fixtures that several files use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A small text to train on."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return path
