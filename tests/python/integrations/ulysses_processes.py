"""What the processes of test_ulysses.py run; each imports this module anew."""

import atexit
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import ulysses


def with_deepspeed(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
    """DeepSpeed's layer, without the operator that it would first compile to send through shared memory."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Gloo's threads, which DeepSpeed's objects still hold, now and then abort a process that takes itself down. What
    # was computed is in shared memory by then, and NaN where nothing was.
    atexit.register(os._exit, 0)
    return ulysses.with_deepspeed(*inputs, **options)


def without_exchange(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
    """Wrong: each process attends over its own part alone."""
    return ulysses.local_attention(*inputs, **options)
