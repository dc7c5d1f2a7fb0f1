"""What the tests against real frameworks share: a framework that is missing skips them, in continuous integration it
fails them.
"""

import importlib
import os
import warnings
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """The framework `name`; without it the calling test module is skipped, or an error where CI is set."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, while they are imported
            return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs {name}: pip install '.[integrations]'", allow_module_level=True)
