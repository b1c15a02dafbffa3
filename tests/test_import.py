"""`import attoscope` is light, and the test that says so can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attoscope

HEAVY = ("torch", "transformers", "altair", "vl_convert", "xarray", "scipy", "pandas", "numpy")


def heavy_modules_after(code: str) -> set[str]:
    """Runs `code` in a fresh interpreter and says which of the heavy modules it loaded."""
    script = f"{code}\nimport sys; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True
    )
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert heavy_modules_after("import attoscope") == set()


def test_the_light_import_test_can_fail() -> None:
    assert heavy_modules_after("import attoscope, xarray") >= {"xarray", "numpy"}


def test_errors_and_findings_need_nothing_heavy() -> None:
    assert heavy_modules_after("from attoscope import AttoscopeError, Finding") == set()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'diagnoze'"):
        _ = attoscope.diagnoze


@pytest.mark.parametrize("name", attoscope.__all__)
def test_public_names_resolve_to_themselves(name: str) -> None:
    value = getattr(attoscope, name)
    assert name == "__version__" or getattr(value, "__name__", None) == name
    assert name in dir(attoscope)
