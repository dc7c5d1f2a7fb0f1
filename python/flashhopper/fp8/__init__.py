"""8-bit attention: recipes, the quantiser, the kernel's arithmetic in torch. Before it: interface.py; reading path:
recipe.py -> quantize.py -> emulate.py; attention.py, raw.py and operators.py make calls of them.
"""

from . import emulate
from .quantize import Fp8QKV
from .recipe import Fp8Recipe

__all__ = ["Fp8QKV", "Fp8Recipe", "emulate"]
