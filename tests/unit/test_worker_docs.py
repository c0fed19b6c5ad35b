"""The worker's pages say what the code does: names, metrics, and code that compiles and imports."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import reconciler.worker as sdk
from reconciler.worker import metrics

HOW_TO = Path("docs/how-to/worker.md").read_text(encoding="utf-8")
REFERENCE = Path("docs/reference/worker.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_code_block_compiles_and_its_imports_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reconciler"):
            for alias in node.names:
                assert hasattr(import_module(node.module or ""), alias.name)


@pytest.mark.parametrize("name", sorted(sdk.__all__))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"\b{name}\b", REFERENCE)


@pytest.mark.parametrize("metric", [metric.name for metric in metrics.all_metrics()])
def test_every_metric_is_in_the_reference(metric: str) -> None:
    assert metric in REFERENCE
