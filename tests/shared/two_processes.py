"""Runs the cases of sharding_cases.py in a pair of processes and keeps what became of each. Before it:
tests/python/test_distributed.py, tests/gpu/test_gpu_distributed.py; after it: sharding_cases.py.

All cases share a pair: starting one costs more than most of them.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashhopper
from sharding_cases import CASES, WORLD, Place

PATIENCE = 60  # seconds that a rank waits for the other, which may have failed
Results = list[dict[str, str]]  # of each rank: case -> its error, "" for none


def run(place: Place, folder: Path, seconds: float) -> Results:
    """Every case on two ranks. A case that a rank did not come to is in no result of it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = mp.start_processes(_enter, (place, str(folder)), WORLD, join=False, start_method="spawn")
    end = time.monotonic() + seconds
    try:
        while not context.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                break
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(error)  # whatever it is, cases lack a result
    finally:
        for process in context.processes:
            process.kill()
    return [_read(folder / f"{rank}.jsonl") for rank in range(WORLD)]


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return {entry["case"]: entry["error"] for entry in map(json.loads, lines)}


def _enter(rank: int, place: Place, folder: str) -> None:
    torch.set_num_threads(1)
    if place.device == "cuda":
        torch.cuda.set_device(rank)
    flashhopper.set_backend(place.backend)
    dist.init_process_group(
        "nccl" if place.device == "cuda" else "gloo",
        rank=rank,
        world_size=WORLD,
        init_method=f"file://{folder}/rendezvous",
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    try:
        with Path(folder, f"{rank}.jsonl").open("w") as file:
            for name, case in CASES.items():
                torch.manual_seed(0)
                error = ""
                try:
                    case(place)
                except Exception:
                    error = traceback.format_exc()
                print(json.dumps({"case": name, "error": error}), file=file, flush=True)
    finally:
        dist.destroy_process_group()


def problem(results: Results, case: str) -> str | None:
    """What is wrong with a case; None: both ranks passed it."""
    for rank, result in enumerate(results):
        if case not in result:
            return f"rank {rank} did not finish it"
        if result[case]:
            return f"rank {rank}: {result[case]}"
    return None
