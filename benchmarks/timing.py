"""Interleaved timing by CUDA events: every contender once a round, medians over the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

TARGET_MS = 30.0  # device time of one measurement
SETTLE_MS = 200.0  # of the same launches right before it, untimed
MAX_LAUNCHES = 400  # timed at once: the driver's launch queue holds them, so that the host never throttles the device
_SLEEP_CYCLES_PER_MS = 1.7e6  # torch.cuda._sleep spins clock cycles; the SM clock lies between 1.3 and 2.0 GHz

_draws = random.Random(0)  # of orders: each cell has its own, each run the same

Call = Callable[[], object]


@dataclass
class Contender:
    """One thing to time: a call that enqueues the operation once on the current stream."""

    name: str
    call: Call
    launches: int = 1  # in one measurement
    host_ms: float = 0.0  # of a call, where that is too slow to keep the device busy; else 0
    times_ms: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms) if self.times_ms else float("nan")

    @property
    def spread(self) -> float:
        """(max - min) / median over the rounds."""
        return (max(self.times_ms) - min(self.times_ms)) / self.median_ms if self.times_ms else float("nan")


def describe(error: BaseException) -> str:
    """One line for tables and JSON."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def elapsed_ms(call: Call, launches: int, settle: int, lead_ms: float) -> float:
    """Device time of a launch among back-to-back launches, after `settle` untimed ones.

    The card is power limited: what runs after a rest runs faster, and its clock remembers for tens of milliseconds how
    much power the kernel before drew. So nothing stands between the untimed launches and the timed ones, unless a host
    is too slow to keep the queue filled: then a kernel that spins for lead_ms, while the host fills it.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(settle):
        call()
    if lead_ms > 0:
        torch.cuda._sleep(int(lead_ms * _SLEEP_CYCLES_PER_MS))
    start.record()
    for _ in range(launches):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / launches


def _warm_up(contender: Contender) -> None:
    """Compiles, allocates, finds the host cost of a call and how many launches fill a measurement."""
    contender.call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        contender.call()
    contender.host_ms = (time.perf_counter() - begin) * 1e3 / 3
    torch.cuda.synchronize()
    device_ms = elapsed_ms(contender.call, 4, 0, lead_ms=4 * contender.host_ms + 0.2)
    contender.launches = max(2, min(MAX_LAUNCHES, round(TARGET_MS / max(device_ms, 1e-3))))
    # Where the device is slower than the host, the queue fills by itself.
    if contender.host_ms < 0.8 * device_ms:
        contender.host_ms = 0.0


def orders(count: int, rounds: int, draws: random.Random) -> list[list[int]]:
    """Who stands where in each round: an order that is drawn, the same backwards, another one that is drawn, and so on.

    After two rounds everyone stood in the middle on average, and each neighbour was in front of it once and behind it
    once; over many cells everyone follows everyone. With one order in all cells, contenders differed by up to 10 % from
    what they did in other company (docs/lab/forward.md, 28).
    """
    found: list[list[int]] = []
    for turn in range(rounds):
        found.append(found[-1][::-1] if turn % 2 else draws.sample(range(count), count))
    return found


def measure(contenders: Sequence[Contender], rounds: int) -> None:
    """Fills times_ms, or error for a contender that raises; the others go on. Rounds are in the order of orders(), and
    all contenders rest equally long before a measurement, as long as the slowest host needs.
    """
    with torch.no_grad():
        for contender in contenders:
            try:
                _warm_up(contender)
            except Exception as error:  # a peer that refuses a shape must not end the run
                contender.error = describe(error)
        ready = [c for c in contenders if c.error is None]
        turns = orders(len(ready), rounds, _draws)
        if turns and ready:  # else the first of all would be measured after a rest
            _time(ready[turns[0][-1]], 0.0, keep=False)
        for turn in turns:
            lead_ms = min(60.0, max((c.host_ms * c.launches for c in ready if c.error is None), default=0.0))
            for index in turn:
                if ready[index].error is None:
                    _time(ready[index], lead_ms)


def _time(contender: Contender, lead_ms: float, keep: bool = True) -> None:
    """One measurement; an exception is the contender's error."""
    settle = round(contender.launches * SETTLE_MS / TARGET_MS)
    try:
        elapsed = elapsed_ms(contender.call, contender.launches, settle, lead_ms)
    except Exception as error:
        contender.error = describe(error)
        return
    if keep:
        contender.times_ms.append(elapsed)


def tflops(flops: float, milliseconds: float) -> float:
    return flops / milliseconds / 1e9
