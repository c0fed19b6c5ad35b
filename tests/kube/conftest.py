"""The API tier's tests: a real kube-apiserver, pods that are objects."""

from __future__ import annotations

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Not pytest_plugins: pytest allows that in the topmost conftest only. Loading it twice is a no-op.
    pluginmanager.import_plugin("tests.cluster.plugin")
