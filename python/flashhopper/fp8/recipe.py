"""What an 8-bit attention call quantises, and how: Fp8Recipe. Before it: your code; after it: quantize.py (torch
operations), emulate.py, engine/hopper_fp8.py (kernels).

Every building block is a field that can be switched off; docs/numerics.md has the measurement behind each choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .rotation import QUAD

QK_FORMATS = ("int8", "e4m3")
# Layers with hot channels lose more or less as the signs fall: of seeds 0 to 7 this one has the least error in the
# worst layer of the model that docs/numerics.md measures.
DEFAULT_SEED = 2
E4M3_SEED = 6  # the same, of e4m3(), whose rotation is another
TILE_KEYS = 128  # keys of one step of the attention kernel; block scales of K and V change between steps only


@dataclass(frozen=True)
class Fp8Recipe:
    """How queries, keys and values become 8-bit; the default is accurate().

    Attributes:
        qk_format: of queries and keys, "int8" (uniform steps: wants `rotate`) or "e4m3" (a float; real keys lose by
            wide rotation). Values and probabilities are e4m3 in either case.
        rotate: multiply queries and keys by one random-sign Hadamard matrix, which leaves their products as they are
            and spreads outliers over the head dimension (QuaRot, Ashkboos et al. 2024; FlashAttention-3, Shah et al.
            2024, "incoherent processing").
        rotate_block: columns that are rotated together: 0, as many as there are (the largest power of two that divides
            the computed head dimension), or 4, which spreads a single element but keeps hot channels among few.
        smooth_k: subtract each channel's mean over the sequence (over 2048 keys spread over a longer one) from the
            keys; softmax does not change, lse gets the query's product with the mean back (SageAttention, Zhang et al.
            2024).
        center_v: subtract each channel's mean over the sequence from the values, and add it to the output: the weights
            of a row sum to 1.
        q_block: rows that share a scale of queries; 0 is one scale a (batch, head), 1 one a row.
        k_block: the same of keys: 0, 1, or a multiple of 128.
        v_block: the same of values: 0 or a multiple of 128.
        power_scales: scales of keys are powers of two in blocks without outliers, so that equal keys of several blocks
            become the same numbers, and what rounding does to all of them alike cancels in the softmax. A block with
            outliers (its largest magnitude is above 1.75 times that of some 16 of its rows) keeps its own scale, in
            which the largest element, most of its error, is exact. For e4m3 keys with scales of blocks or rows alone.
        two_level: the product of P and V of each 128 keys is summed in a fresh accumulator and then added in float32,
            because Hopper's 8-bit accumulator keeps about 14 bits. False exists to measure that; kernels refuse it.
        seed: of the rotation's signs.
        code: all of it as one string, which operators take and parse() reads.

    A mean and a scale that cover later tokens carry something of them into causal outputs. Inference does not mind;
    for training take q_block=1, k_block=1, smooth_k=False, center_v=False, which leaves the block scales of values.

    Raises:
        ValueError: a field breaks its rule; the message names it, its value, the rule and the way out.
    """

    qk_format: str = "int8"
    rotate: bool = True
    smooth_k: bool = True
    center_v: bool = True
    q_block: int = 1
    k_block: int = TILE_KEYS
    v_block: int = TILE_KEYS
    two_level: bool = True
    seed: int = DEFAULT_SEED
    rotate_block: int = 0
    power_scales: bool = False
    code: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.qk_format not in QK_FORMATS:
            names = " or ".join(map(repr, QK_FORMATS))
            raise ValueError(f"qk_format is {self.qk_format!r}: must be {names}; the default is {QK_FORMATS[0]!r}")
        for name in ("rotate", "smooth_k", "center_v", "two_level", "power_scales"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}: must be True or False; pass bool({name})")
        for name in ("q_block", "k_block", "v_block", "seed", "rotate_block"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}: must be an int; pass int({name})")
        if self.q_block < 0:
            raise ValueError(
                f"q_block is {self.q_block}: must be 0 or more rows; 0 gives one scale a head, 1 one a row"
            )
        if self.k_block != 1 and (self.k_block < 0 or self.k_block % TILE_KEYS != 0):
            raise ValueError(
                f"k_block is {self.k_block}: must be 0, 1 or a multiple of {TILE_KEYS} keys; 0 gives one scale a head"
            )
        if self.v_block < 0 or self.v_block % TILE_KEYS != 0:
            raise ValueError(
                f"v_block is {self.v_block}: must be 0 or a multiple of {TILE_KEYS} keys; 0 gives one scale a head"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}: must be between 0 and 2**63 - 1; the default is {DEFAULT_SEED}")
        if self.rotate_block not in (0, QUAD) or (self.rotate_block and not self.rotate):
            rule = f"must be 0 or {QUAD}, and 0 where rotate is False; 0 rotates as many columns as there are together"
            raise ValueError(f"rotate_block is {self.rotate_block}: {rule}")
        if self.power_scales and (self.qk_format != "e4m3" or self.k_block == 0):
            given = f"with qk_format {self.qk_format!r} and k_block {self.k_block}"
            rule = "must be False unless keys are e4m3 with scales of blocks or rows; pass power_scales=False"
            raise ValueError(f"power_scales is True {given}: {rule}")
        # Made here, not on demand: a compiled graph with dynamic shapes takes integers of its inputs for symbols.
        flags = f"{self.rotate:d},{self.smooth_k:d},{self.center_v:d}"
        blocks = f"{self.q_block},{self.k_block},{self.v_block}"
        others = f"{self.two_level:d},{self.seed},{self.rotate_block},{self.power_scales:d}"
        code = f"{self.qk_format},{flags},{blocks},{others}"
        object.__setattr__(self, "code", code)

    @classmethod
    def accurate(cls) -> Fp8Recipe:
        """int8 queries (a scale a row) and keys (a scale a block), smoothed and rotated; e4m3 values, centred."""
        return cls()

    @classmethod
    def e4m3(cls) -> Fp8Recipe:
        """e4m3 throughout: a scale a row of queries, keys smoothed, values centred, rotation of four columns at a time:
        wide rotation spreads the hot channels of real keys over all.
        """
        return cls(qk_format="e4m3", rotate_block=QUAD, seed=E4M3_SEED, power_scales=True)

    @classmethod
    def paper(cls) -> Fp8Recipe:
        """FlashAttention-3's paper: e4m3, block scales, incoherent processing. Besides, values are centred, queries
        have a scale a row and keys scales that are powers of two, as measurement says.
        """
        return cls(qk_format="e4m3", smooth_k=False, power_scales=True)

    @classmethod
    def parse(cls, code: str) -> Fp8Recipe:
        """The recipe that `code` names."""
        qk_format, *numbers = code.split(",")
        if len(numbers) != 10 or not all(number.isdecimal() for number in numbers):
            raise ValueError(f"recipe is {code!r}: must be Fp8Recipe.code, such as {cls().code!r}")
        rotate, smooth_k, center_v, q_block, k_block, v_block, two_level, seed, rotate_block, power = map(int, numbers)
        flags = bool(rotate), bool(smooth_k), bool(center_v)
        return cls(qk_format, *flags, q_block, k_block, v_block, bool(two_level), seed, rotate_block, bool(power))

    def __str__(self) -> str:
        parts = [f"{self.qk_format} QK^T, e4m3 PV"]
        rotated = f"rotated by {self.rotate_block} columns" if self.rotate_block else "rotated"
        parts += [text for text, is_on in ((rotated, self.rotate), ("keys smoothed", self.smooth_k)) if is_on]
        parts += ["values centred"] if self.center_v else []
        powers = " in powers of two" if self.power_scales else ""
        parts.append(f"scales q {_rows(self.q_block)}, k {_rows(self.k_block)}{powers}, v {_rows(self.v_block)}")
        parts.append("two-level sums" if self.two_level else "one-level sums")
        return ", ".join(parts)


def _rows(block: int) -> str:
    return {0: "a head", 1: "a row"}.get(block, f"{block} rows")
