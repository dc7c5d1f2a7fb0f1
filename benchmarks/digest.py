"""The digest of the sources that a measurement belongs to. Standard library only.

sha256 over one line `path NUL sha256(contents) LF` for each file, in the order of the paths: everything under cpp/ and
cmake/, CMakeLists.txt, and python/flashhopper/**/*.py.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_SUFFIXES = {".a", ".cubin", ".fatbin", ".o", ".ptx", ".pyc", ".so"}
BUILD_FOLDERS = {"__pycache__", "build"}


def _files(root: Path) -> Iterator[Path]:
    yield from (path for folder in ("cpp", "cmake") for path in (root / folder).rglob("*"))
    yield root / "CMakeLists.txt"
    yield from (root / "python" / "flashhopper").rglob("*.py")


def sources(root: Path = ROOT) -> dict[str, str]:
    """Path (with /) -> sha256 of its contents, sorted by path."""
    found = {}
    for path in _files(root):
        relative = path.relative_to(root)
        if not path.is_file() or path.suffix in BUILD_SUFFIXES or BUILD_FOLDERS & set(relative.parts):
            continue
        if any(part.startswith(".") for part in relative.parts) or path.name.endswith("~"):
            continue
        found[relative.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def digest(files: dict[str, str]) -> str:
    """One sha256 for all files."""
    total = hashlib.sha256()
    for path, content in sorted(files.items()):
        total.update(f"{path}\0{content}\n".encode())
    return total.hexdigest()


def changed(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What differs between two listings, one line a file. Contents may be abbreviated in the older one."""
    lines = [f"removed  {path}" for path in old if path not in new]
    lines += [f"added    {path}" for path in new if path not in old]
    lines += [f"changed  {path}" for path in new if path in old and not new[path].startswith(old[path])]
    return sorted(lines, key=lambda line: line[9:])


def commit(root: Path = ROOT) -> str:
    """The commit of the working tree, with a + where files differ from it; empty outside a repository."""
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")
