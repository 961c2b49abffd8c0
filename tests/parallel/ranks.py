"""Runs a function in several processes at once, with the environment that torchrun gives its workers."""

import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preload"])


def _serve() -> None:
    """Starts the server that ranks are forked from. It finds `preload` by PYTHONPATH alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def start(world: int, function: Callable[..., Any], *arguments: Any, **environment: str) -> "Job":
    """`function(*arguments)` in `world` processes; it must be importable by name."""
    _serve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)} | environment
    return Job(world, function, arguments, shared)


def run(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
    """What each rank returned; the traceback of one that failed is raised here. The first run may compile."""
    results = start(world, function, *arguments).wait(timeout)
    faults = [f"rank {rank}: {result}" for rank, (ok, result) in enumerate(results) if not ok]
    assert not faults, "\n".join(faults)
    return [result for _, result in results]


def launcher() -> tuple[Any, dict[str, str]]:
    """A store that outlives ranks, as torchrun's does, and the environment of those that use it."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return store, {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


class Job:
    def __init__(
        self, world: int, function: Callable[..., Any], arguments: tuple[Any, ...], shared: dict[str, str]
    ) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            mine, theirs = _context.Pipe(duplex=False)
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _context.Process(
                target=_work, args=(theirs, function, arguments, environment), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def wait(self, timeout: float) -> list[tuple[bool, Any]]:
        """(whether it went well, result or traceback) of each rank; (False, exit code) for one that was
        killed."""
        limit, results = time.monotonic() + timeout, []
        try:
            for pipe, process in zip(self.pipes, self.processes, strict=True):
                try:
                    answered = pipe.poll(max(0.0, limit - time.monotonic()))
                    results.append(pipe.recv() if answered else (False, f"no answer within {timeout} s"))
                except EOFError:
                    process.join(5)
                    results.append((False, process.exitcode))
            return results
        finally:
            for process in self.processes:
                process.join(max(0.1, min(5.0, limit - time.monotonic())))
                if process.is_alive():
                    process.kill()
                    process.join()


def _work(
    pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    try:
        result = (True, function(*arguments))
    except SystemExit as stop:
        result = (stop.code in (0, None), stop.code)
    except BaseException:
        result = (False, traceback.format_exc())
    sys.stdout.flush()
    pipe.send(result)
