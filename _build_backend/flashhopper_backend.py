"""PEP 517 backend: scikit-build-core, which also asks for the CUDA and CUTLASS wheels where a machine lacks them."""

from __future__ import annotations

from typing import Any

import scikit_build_core.build as skbuild
import toolchain
from scikit_build_core.build import *  # noqa: F403 (which hooks it has depends on the project's metadata)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*skbuild.get_requires_for_build_wheel(config_settings), *toolchain.requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*skbuild.get_requires_for_build_editable(config_settings), *toolchain.requirements()]
