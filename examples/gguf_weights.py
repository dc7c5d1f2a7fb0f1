"""A copy of a GGUF file without its vocabulary. Before it: gemma_perplexity.py; after it: transformers.

transformers reads every field of a file in Python, twice, before it takes the weights: for 262144 token strings, scores
and types that is a minute, and a model does not use them. The layout is that of ggml's docs/gguf.md, version 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))
STRING, ARRAY, UINT32 = 8, 9, 4
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of the other types of values
ALIGNMENT = 32  # of the weights, where a file does not say otherwise
Data = bytes | mmap.mmap


def _string(data: Data, at: int) -> tuple[bytes, int]:
    """A string and where it ends."""
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _end(data: Data, at: int, kind: int) -> int:
    """Where a value ends."""
    if kind == STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != ARRAY:
        return at + SIZES[kind]
    element, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if element in SIZES:
        return at + SIZES[element] * int(count)
    for _ in range(count):
        at = _end(data, at, element)
    return at


def _fields(data: Data, count: int) -> Iterator[tuple[str, int, int, int]]:
    """Each field's name, where it begins, where its value does, and where it ends."""
    at = 24
    for _ in range(count):
        name, value = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, value)
        end = _end(data, value + 4, kind)
        yield name.decode(), at, value + 4, end
        at = end


def _tensors_end(data: Data, at: int, count: int) -> int:
    """Where the list of tensors ends: of each its name, extents, type and place."""
    for _ in range(count):
        _, at = _string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * int(dimensions) + 4 + 8
    return at


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def without_vocabulary(source: Path, target: Path) -> Path:
    """Write `source` to `target` with the vocabulary's size in place of the vocabulary; the weights stay as they are.

    Raises:
        ValueError: the file is no GGUF of version 3, has another alignment, or has no vocabulary.
    """
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, tensors, fields = struct.unpack_from("<4sIQQ", data, 0)
        if magic != b"GGUF" or version != 3:
            raise ValueError(f"{source} begins with {magic!r}, version {version}: must be GGUF, version 3")
        kept, words, end, architecture = [], None, 24, ""
        for name, begin, value, end in _fields(data, fields):
            if name == "general.alignment":
                raise ValueError(f"{source} names an alignment: must have that of the format, {ALIGNMENT} bytes")
            if name == "general.architecture":
                architecture = _string(data, value)[0].decode()
            if name == VOCABULARY[0]:
                (words,) = struct.unpack_from("<Q", data, value + 4)
            if name not in VOCABULARY:
                kept.append(data[begin:end])
        if words is None:
            raise ValueError(f"{source} has no {VOCABULARY[0]}: must hold a vocabulary")
        size = f"{architecture}.vocab_size".encode()
        kept.append(struct.pack("<Q", len(size)) + size + struct.pack("<II", UINT32, words))
        header = struct.pack("<4sIQQ", magic, version, tensors, len(kept)) + b"".join(kept)
        tensors_end = _tensors_end(data, end, tensors)
        header += data[end:tensors_end]
        with target.open("wb") as copy:
            copy.write(header.ljust(_aligned(len(header)), b"\0"))
            copy.write(memoryview(data)[_aligned(tensors_end) :])
    return target
