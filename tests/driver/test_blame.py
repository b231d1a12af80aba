"""The error names the rank that failed first. One test per rule of blame, and the error that the user sees."""

import copy
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from failing import LockedError, PlainError, failure
from flytekitplugins.daskpytorch import GangError, GangHungError, GangStartError, PreemptedError, WorkerLostError
from flytekitplugins.daskpytorch.driver.blame import (
    IS_FINAL,
    AttemptFailure,
    FailurePolicy,
    error_of,
    find_root_failure,
    from_user,
)
from flytekitplugins.daskpytorch.protocol.failure import Failure, GpuFaultError, RankExit, is_of_watchdog


def raised_in(path: str, error: Exception, *, by: str = "/usr/lib/site-packages/a_client.py") -> Failure:
    """The record of an exception of a call that code in this file has made, as a rank makes it."""
    names: dict[str, Any] = {"error": error.with_traceback(None)}
    exec(compile("def call():\n    raise error", path, "exec"), names)
    exec(compile("def function():\n    call()", by, "exec"), names)
    with pytest.raises(type(error)) as caught:
        names["function"]()
    return Failure.of(caught.value, 0.0)


class DistBackendError(RuntimeError):
    """Named as torch names what a rank raises when its peer has gone."""


def rank_exit(
    rank: int, exitcode: int | None = 1, *, error: BaseException | None = None, time: float = 0.0, **how: Any
) -> RankExit:
    return RankExit(
        rank=rank,
        worker=f"tcp://10.0.0.{rank + 1}:4000",
        host=f"node-{rank}",
        exitcode=exitcode,
        failure=failure(error, time) if error is not None else None,
        time=time,
        **{"log_tail": "", **how},
    )


TIMED_OUT = (
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST) ran for 600021 ms"
)
"""What torch 2.8 says when its watchdog aborts."""
HANG = "it hangs: no sign of life for 3.0 s\nWhat all ranks were doing:\nrank 0: train.py, line 7"

# ---- The rules: each kind of end, from the one most to blame to the one least ---------------------------------------

BY_BLAME: list[Callable[[int, float], RankExit]] = [
    lambda rank, time: rank_exit(rank, error=ValueError("bad batch"), time=time),
    lambda rank, time: rank_exit(rank, -signal.SIGSEGV, time=time),
    lambda rank, time: rank_exit(rank, -signal.SIGKILL, out_of_memory=True, time=time),
    lambda rank, time: rank_exit(rank, None, time=time),
    lambda rank, time: rank_exit(rank, 143, stopped=True, hang=HANG, time=time),
    lambda rank, time: rank_exit(rank, error=RuntimeError("Connection closed by peer [10.0.0.1]:4711"), time=time),
    lambda rank, time: rank_exit(rank, 143, stopped=True, time=time),
]


@pytest.mark.parametrize("better", range(len(BY_BLAME) - 1))
def test_a_cause_is_blamed_before_an_earlier_consequence(better: int) -> None:
    for worse in range(better + 1, len(BY_BLAME)):
        exits = [BY_BLAME[worse](0, 1.0), BY_BLAME[better](1, 9.0)]
        assert find_root_failure(exits).rank == 1
        assert find_root_failure(reversed(exits)).rank == 1


@pytest.mark.parametrize("kind", range(len(BY_BLAME)))
def test_first_in_time_is_to_blame_among_equals(kind: int) -> None:
    exits = [BY_BLAME[kind](rank, time) for rank, time in enumerate([3.0, 1.0, 2.0])]
    assert find_root_failure(exits).rank == 1


def test_time_of_an_exception_is_when_it_was_raised_not_when_its_rank_ended() -> None:
    slow_to_end = RankExit(**{**vars(rank_exit(0, error=ValueError(), time=1.0)), "time": 5.0})
    quick_to_end = RankExit(**{**vars(rank_exit(1, error=ValueError(), time=2.0)), "time": 3.0})
    assert find_root_failure([quick_to_end, slow_to_end]).rank == 0


def test_abort_by_nccls_watchdog_alone_is_infrastructure_unless_the_collectives_differ() -> None:
    aborted = rank_exit(0, -signal.SIGABRT, watchdog=TIMED_OUT)
    assert aborted.is_infrastructure
    assert "SIGABRT of torch's NCCL watchdog, which said: what():  [PG ID 0 PG GUID 0(default_pg) Rank 1]" in str(
        error_of(aborted, 2)
    )
    assert not replace(aborted, difference="rank 1 has not called collective 2").is_infrastructure


@pytest.mark.parametrize(
    ("line", "is_of_group"),
    [
        (TIMED_OUT, True),
        ("[E ProcessGroupNCCL.cpp:684] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(", True),
        ("Process group watchdog thread terminated with exception: NCCL error: remote process exited", True),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", True),
        ("[TC] Aborting process on rank 1 due to timeout - collective operation timed out", True),
        ("[TC] Aborting process on rank 1 due to error - nccl hit async error: ncclRemoteError", True),
        ("Process group watchdog thread terminated with exception: CUDA error: device-side assert", False),
        ("Process group watchdog thread terminated with exception: NCCL error: unhandled cuda error", False),
        ("my own watchdog barks", False),
        ("what():  [enforce fail at gloo/transport/tcp/pair.cc:447] op.preamble.length <= op.nbytes", False),
    ],
)  # fmt: skip
def test_line_of_nccls_watchdog_is_known(line: str, is_of_group: bool) -> None:
    assert is_of_watchdog(line) == is_of_group


class NVMLError_GpuIsLost(Exception):  # noqa: N801, N818 - as nvidia-ml-py names it
    """What that library raises for such a GPU."""


NCCL_CUDA = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable'"),
        RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
        RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
        RuntimeError("NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at PeerToPeerAccess.cpp"),
        DistBackendError(f"{NCCL_CUDA}Cuda failure 802 'system not yet initialized'"),
        DistBackendError(f"{NCCL_CUDA}Cuda failure 214 'uncorrectable ECC error encountered'"),
        DistBackendError(f"{NCCL_CUDA}nvmlDeviceGetHandleByIndex(0) failed: Unknown Error"),
        NVMLError_GpuIsLost("GPU is lost"),
    ],
)
def test_broken_gpu_is_infrastructure_that_the_message_names_with_its_host(error: Exception) -> None:
    wrapper = ValueError("the step failed")
    wrapper.__cause__ = error
    for each in (error, wrapper):
        exit_ = replace(rank_exit(1, error=each), gpu="GPU 3 (UUID GPU-8f2c)")
        assert exit_.is_infrastructure
        assert not exit_.is_consequence
        raised = error_of(exit_, 2)
        assert type(raised) is WorkerLostError
        assert "rank 1 of 2 failed on node-1 (tcp://10.0.0.2:4000): GPU 3 (UUID GPU-8f2c) of host" in str(raised)
        assert "Traceback of rank 1" in str(raised)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1131"),  # memory is short
        ValueError("uncorrectable ECC error"),
    ],
)
def test_error_that_code_may_cause_is_no_broken_gpu(error: Exception) -> None:
    exit_ = replace(rank_exit(1, error=error), gpu="GPU 3")
    assert not exit_.is_infrastructure
    assert not exit_.is_consequence
    assert not replace(rank_exit(1, error=RuntimeError("uncorrectable ECC error")), gpu="").is_infrastructure


def test_own_exception_counts_even_if_the_rank_was_stopped_while_it_ended() -> None:
    exits = [
        rank_exit(0, error=RuntimeError("Connection closed by peer"), time=1.1),
        rank_exit(1, 143, error=ValueError("the cause"), time=1.0, stopped=True),
    ]
    assert find_root_failure(exits).rank == 1
    assert not exits[1].is_consequence


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("whatever"),
        BrokenPipeError(),
        OSError("[c10d] The client socket has timed out after 600000ms"),
    ],
)
@pytest.mark.parametrize(
    ("path", "is_consequence"),
    [
        ("/usr/lib/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/usr/lib/site-packages/flytekitplugins/daskpytorch/rank/main.py", True),
        pytest.param(socket.__file__, False, id="the user's socket"),
        ("/usr/lib/site-packages/urllib3/connection.py", False),
        ("/usr/lib/site-packages/flytekitplugins/daskpytorch/data/bucket.py", False),
    ],
)
def test_error_of_a_socket_is_a_consequence_where_the_group_has_it(
    error: Exception, path: str, is_consequence: bool
) -> None:
    assert raised_in(path, error).is_consequence == is_consequence
    assert raised_in(socket.__file__, error, by=path).is_consequence == is_consequence  # that the call has opened


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[../third_party/gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"), True),
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (DistBackendError("anything at all"), True),
        (with_cause(ValueError("failed"), DistBackendError("aborted")), True),
        (with_cause(RuntimeError("the data cannot be read: Connection refused"), ConnectionRefusedError()), False),
        (ValueError("the connection was refused by the user"), False),
        (ConnectionError("the user's database is not there"), False),
        (ConnectionResetError(), False),
        (BrokenPipeError(), False),
        (TimeoutError("timed out waiting for the user's database"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (FileNotFoundError(2, "No such file", "data.csv"), False),
        (MemoryError(), False),
        (DistBackendError(f"{NCCL_CUDA}Cuda failure 2 'out of memory'"), False),
        (DistBackendError(f"{NCCL_CUDA}Failed to CUDA calloc async 67108864 bytes"), False),
        (SystemExit(0), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_loss_of_a_peer_reads_as_a_consequence_and_an_own_error_does_not(
    error: BaseException, is_consequence: bool
) -> None:
    assert failure(error).is_consequence == is_consequence


def test_position_is_where_the_exception_was_raised_or_else_the_newest_step() -> None:
    raised = RankExit(**{**vars(rank_exit(0)), "failure": failure(ValueError(), position=(5, 2)), "step": 4})
    assert raised.position == (5, 2)
    assert rank_exit(0, None, step=7).position == (7, None)
    assert rank_exit(0, None).position == (None, None)


# ---- The error_of ----------------------------------------------------------------------------------------------------


def test_verdict_on_an_exception_is_that_exception_caused_by_a_gang_error() -> None:
    exits = [
        rank_exit(0, error=RuntimeError("Connection closed by peer"), time=1.0),
        rank_exit(1, error=PlainError("bad batch"), time=2.0, log_tail="epoch 3\nstep 17\n"),
    ]
    error = error_of(find_root_failure(exits), 2)
    assert type(error) is PlainError
    assert error.args == ("bad batch",)
    cause = error.__cause__
    assert type(cause) is GangError
    assert (cause.rank, cause.worker, cause.host) == (1, "tcp://10.0.0.2:4000", "node-1")
    assert cause.cause == "PlainError: bad batch"
    assert cause.log_tail == "epoch 3\nstep 17\n"
    assert "in _users_function" in cause.rank_traceback


def test_verdicts_text_has_rank_host_worker_traceback_and_log() -> None:
    error = error_of(rank_exit(1, error=LockedError("bad batch"), log_tail="epoch 3\nstep 17\n"), 4)
    assert type(error) is GangError
    first, *rest = str(error).splitlines()
    assert first == "rank 1 of 4 failed on node-1 (tcp://10.0.0.2:4000): LockedError: bad batch"
    assert "Traceback of rank 1:" in rest
    assert any(line.endswith("in _users_function") for line in rest)
    assert rest[-2:] == ["epoch 3", "step 17"]


class OutOfMemoryError(RuntimeError):
    """Named as torch names an error of too little memory on a GPU."""


OF_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1125899906842624 bytes. Error code 12 (Cannot allocate memory)"
)


def on_gpu(error: Exception) -> RankExit:
    return replace(rank_exit(0, error=error), gpu="GPU 3")


def differing(exitcode: int = 1, **how: Any) -> RankExit:
    return replace(rank_exit(0, exitcode, **how), difference="rank 1 has not called collective 2")


@pytest.mark.parametrize(
    ("exit_", "type_", "kind", "said", "exit_code"),
    [
        (rank_exit(0, error=ValueError("bad batch")), GangError, "exception", "ValueError: bad batch", 1),
        (rank_exit(0, error=ValueError(), out_of_memory=True, hang=HANG), GangError, "exception", "ValueError", 1),
        (rank_exit(0, error=RuntimeError("Connection closed by peer")), GangError, "exception", "closed by peer", 1),
        (rank_exit(0, error=KeyboardInterrupt()), GangError, "exception", "KeyboardInterrupt", 1),
        (rank_exit(0, error=SystemExit(3)), GangError, "exit", "SystemExit", 3),
        (rank_exit(0, 3), GangError, "exit", "exit code 3", 3),
        *(
            (rank_exit(0, error=error), GangError, "memory", "memory", 1)
            for error in [
                OutOfMemoryError("CUDA out of memory"),
                MemoryError("out of memory"),
                RuntimeError(OF_ALLOCATOR),
                RuntimeError("CUDA error: out of memory"),
                with_cause(ValueError("memory"), OutOfMemoryError("CUDA out of")),
                DistBackendError("Cuda failure 2 'out of memory'"),
            ]
        ),
        (rank_exit(0, -signal.SIGKILL, out_of_memory=True), GangError, "memory", "killed for memory", -9),
        (rank_exit(0, -signal.SIGSEGV), GangError, "signal", "signal 11, SIGSEGV", -11),
        (rank_exit(0, -signal.SIGKILL), WorkerLostError, "signal", "SIGKILL", -9),
        (rank_exit(0, -signal.SIGTERM), WorkerLostError, "signal", "SIGTERM", -15),
        (rank_exit(0, None), WorkerLostError, "lost", "its worker was lost", None),
        (
            rank_exit(0, -signal.SIGABRT, watchdog=TIMED_OUT),
            WorkerLostError,
            "lost",
            "signal 6, SIGABRT of torch's",
            -6,
        ),
        (on_gpu(RuntimeError("CUDA error: uncorrectable ECC error")), WorkerLostError, "lost", "GPU 3 of host", 1),
        (on_gpu(GpuFaultError("its clocks are slowed down")), WorkerLostError, "lost", "clocks are slowed down", 1),
        (rank_exit(0, 143, stopped=True, hang=HANG), GangHungError, "hang", "it hangs", None),
        (rank_exit(0, -signal.SIGKILL, stopped=True, hang=HANG), GangHungError, "hang", "it hangs", None),
        (differing(error=DistBackendError("timed out after")), GangError, "desync", "rank 1 has not", 1),
        (differing(-signal.SIGABRT, watchdog=TIMED_OUT), GangError, "desync", "rank 1 has not", -6),
    ],
)
def test_each_end_of_a_rank_has_its_error_kind_words_and_exit_code(
    exit_: RankExit, type_: type[GangError], kind: str, said: str, exit_code: int | None
) -> None:
    error = error_of(exit_, 2)
    gang_error = error if isinstance(error, GangError) else error.__cause__
    assert isinstance(gang_error, GangError)
    assert (type(gang_error), gang_error.kind, gang_error.exit_code) == (type_, kind, exit_code)
    assert said in str(gang_error)


def test_errors_without_a_rank_have_the_kind_of_their_class() -> None:
    kinds = {GangStartError: "start", PreemptedError: "preempted", WorkerLostError: "lost", GangHungError: "hang"}
    assert {cls: cls("message").kind for cls in kinds} == kinds


def test_verdict_says_what_went_before_and_why_it_ends_there() -> None:
    failed = rank_exit(0, 3, step=17)
    error = error_of(failed, 2, "max_restarts=2 is used up", ["rank 1: first loss", "rank 0: second loss"])
    first, _, refusal, *history = str(error).splitlines()
    assert first.startswith("rank 0 of 2 failed on node-0 (tcp://10.0.0.1:4000) after step 17: its process ended")
    assert vars(error)["step"] == 17
    assert refusal == "Not started again, because max_restarts=2 is used up. Failures before this one:"
    assert history == ["rank 1: first loss", "rank 0: second loss"]


@pytest.mark.parametrize("cls", [GangError, WorkerLostError, PreemptedError, GangHungError, GangStartError])
def test_gang_errors_pickle_with_all_their_fields(cls: type[GangError]) -> None:
    fields = {"rank": 1, "worker": "w", "host": "h", "cause": "c", "step": 3, "rank_traceback": "t", "log_tail": "l"}
    error = cls("message", kind="desync", **fields)
    error.add_note("seen by a wrapper")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert again.args == ("message",)
        assert {name: getattr(again, name) for name in fields} == fields
        assert again.kind == "desync"


def raised_below_ours(error: Exception, path: str = "/venv/flytekitplugins/daskpytorch/driver/brain.py") -> Exception:
    """An error of a function that something of ours has called."""

    def users_own() -> None:
        raise error

    names: dict[str, Any] = {"users_own": users_own}
    exec(compile("def decide():\n    users_own()", path, "exec"), names)
    with pytest.raises(type(error)) as caught:
        names["decide"]()
    return caught.value.with_traceback(caught.tb.tb_next)  # without this function's frame


def frames_of(error: Exception) -> list[str]:
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]


def test_a_failed_gangs_traceback_begins_with_the_users_frames() -> None:
    error = raised_below_ours(KeyError("x"))
    assert frames_of(error) == ["decide", "users_own"]
    error.__cause__ = GangError("rank 1 failed")
    assert frames_of(from_user(error)) == ["users_own"]


def test_an_error_of_the_drivers_own_keeps_its_frames() -> None:
    assert frames_of(from_user(raised_below_ours(KeyError("x")))) == ["decide", "users_own"]


# ---- The limits of restarts: two budgets, and no third attempt after the same error at the same step


ERROR = AttemptFailure(what="rank 1", cause="ValueError: bad batch", position=(3, 1), is_infrastructure=False)
OTHER = replace(ERROR, cause="OSError: disk")
LOSS = AttemptFailure(what="rank 0", cause="its worker was lost", position=(3, None), is_infrastructure=True)
NOWHERE = replace(ERROR, position=(None, 0))
FINAL = replace(ERROR, is_final=True)
RAISED = replace(ERROR, is_stuck=True)
SHORT = replace(RAISED, cause="killed for memory", kind="memory", adapts=True)
ERRORS_USED_UP = "max_restarts=2 is used up by errors of the function"
LOSSES_USED_UP = "max_restarts=2 is used up by losses of infrastructure"
THE_SAME = "the same error came at the same step twice"


def at(step: int | None, moves: int | None = 0) -> AttemptFailure:
    return replace(ERROR, position=(step, moves))


@pytest.mark.parametrize(
    ("limit", "before", "failure", "refusal"),
    [
        (1, [], ERROR, None),
        (1, [], LOSS, None),
        (0, [], ERROR, "max_restarts is 0"),
        (0, [], LOSS, "max_restarts is 0"),
        (2, [LOSS, LOSS], LOSS, LOSSES_USED_UP),
        (2, [at(1), at(2)], at(3), ERRORS_USED_UP),
        (2, [LOSS, at(1), LOSS, at(2)], LOSS, LOSSES_USED_UP),
        (2, [LOSS, at(1), LOSS, at(2)], at(3), ERRORS_USED_UP),
        (2, [LOSS, LOSS], ERROR, None),
        (100, [ERROR], ERROR, THE_SAME),
        (3, [ERROR, LOSS], ERROR, THE_SAME),
        (3, [ERROR], replace(ERROR, what="rank 7"), THE_SAME),
        (3, [NOWHERE], NOWHERE, THE_SAME),
        (3, [LOSS, LOSS], LOSS, None),
        (3, [ERROR], at(4, 1), None),
        (3, [ERROR], at(3, 2), None),
        (3, [ERROR], at(None, None), None),
        (3, [ERROR], OTHER, None),
        (3, [ERROR, OTHER], ERROR, None),  # the same counts only right after its like
        (3, [], FINAL, IS_FINAL),
        (3, [LOSS], FINAL, IS_FINAL),
        (1, [SHORT, SHORT], SHORT, None),  # at the same step, and without a checkpoint
        (1, [SHORT, SHORT, SHORT], SHORT, "a limit of 3 is used up by lacks of memory"),
        (1, [SHORT, LOSS, SHORT], ERROR, None),
        (3, [ERROR, SHORT], ERROR, THE_SAME),
        (0, [], SHORT, "max_restarts is 0"),
        (
            3,
            [],
            replace(SHORT, adapts=False),
            "no checkpoint had been saved since the start, and the same steps would lead to the same error",
        ),
    ],
)
def test_a_failure_is_forgiven_or_the_reason_is_said(
    limit: int, before: list[AttemptFailure], failure: AttemptFailure, refusal: str | None
) -> None:
    policy = FailurePolicy(limit)
    for each in before:
        assert policy.refusal(each) is None
        policy.failures.append(each)
    for _ in range(2):  # asking costs nothing
        assert policy.refusal(failure) == refusal
