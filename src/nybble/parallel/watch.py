"""Says in which exchange a run hangs and who is dead or behind, and ends the process in the end.

Each rank's thread writes a heartbeat and its position (step, layer, leg) into the store of the process group.
A rank that gets no further for `slow_s` reads those of the others and reports. A rank whose heart has
stopped for `DEAD_S`, a wait of `timeout_s`, or either for `STOP_S` after SIGTERM, ends this process with
status 1, so that torchrun takes the job down and, with --max-restarts, starts it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nybble.compiling import compiling
from nybble.parallel.ticks import Ticks

BEAT_S = 1.0
DEAD_S = 60.0
"""A heart that stands still for so long is dead: longer than the interpreter is ever held up by compiling."""

SILENT_S = 5.0
"""A heart that stands still for so long is told of in reports."""

COMPILING_S = 5.0
"""What takes longer between exchanges may be compiling, and is looked at for it."""

STOP_S = 10.0
"""What waits for so long after SIGTERM waits for a rank that is gone, and a heart that then stands still for
so long is that of one: torchrun sends the signal when a rank is gone, and NCCL does not notice."""


def _end(report: str) -> None:
    if report:
        print(f"error: {report}", file=sys.stderr, flush=True)
    os._exit(1)


def _said_once(store: dist.Store, report: str, about: str = "the end") -> str:
    """The report for the first rank that has one about this; "" for the others, which keep silent."""
    with contextlib.suppress(dist.DistError):
        return report if store.add(f"watch/said/{about}", 1) == 1 else ""
    return report


class Asked:
    """When this process was asked to end: known here also while the main thread cannot run a handler."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def seconds(self) -> float:
        """How long ago; 0 if it was not."""
        with contextlib.suppress(BlockingIOError):
            if {signal.SIGTERM, signal.SIGINT} & set(os.read(self._read, 64)) and self._at is None:
                self._at = time.monotonic()
        return 0.0 if self._at is None else time.monotonic() - self._at

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._read)
        os.close(self._write)


class Watch:
    """Follows the exchanges of one rank; without `start` it does nothing but keep the position."""

    def __init__(self) -> None:
        self.step = 0
        self._waits: deque[tuple[str, float, int | None]] = deque()
        self._ticks: Ticks | None = None
        self._progress = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked: Asked | None = None

    def start(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        slow_s: float,
        timeout_s: float,
        end: Callable[[str], None] = _end,
    ) -> None:
        """Begins to watch. `end` is called when this process should not go on, with the report, or with ""
        where another rank has said one."""
        if threading.current_thread() is threading.main_thread():  # Python tells no other about signals
            self._asked = Asked()
        arguments = (store, rank, world, slow_s, timeout_s, end)
        self._thread = threading.Thread(target=self._run, args=arguments, name="nybble-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._asked is not None:
            self._asked.close()

    def begin(self, step: int) -> None:
        """Step `step` (counted from 1) begins, or a part of it."""
        self.step, self._progress = step, time.monotonic()

    @contextmanager
    def waiting(self, place: str, device: torch.device | None = None) -> Iterator[None]:
        """Within it this rank waits for others at `place`. On a GPU its stream does, beyond the end."""
        entry = (f"step {self.step}, {place}", time.monotonic(), None)
        with self._lock:
            self._waits.append(entry)
        yield
        tick = None
        if device is not None and device.type == "cuda":
            self._ticks = self._ticks or Ticks(device)
            tick = self._ticks.queue()  # may wait for room in a stream that is stuck, but not with the lock
        with self._lock:
            self._progress = time.monotonic()
            self._waits.remove(entry)
            if tick is not None:
                self._waits.append((*entry[:2], tick))

    def position(self) -> tuple[str, float, bool]:
        """(where this rank is, for how many seconds, whether it waits there for an exchange)."""
        with self._lock:
            while self._waits and self._passed(self._waits[0][2]):
                self._waits.popleft()
                self._progress = time.monotonic()
            if self._waits:
                place, since, _ = self._waits[0]
                return place, time.monotonic() - since, True
            return f"step {self.step}, between exchanges", time.monotonic() - self._progress, False

    def _passed(self, tick: int | None) -> bool:
        return tick is not None and self._ticks is not None and self._ticks.reached(tick)

    def _run(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        slow_s: float,
        timeout_s: float,
        end: Callable[[str], None],
    ) -> None:
        beat, warned = 0, ""
        last_seen: dict[int, tuple[int, float]] = {}
        while not self._stop.wait(BEAT_S):
            place, seconds, waits = self.position()
            if not waits and seconds >= COMPILING_S and compiling():
                place += ", compiling kernels"
            beat += 1
            asked = 0.0 if self._asked is None else self._asked.seconds()
            if waits and min(asked, seconds) >= STOP_S:
                report = f"rank {rank}: {place} for {seconds:.0f} s"
                end(_said_once(store, f"{report}; told to stop {asked:.0f} s ago, ended there"))
                return
            try:
                store.set(
                    f"watch/{rank}", json.dumps({"beat": beat, "at": place, "for_s": round(seconds, 1)})
                )
                if not asked and seconds < min(slow_s, DEAD_S / 4):
                    last_seen.clear()
                    continue
                others = _read(store, rank, world)
            except dist.DistError as error:
                if not self._stop.is_set():
                    end(f"rank {rank}: {place}: the ranks' store is gone, with its process: {error}")
                return
            limit_s = STOP_S if asked else DEAD_S
            dead = _dead(others, last_seen, limit_s)
            if dead:
                names = ", ".join(f"rank {r}, last at {others[r]['at']}," for r in dead)
                report = f"rank {rank}: {place}: {names} has not been heard of for {limit_s:.0f} s"
                end(_said_once(store, report))
                return
            report = f"rank {rank}: {place} for {seconds:.0f} s; " + "; ".join(
                _where(r, state, time.monotonic() - last_seen[r][1]) for r, state in others.items()
            )
            if waits and seconds >= timeout_s:
                end(_said_once(store, report + "; the limit is reached"))
                return
            if seconds >= slow_s and warned != place:
                warned = place
                if said := _said_once(store, f"slow: {report}", f"step {self.step}"):
                    print(said, file=sys.stderr, flush=True)


def _read(store: dist.Store, rank: int, world: int) -> dict[int, dict[str, Any]]:
    """The last heartbeat of every other rank that has had one."""
    found: dict[int, dict[str, Any]] = {}
    for other in range(world):
        if other != rank and store.check([f"watch/{other}"]):
            with contextlib.suppress(ValueError):
                found[other] = json.loads(store.get(f"watch/{other}"))
    return found


def _where(rank: int, state: dict[str, Any], silent_s: float) -> str:
    """Where another rank is, and since when."""
    if silent_s >= SILENT_S:
        return f"rank {rank}: not heard of for {silent_s:.0f} s, last at {state['at']}"
    return f"rank {rank}: {state['at']} for {state['for_s']:.0f} s"


def _dead(
    others: dict[int, dict[str, Any]], last_seen: dict[int, tuple[int, float]], limit_s: float
) -> list[int]:
    """Ranks whose heartbeat has been the same for `limit_s`; updates `last_seen`."""
    now, dead = time.monotonic(), []
    for other, state in others.items():
        beat, since = last_seen.get(other, (-1, now))
        if beat != state["beat"]:
            last_seen[other] = (state["beat"], now)
        elif now - since > limit_s:
            dead.append(other)
    return dead
