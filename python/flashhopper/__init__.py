"""Exact attention for NVIDIA Hopper GPUs: FlashAttention kernels where there is one, a tiled engine in torch ops
everywhere else.

Reading path: interface.py -> checks.py -> ops.py -> cpp/bindings/module.cpp.
"""

from . import flops as _flops  # noqa: F401 - registers the operators' flop formulas
from .backends import backend, set_backend
from .engine.reference import reference_attention
from .fp8 import Fp8QKV, Fp8Recipe
from .fp8.attention import quantize_fp8
from .fp8.raw import flash_attn_fp8_func
from .interface import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from .merge import merge_attention
from .plan import Plan, explain

__version__ = "0.1.0"

__all__ = [
    "Fp8QKV",
    "Fp8Recipe",
    "Plan",
    "__version__",
    "backend",
    "explain",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "merge_attention",
    "quantize_fp8",
    "reference_attention",
    "set_backend",
]
