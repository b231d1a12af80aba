"""The driver's program in a rank: its sources, `__main__` and logging, and the calls of a staying gang."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import logging
import os
import queue
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Never

from flytekitplugins.daskpytorch.context import StopSignal
from flytekitplugins.daskpytorch.protocol.code import MAX_DATA_BYTES, Program, Sources
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.function import unpack_call, values
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, CallOrder, Finish, Forget, NextCall
from flytekitplugins.daskpytorch.protocol.script import completed
from flytekitplugins.daskpytorch.rank.link import GangLink


def import_first_from(sources: Sources) -> None:
    """Make imports look first in the folders of the user's sources.

    For copies of the driver's files, warnings and tracebacks name the driver's files. `__file__` is the copy's path, so
    that the program finds neighbouring files.
    """
    sys.path[:] = [*sources.folders, *(folder for folder in sys.path if folder not in sources.folders)]
    if not sources.originals:
        return

    def find_in(path: str) -> FileFinder:
        if not Path(path).is_relative_to(sources.folders[0]):
            raise ImportError
        copied: Any = functools.partial(_Copied, sources.originals)
        return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (copied, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, find_in)
    if sources.script is not None and (original := sources.originals.get(str(sources.script))):
        _remember(original, sources.script.read_text(encoding="utf-8", errors="replace"))


def explain(error: BaseException, sources: Sources) -> None:
    if sources.originals and isinstance(error, FileNotFoundError):
        error.add_note(
            f"This rank's host, {socket.gethostname()}, has a copy of the driver's sources in {sources.folders[0]}, "
            f"with up to {MAX_DATA_BYTES >> 20} MiB of files beside the code, the smallest first. "
            "The driver's other files are not there: pass them as arguments, by storage, or in the image."
        )


class _Copied(SourceFileLoader):
    def __init__(self, originals: Mapping[str, str], fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._originals = originals

    def path_stats(self, path: Any) -> Never:
        """Python must use no cached bytecode, which would name the copy instead of the original."""
        raise OSError

    def source_to_code(  # type: ignore[override] # `SourceLoader.get_code` calls an instance's method
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> Any:
        original = self._originals.get(os.fspath(path), path)
        _remember(original, bytes(data).decode(errors="replace"))
        return super().source_to_code(data, original, _optimize=_optimize)


def _remember(path: str, text: str) -> None:
    """Make tracebacks show this text, whatever file this host has at the path."""
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


# ---- The program's state


def set_up_program(program: Program, script: Path | None) -> None:
    """Set `__main__`, command line and logging to the program's, without a run of the script.

    As under `multiprocessing`, `__main__` is also `__mp_main__`, the module name of objects from processes that this
    one spawns.
    """
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    main.__package__ = program.package
    main.__spec__ = ModuleSpec(program.module, None) if program.module else None
    if script is not None:
        main.__file__ = str(script)
    sys.argv[:] = [str(script or sys.argv[0]), *(program.arguments or ())]
    for name, text in program.cells.items():
        _remember(name, text)
    for name, log_level in program.levels.items():
        logging.getLogger(name).setLevel(log_level)
    if program.log_format is not None and not logging.root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(program.log_format)
        logging.root.addHandler(handler)


# ---- Calls of a gang that stays


@dataclass(eq=False)
class Server:
    """`serve` runs in the main thread. The thread that receives `orders` puts them there."""

    _link: GangLink
    _stop_signal: StopSignal
    _failure_of: Callable[[BaseException], Failure]
    orders: queue.SimpleQueue[CallOrder] = field(default_factory=queue.SimpleQueue)
    _present: Mapping[str, Any] = field(default_factory=dict)

    def serve(self) -> None:
        """Run calls until the gang closes, or until one ends after the rank's signal to stop."""
        self._present = dict(vars(sys.modules["__main__"]))
        while not isinstance(order := self._next(), Finish):
            if isinstance(order, Forget):
                values.pop(order.number, None)
                continue
            self._run(order)
            if self._stop_signal.has_fired:
                return

    def _next(self) -> CallOrder:
        with self._link.ledger.spending("waiting"):
            return self.orders.get()

    def _run(self, order: NextCall) -> None:
        self._link.progress.move()  # the time before was no hang
        self._link.progress.step = None
        value, failure = None, None
        try:
            with self._link.opened(order.call) as data:
                call = _unpacked(data, self._present)
            returned = completed(call)
            _wait_for_gpu()
            if order.keeps:
                values[order.number], returned = returned, None
            value = self._link.send_returned(returned)
        except BaseException as error:
            failure = self._failure_of(error)
        if failure is not None:
            gc.collect()  # the traceback's frames hold tensors
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or a closed one
                stream.flush()  # the output of a call comes before its end
        self._link.send(CallEnded(number=order.number, value=value, failure=failure))


def _unpacked(data: IO[bytes], present: Mapping[str, Any]) -> Callable[[], Any]:
    try:
        return unpack_call(data, present)
    except ModuleNotFoundError as error:
        error.add_note(
            "Ranks have the modules that were imported when their gang began: import this one, and begin anew."
        )
        raise


def _wait_for_gpu() -> None:
    """An error of the GPU must belong to the call that has caused it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
