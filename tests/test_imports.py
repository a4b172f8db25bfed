"""The direction of imports, and what importing a package must not bring along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "sharding_specs": set(),
    "functitan": {"sharding_specs"},
    "models": {"functitan", "sharding_specs"},
    "train": {"models", "functitan", "sharding_specs"},
}
"""Each package of the repository, and those that it may import beside itself."""

FORBIDDEN = {"sharding_specs": {"torch", "jax", "numpy"}}
MAX_LINES = 400
FILES = [file for package in ALLOWED for file in sorted((ROOT / package).rglob("*.py"))]


def imported(source: str, file: Path) -> set[str]:
    """The top-level packages that a source imports anywhere, also inside functions and by importlib."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parents = file.relative_to(ROOT).parts[: -node.level]
                packages.add(parents[0] if parents else (node.module or node.names[0].name).split(".")[0])
            else:
                packages.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                packages.add(node.args[0].value.split(".")[0])
    return packages


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import a.b, c as d", {"a", "c"}),
        ("from a.b import c", {"a"}),
        ("def f():\n    import a", {"a"}),
        ("if TYPE_CHECKING:\n    from a import b", {"a"}),
        ("from . import b", {"functitan"}),
        ("from ..nn import b", {"functitan"}),
        ("import importlib\nimportlib.import_module('a.b')", {"importlib", "a"}),
        ("__import__('a')", {"a"}),
    ],
)
def test_every_way_to_import_is_seen(source, packages):
    assert imported(source, ROOT / "functitan" / "compiler" / "plan.py") == packages


def test_every_package_has_files():
    assert {file.relative_to(ROOT).parts[0] for file in FILES} == set(ALLOWED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_one_way(file):
    package = file.relative_to(ROOT).parts[0]
    packages = imported(file.read_text(encoding="utf-8"), file)
    not_allowed = packages & (set(ALLOWED) - ALLOWED[package] - {package} | {"tests"} | FORBIDDEN.get(package, set()))
    assert not not_allowed, f"{package} may not import {sorted(not_allowed)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_is_one_idea(file):
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: more than {MAX_LINES} are two ideas"


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("sharding_specs", ["torch", "jax", "numpy", "functitan"]),
        ("functitan", ["jax", "transformers", "models", "train"]),
        ("functitan.compiler.plan", ["jax", "transformers", "models", "train"]),
    ],
)
def test_importing_brings_nothing_along(package, absent):
    code = f"import sys, {package}; print(*sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
