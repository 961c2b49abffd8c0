"""The command line: `nybble VERB ...`, one function a verb.

Nothing heavy is imported here, so that `nybble --help` answers at once; each verb imports what it needs. A
problem that the user can mend ends with one line on stderr and status 1, a wrong flag with status 2, a bug
with its traceback.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from nybble.compiling import told

VERBS: dict[str, tuple[str, str]] = {
    "prepare": ("nybble.commands.prepare", "turn text into token shards"),
    "pretrain": ("nybble.commands.pretrain", "train a model from random weights"),
    "sft": ("nybble.commands.sft", "fine-tune a model on worked solutions of a task"),
    "rl": ("nybble.commands.rl", "train a model on the rewards of a task"),
    "sample": ("nybble.commands.sample", "generate text with a trained model"),
    "export": ("nybble.commands.export", "write the four-bit weights of training for serving programs"),
    "validate": ("nybble.commands.validate", "find what is wrong with a four-bit checkpoint"),
    "import": ("nybble.commands.import_", "bring a four-bit checkpoint back to a model that trains"),
    "quantize": ("nybble.commands.quantize", "write a model of any origin in four bits, and its error"),
    "recipes": ("nybble.commands.recipes", "list the recipes, or show one"),
    "compare": ("nybble.commands.compare", "train recipes side by side and say what each one costs"),
    "bench": ("nybble.commands.bench", "time the kernels of this device against its ceilings"),
    "inspect": ("nybble.commands.inspect", "show what a recipe does to a model, without training"),
}
"""Verb -> module with `main(arguments) -> status`, and its line of help."""

STATUS_INTERRUPTED = 130

FEW_CORES = 4
"""Cores of a machine on which other programs are likely to want one of those that threads wait on."""


def share_cores() -> None:
    """On few cores, let a thread of torch's that waits for the others sleep soon; before torch is loaded.

    Threads of OpenMP wait by spinning, for milliseconds. Beside one other busy program on two cores a step of
    the demo then takes 1.6 times as long as when they sleep, at times ten times. What the user sets stays.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores <= FEW_CORES and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names and texts that a terminal has no letters for
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from nybble import __version__

        print(f"nybble {__version__}")
        return 0
    if words[0] not in VERBS:
        return _fail(f"unknown verb {words[0]!r}{_suggest(words[0])}; see nybble --help", status=2)
    share_cores()
    try:
        run: Callable[[list[str]], int] = importlib.import_module(VERBS[words[0]][0]).main
        with told(_note):
            return run(words[1:])
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", STATUS_INTERRUPTED)
    except Exception as error:
        if debug or not _is_users(error):
            raise
        from nybble.errors import StoppedError
        from nybble.together import another_says

        status = error.status if isinstance(error, StoppedError) else 1
        if another_says(error):
            return status
        if isinstance(error, StoppedError):
            print(_sentence(error), file=sys.stderr)
            return status
        return _fail(_sentence(error))


def usage() -> str:
    """The help of the whole."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {line}" for verb, (_, line) in VERBS.items())
    return (
        "usage: nybble VERB [OPTIONS]\n\n"
        "Train language models in four bits, end to end.\n\n"
        f"{verbs}\n\n"
        "nybble VERB --help explains a verb; --debug shows the traceback of an error; --version the version."
    )


def _is_users(error: Exception) -> bool:
    """Whether the user can mend it: a problem that Nybble names, of the file system, or of memory."""
    from nybble.errors import NybbleError

    return isinstance(error, NybbleError | OSError) or _ended_memory(error)


def _ended_memory(error: Exception) -> bool:
    """Whether a device or the machine has no memory left, which torch says in words of its own."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _sentence(error: Exception) -> str:
    if _ended_memory(error):
        told = " ".join(str(error).split())[:200] or type(error).__name__
        return (
            f"out of memory: {told}; take a smaller model, fewer tokens at once, or a device with more memory"
        )
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return where + error.strerror
    return " ".join(str(error).split())


def _fail(sentence: str, status: int = 1) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return status


def _note(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _suggest(verb: str) -> str:
    import difflib

    near = difflib.get_close_matches(verb, VERBS, n=1)
    return f"; did you mean {near[0]}?" if near else ""
