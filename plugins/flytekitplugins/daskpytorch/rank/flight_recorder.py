"""Reads this rank's newest collectives from torch's flight recorder, which torch fills for gloo and NCCL.

Torch does not document the form of its records. Records of another form, and a torch without a flight recorder, give
no collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.failure import DEFAULT_GROUP, MAX_COLLECTIVES, Collective, Recalled

HOOK = 0x6461736B
"""Key of this module's abort hook among the hooks of torch's GPU backend. Torch's own hooks have small numbers."""


def recall() -> Recalled | None:
    """Return this rank's newest collectives. None if torch's flight recorder cannot be read. Safe in any thread."""
    try:
        groups = [name for group in torch_parts.groups() for name in _names_of(group)]
        has_nccl = any("nccl" in group for group in groups)
        calls = (entry for entry in _entries(has_nccl=has_nccl) if not entry["is_p2p"])
        entries = [entry for entry in calls if _group_of(entry) in groups]
        entries.sort(key=lambda entry: entry["time_created_ns"])
        collectives = [_collective(entry) for entry in entries[-MAX_COLLECTIVES:]]
        numbers = {_group_of(entry): entry["collective_seq_id"] for entry in entries}
        # Each backend of the default group numbers by itself.
        of_all = sum(number for group, number in numbers.items() if group.startswith(DEFAULT_GROUP))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another version of torch
        return None
    return Recalled(groups=groups, collectives=collectives, newest_of_all=of_all)


def call_before_abort(report: Callable[[], None]) -> None:
    """Call `report` before an uncaught C++ exception aborts the process.

    gloo aborts a rank that receives a tensor of an unexpected shape. NCCL's watchdog aborts a rank whose collective has
    timed out. Both throw the exception in threads of C++, so Python code cannot report the cause later. Call this
    function after each default process group that forms, whose GPU backend then gets its hook.
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
    """Call `report` before an existing GPU backend aborts the process. Torch 2.15's `nccl2` throws no exception."""
    with contextlib.suppress(AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another torch
        for group in torch_parts.groups():
            backend = torch_parts.backend_on(group, "cuda")
            if getattr(backend, "supports_abort_hooks", False):
                backend.register_abort_hook(HOOK, report)


def _found() -> Callable[[object], Callable[[], None]] | None:
    """Return libstdc++'s `std::set_terminate`, or None if the process cannot load libstdc++."""
    try:
        found = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (AttributeError, OSError):
        return None
    found.restype, found.argtypes = _HANDLER, [_HANDLER]
    return found


_HANDLER = ctypes.CFUNCTYPE(None)
_handler: object = None
_set_terminate = _found()  # once for all ranks of a fork server


def _names_of(group: Any) -> list[str]:
    """Return names for a process group, one for each backend, as each backend numbers its collectives by itself."""
    return [_name(group.group_name, group.group_desc, backend) for backend in torch_parts.names_of_backends(group)]


def _group_of(entry: Mapping[str, Any]) -> str:
    name, described = entry["process_group"]
    return _name(name, described, entry["profiling_name"].partition(":")[0])


def _name(name: str, described: str, backend: str) -> str:
    backend = "nccl" if backend in torch_parts.NCCL_BACKENDS else backend
    if described == "default_pg":
        return f"{DEFAULT_GROUP} ({backend})"
    return f"group {name} ({backend})" if described == "undefined" else f"group {name} ({described}, {backend})"


def _entries(*, has_nccl: bool) -> Iterator[Mapping[str, Any]]:
    for records in torch_parts.flight_records(has_nccl=has_nccl):
        yield from pickle.loads(records).get("entries", ())  # noqa: S301 - by our own torch


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
