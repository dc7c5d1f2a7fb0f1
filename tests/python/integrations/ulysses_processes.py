"""What the processes of test_ulysses.py run; each imports this module anew."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import ulysses


def with_deepspeed(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
    """DeepSpeed's layer, without the operator that it would first compile to send through shared memory."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return ulysses.with_deepspeed(*inputs, **options)


def without_exchange(*inputs: torch.Tensor, **options: object) -> torch.Tensor:
    """Wrong: each process attends over its own part alone."""
    return ulysses.local_attention(*inputs, **options)
