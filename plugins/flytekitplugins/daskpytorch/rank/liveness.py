"""Tells where a rank is: its signs of life, the stacks of its threads, and its newest collectives. Runs in a rank."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.failure import DEFAULT_GROUP, MAX_COLLECTIVES, Collective, Recalled
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.rank.link import GangLink


def watch(order: RankOrder, link: GangLink) -> None:
    pulse, progress = order.job.pulse, link.progress
    if pulse is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: progress.move())

    def report() -> None:
        reported = -1
        while True:
            if (num_moves := progress.num_moves) != reported:
                reported = num_moves
                link.send_moves(reported)
            time.sleep(pulse)

    threading.Thread(target=report, name="daskpytorch-pulse", daemon=True).start()


def send_collectives(link: GangLink) -> None:
    if (recalled := recall()) is not None:
        link.send(recalled)


def expect_questions() -> None:
    """Also, SIGQUIT writes the main thread's stack to the log, a crash in C all stacks."""
    global _stacks_file
    faulthandler.enable()
    # A signal handler that reads other threads' frames while they change may crash (python/cpython#116008).
    faulthandler.register(signal.SIGQUIT, all_threads=False)
    _stacks_file = os.memfd_create("stacks")


def stacks() -> str:
    """Return all threads' stacks, or "" outside a rank's own process. Holds the GIL, so that they do not change."""
    if _stacks_file is None:
        return ""
    os.truncate(_stacks_file, 0)
    os.lseek(_stacks_file, 0, os.SEEK_SET)
    faulthandler.dump_traceback(_stacks_file, all_threads=True)
    return os.pread(_stacks_file, MAX_STACKS, 0).decode(errors="replace")


def show(stacks: str) -> None:
    """Write to standard error, without `sys.stderr`, whose lock a hanging thread may hold."""
    with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"\n{stacks}".encode())


MAX_STACKS = 64 << 10
_stacks_file: int | None = None
"""Descriptor, opened early: a rank that hangs may have too many. None outside a rank's own process."""


# ---- Collectives, from torch's flight recorder


HOOK = 0x6461736B
"""Key of this module's abort hook in torch's GPU backend, whose own hooks have small numbers."""


def recall(*, is_over: bool = False) -> Recalled | None:
    try:
        groups = [name for group in torch_parts.groups() for name in _names_of(group)]
        recorded = list(_recorders(has_nccl=any("nccl" in group for group in groups)))
        calls = (entry for entries in recorded for entry in entries if not entry["is_p2p"])
        entries = [entry for entry in calls if _group_of(entry) in groups]
        entries.sort(key=lambda entry: entry["time_created_ns"])
        collectives = [_collective(entry) for entry in entries[-MAX_COLLECTIVES:]]
        has_forgotten = any(min(entry["record_id"] for entry in entries) for entries in recorded if entries)
        numbers = {} if has_forgotten else dict.fromkeys(groups, 0)
        numbers |= {_group_of(entry): entry["collective_seq_id"] for entry in entries}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another version of torch
        return None
    return Recalled(groups=numbers, collectives=collectives, is_over=is_over)


def call_before_abort(report: Callable[[], None]) -> None:
    """Call `report` before an uncaught C++ exception aborts the process.

    gloo aborts a rank that receives a tensor of an unexpected shape, NCCL's watchdog one whose collective has timed
    out. Both throw in threads of C++: Python cannot report the cause later. Call this after each default process group
    that forms, whose GPU backend then gets its hook.
    """
    global _handler
    rank = os.getpid()

    def report_of_rank() -> None:
        if os.getpid() == rank:  # not a DataLoader's worker, which inherits the handler
            report()

    _hook_aborts(report_of_rank)
    if _set_terminate is None or _handler is not None:
        return

    def handler() -> None:
        try:
            report_of_rank()
        finally:
            previous()  # prints the exception, and aborts

    _handler = _HANDLER(handler)  # ctypes keeps no reference
    previous = _set_terminate(_handler)


def _hook_aborts(report: Callable[[], None]) -> None:
    """Torch 2.15's `nccl2` throws no exception before it aborts."""
    with contextlib.suppress(AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another torch
        for group in torch_parts.groups():
            backend = torch_parts.backend_on(group, "cuda")
            if getattr(backend, "supports_abort_hooks", False):
                backend.register_abort_hook(HOOK, report)


def _found() -> Callable[[object], Callable[[], None]] | None:
    try:
        found = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (AttributeError, OSError):
        return None
    found.restype, found.argtypes = _HANDLER, [_HANDLER]
    return found


_HANDLER = ctypes.CFUNCTYPE(None)
_handler: object = None
_set_terminate = _found()


def _names_of(group: Any) -> list[str]:
    return [_name(group.group_name, group.group_desc, backend) for backend in torch_parts.names_of_backends(group)]


def _group_of(entry: Mapping[str, Any]) -> str:
    name, described = entry["process_group"]
    return _name(name, described, entry["profiling_name"].partition(":")[0])


def _name(name: str, described: str, backend: str) -> str:
    backend = "nccl" if backend in torch_parts.NCCL_BACKENDS else backend
    if described == "default_pg":
        return f"{DEFAULT_GROUP} ({backend})"
    return f"group {name} ({backend})" if described == "undefined" else f"group {name} ({described}, {backend})"


def _recorders(*, has_nccl: bool) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield each recorder's newest entries. A full recorder forgets the entries with the smallest `record_id`."""
    for records in torch_parts.flight_records(has_nccl=has_nccl):
        yield pickle.loads(records).get("entries", ())  # noqa: S301 - by our own torch


def _collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        group=_group_of(entry),
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"].rpartition(":")[2],
        inputs=[tuple(sizes) for sizes in entry["input_sizes"]],
        outputs=[tuple(sizes) for sizes in entry["output_sizes"]],
        dtypes=entry["input_dtypes"] or entry["output_dtypes"],
        is_done=_is_done(entry),
        frames=[f'File "{at["filename"]}", line {at["line"]} in {at["name"]}' for at in entry["frames"]],
    )


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"
