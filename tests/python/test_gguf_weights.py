"""examples/gguf_weights.py on a file made here: the vocabulary goes, its size and everything else stay."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import example_programs

WEIGHTS = bytes(range(100))


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


ARCHITECTURE = field("general.architecture", 8, string("tiny"))
TAGS = field("general.tags", 9, struct.pack("<IQ", 8, 2) + string("a") + string("bc"))
NUMBERS = [field("tiny.block_count", 4, struct.pack("<I", 3)), field("tiny.norm", 12, struct.pack("<d", 0.5))]
TOKENS = field("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + string("x") + string("") + string("yz"))
SCORES = field("tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0))
LAST = field("tokenizer.ggml.add_bos_token", 7, b"\1")
FIELDS = [ARCHITECTURE, TAGS, TOKENS, NUMBERS[0], SCORES, NUMBERS[1], LAST]
# Two tensors: name, extents, type, place among the weights.
TENSORS = b"".join(
    string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, 0, place)
    for name, shape, place in (("w", (4, 3), 0), ("b", (4,), 64))
)


def file(fields: list[bytes], magic: bytes = b"GGUF", version: int = 3) -> bytes:
    header = struct.pack("<4sIQQ", magic, version, 2, len(fields)) + b"".join(fields) + TENSORS
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + WEIGHTS


def test_the_vocabulary_goes(tmp_path: Path) -> None:
    program = example_programs.load("gguf_weights")
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    source.write_bytes(file(FIELDS))
    assert program.without_vocabulary(source, target) == target
    size = field("tiny.vocab_size", 4, struct.pack("<I", 3))
    assert target.read_bytes() == file([ARCHITECTURE, TAGS, *NUMBERS, LAST, size])
    assert source.read_bytes() == file(FIELDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (file(FIELDS, magic=b"GGML"), "must be GGUF, version 3"),
        (file(FIELDS, version=2), "version 2: must be GGUF, version 3"),
        (file([ARCHITECTURE, *NUMBERS]), r"has no tokenizer\.ggml\.tokens"),
        (file([field("general.alignment", 4, struct.pack("<I", 64)), *FIELDS]), "names an alignment"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    program = example_programs.load("gguf_weights")
    source = tmp_path / "a.gguf"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        program.without_vocabulary(source, tmp_path / "b.gguf")
