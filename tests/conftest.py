"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import margins, ranks

margins.install_if_asked()


def pytest_configure(config: pytest.Config) -> None:
    """All processes of the tests compute on the CPU, but for `pytest -m gpu`, whose tests start none on gloo."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """See `tests.ranks.run_ranks`."""
    return ranks.run_ranks


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed data set of two domains of 4000 random ids below 60."""
    folder = tmp_path_factory.mktemp("tiny_data") / "indexed"
    ranks.run_ranks("write_data", 1, str(folder), 60, 4000)
    return folder
