"""What the tests against real frameworks share: a framework that is missing skips them, in continuous integration it
fails them.
"""

import importlib
import os
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """The framework `name`; without it the calling test module is skipped, or an error where CI is set."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs {name}: pip install '.[integrations]'", allow_module_level=True)
