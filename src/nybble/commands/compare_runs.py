"""How the runs of a comparison are made: one after the other, or side by side in processes of their own."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from nybble.analysis.choices import accuracy, questions
from nybble.analysis.summary import CHOICES, DIVERGED, RunSummary
from nybble.commands.compare_task import Task
from nybble.errors import NonFiniteError, NybbleError, StoppedError

if TYPE_CHECKING:
    from nybble.models import CausalLM

QUESTIONS_AT_A_TIME = {"cpu": 8, "cuda": 100}


def run(task: Task) -> RunSummary:
    """Makes, or ends, one run. What it prints goes to log.txt of its folder.

    A run that meets a NaN or an infinity has diverged, which is a result. Raises StoppedError for one that a
    signal stopped, NybbleError for one that failed.
    """
    folder = task.folder
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            _make(task)
        except NonFiniteError as error:
            (folder / DIVERGED).write_text(json.dumps({"reason": str(error)}) + "\n", encoding="utf-8")
        except NybbleError:
            raise
        except Exception as error:  # to be told in one line, and in a process that may not know its class
            traceback.print_exc(file=log)
            reason = (str(error).splitlines() or [""])[0]
            raise NybbleError(f"{type(error).__name__}: {reason} (all of it in {folder}/log.txt)") from None
        finally:
            _free_gpu()
    summary = task.summary()
    assert summary is not None
    return summary


def _make(task: Task) -> None:
    from nybble.checkpoints.hub import load_model
    from nybble.pretrain.device import pick_device
    from nybble.pretrain.start import pretrain

    saved = task.saved
    if task.summary() is None or not (saved or task.done):
        finish = partial(_answer, task) if task.questions else None
        status = pretrain(task.config, resume=saved, overwrite=not saved, finish=finish)
        if status:
            if (parent := parent_process()) is not None and not parent.is_alive():
                os._exit(status)  # nobody is left to report to
            raise StoppedError(f"{task.name} was stopped; the same line goes on with it", status)
    if not task.done:
        _answer(task, load_model(task.folder, device=pick_device(task.config.device)).model)


def _answer(task: Task, model: CausalLM) -> None:
    """Multiple-choice accuracy of the trained model, with the precision it was trained in."""
    from nybble.data import Dataset

    asked = questions(Dataset.open(task.config.data), task.questions)
    flex, model.flex = model.flex, False  # compiling for these few passes would take longer than they do
    share = accuracy(model, asked, batch=QUESTIONS_AT_A_TIME[model.lm_head.weight.device.type])
    model.flex = flex
    found = {"questions": len(asked), "accuracy": share}
    (task.folder / CHOICES).write_text(json.dumps(found) + "\n", encoding="utf-8")


def _free_gpu() -> None:
    """Give back what the graphs and the weights of a run held, which refer to each other."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _Signal(KeyboardInterrupt):
    """SIGTERM or SIGINT, where nothing else takes it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


Outcome = tuple[Task, RunSummary | NybbleError]


def run_all(tasks: list[Task], jobs: int, made: Callable[[Task, RunSummary], None]) -> list[Task]:
    """Makes the runs, `jobs` at a time, in processes of their own; in this one if jobs is 1 on a CPU.

    `made` is called after each. Returns those that failed. Raises StoppedError after a signal, once the runs
    in progress have stopped.
    """

    def stop(number: int, _: Any) -> None:
        raise _Signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    alone = jobs == 1 and not any(task.config.graph for task in tasks)
    outcomes = _one_by_one(tasks) if alone else _side_by_side(tasks, min(jobs, len(tasks)))
    count, failed = 0, []
    try:
        for task, outcome in outcomes:
            count += 1
            if isinstance(outcome, StoppedError):
                raise outcome
            place = f"[{count}/{len(tasks)}] {task.name}"
            if isinstance(outcome, NybbleError):
                failed.append(task)
                print(f"{place}: failed: {outcome}", flush=True)
            else:
                print(f"{place}: {outcome.text()}", flush=True)
                made(task, outcome)
    except (_Signal, StoppedError) as caught:
        outcomes.close()
        status = caught.status if isinstance(caught, StoppedError) else 128 + caught.number
        left = len(tasks) - count + isinstance(caught, StoppedError)
        raise StoppedError(
            f"stopped: {left} of {len(tasks)} runs are left; the same line makes them", status
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return failed


def _one_by_one(tasks: list[Task]) -> Generator[Outcome]:
    for task in tasks:
        yield task, _outcome(partial(run, task))


def _outcome(make: Callable[[], RunSummary]) -> RunSummary | NybbleError:
    try:
        return make()
    except NybbleError as error:
        return error
    except BrokenProcessPool:
        return NybbleError("its process was killed, perhaps for memory; try fewer --jobs")
    except Exception as error:
        return NybbleError(f"{type(error).__name__}: {error}")


def _side_by_side(tasks: list[Task], jobs: int) -> Generator[Outcome]:
    """A thread a lane hands one run after the other to a process of its own.

    The process is kept, with what it has compiled, until a run fails in it: a GPU's error spoils the process.
    """
    context = get_context("spawn")
    waiting, outcomes = SimpleQueue[Task](), SimpleQueue[Outcome]()
    for task in tasks:
        waiting.put(task)
    stopping = Event()

    def lane(number: int) -> None:
        pool: ProcessPoolExecutor | None = None
        while not stopping.is_set():
            try:
                task = waiting.get_nowait()
            except Empty:
                break
            pool = pool or ProcessPoolExecutor(1, context, initializer=_begin, initargs=(number,))
            outcome = _outcome(pool.submit(run, task).result)
            outcomes.put((task, outcome))
            if isinstance(outcome, NybbleError):
                pool.shutdown()
                pool = None
        if pool is not None:
            pool.shutdown()

    lanes = [Thread(target=lane, args=(number,)) for number in range(jobs)]
    for thread in lanes:
        thread.start()
    try:
        for _ in tasks:
            yield outcomes.get()
    except BaseException:
        stopping.set()
        asked: set[int] = set()
        while any(thread.is_alive() for thread in lanes):
            for worker in active_children():  # some may have begun just now
                if worker.pid is not None and worker.pid not in asked:
                    asked.add(worker.pid)
                    worker.terminate()
            for thread in lanes:
                thread.join(0.1)
        raise
    finally:
        for thread in lanes:
            thread.join()


def _begin(number: int) -> None:
    """In a worker: take a GPU, and be told to stop by the comparison's own process alone.

    Also when that process is gone, which leaves no other sign.
    """
    import torch

    os.setpgrp()  # a terminal's Ctrl-C reaches the whole group, and two signals would end a run unsaved
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=follow, daemon=True).start()
