"""The real fork server reports every end of a rank, and leaves no process if any part of the chain dies."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.fork_client import ForkServerClient
from flytekitplugins.daskpytorch.process.system import without_nannys
from processes import fork_server as own_fork_server
from processes import is_alive, ranks_of, until

pytestmark = pytest.mark.usefixtures("cold_fork_servers")


class Doing:
    """The first message to a rank, made so that opening it does something in the rank."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


class Rank:
    """A rank as its agent has it: a channel and the read end of its output. Its first message is its environment."""

    def __init__(self, client: ForkServerClient, key: int, first: Doing | None = None, **variables: str) -> None:
        self.channel, theirs = Pipe()
        output, output_of_rank = os.pipe()
        client.spawn(key, theirs.fileno(), output_of_rank)
        theirs.close()
        os.close(output_of_rank)
        self.output = os.fdopen(output, "rb", buffering=0)  # unbuffered, so that `wait` sees what is unread
        if first is not None:
            self.channel.send(without_nannys(os.environ) | variables)
            self.channel.send(first)

    @classmethod
    def running(cls, client: ForkServerClient, key: int, source: str, **variables: str) -> Rank:
        return cls(client, key, Doing(exec, textwrap.dedent(source)), **variables)

    def line(self) -> str:
        """The next line it writes."""
        return self.output.readline().decode().rstrip()


def next_exit(client: ForkServerClient) -> list[int]:
    return client.next_event() or client.next_event()


GENERATORS = """
    import multiprocessing, numpy, pickle, random, torch
    from flytekit.interfaces.random import random as flytekits
    states = {"torch": torch.get_rng_state(), "authkey": bytes(multiprocessing.current_process().authkey)}
    states |= {"numpy": numpy.random.get_state(), "random": random.getstate(), "flytekit": flytekits.getstate()}
    for name, state in states.items():
        states[name] = hash(pickle.dumps(state))
    print(states)
"""
"""A rank that shows the random generators that it was forked with; hashes of ranks of one server are alike."""

FAMILY = """
    import os, subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid)
    time.sleep(600)
"""
"""A rank with a process of its own, such as a DataLoader's worker."""


@pytest.fixture(scope="module", autouse=True)
def _no_server_is_left() -> Iterator[None]:
    fork_client.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client, "_imported_ahead", [])
        yield
    fork_client.shutdown()


@pytest.fixture
def client() -> Iterator[ForkServerClient]:
    with contextlib.closing(fork_client.connect()) as client:
        yield client


def await_end(*pids: int) -> None:
    until(lambda: not any(map(is_alive, pids)), "processes to end")


def pids_of(rank: Rank) -> list[int]:
    pids = [int(pid) for pid in rank.line().split()]
    assert pids
    assert all(map(is_alive, pids))
    return pids


# ---- How ranks end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "kept"), [("65536", None), ("1048576", "1048576")])
def test_server_is_started_with_the_users_setting_of_the_allocator_and_not_with_a_nannys(
    given: str, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", given)
    with contextlib.closing(fork_client.connect()):
        assert own_fork_server().environ().get("MALLOC_TRIM_THRESHOLD_") == kept
    fork_client.shutdown()


def test_no_generator_of_a_rank_is_seeded_as_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "_imported_ahead", ["numpy.random", "flytekitplugins.daskpytorch.flyte.context"])
    with contextlib.closing(fork_client.connect()) as client:
        first, second = (ast.literal_eval(Rank.running(client, key, GENERATORS).line()) for key in range(2))
    fork_client.shutdown()
    assert [name for name in first if first[name] == second[name]] == []


def test_what_a_rank_leaves_behind_when_it_ends_is_killed(client: ForkServerClient) -> None:
    rank = Rank.running(client, 0, FAMILY.replace("time.sleep(600)", "os._exit(0)"))
    pids = [int(pid) for pid in rank.line().split()]
    assert next_exit(client) == [0, 0]
    await_end(*pids)


def test_rank_has_torch_at_hand_cuda_untouched_and_collects_garbage(client: ForkServerClient) -> None:
    source = """
        import gc, os, sys
        torch = sys.modules["torch"]
        print(torch.cuda.is_initialized(), gc.isenabled(), os.getsid(0) == os.getpid(), os.getppid())
    """
    rank = Rank.running(client, 0, source)
    assert rank.line() == f"False True True {own_fork_server().pid}"


def sockets_of(pid: int) -> set[str]:
    links = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return {link for link in links if link.startswith("socket:")}


def test_rank_holds_no_socket_of_the_servers_clients(client: ForkServerClient) -> None:
    # It would hide the server's end from them.
    Rank(client, 0, Doing(os._exit, 0))
    assert next_exit(client) == [0, 0]
    before = sockets_of(own_fork_server().pid)
    with contextlib.closing(fork_client.connect()) as other:
        Rank(other, 0, Doing(os._exit, 0))
        assert next_exit(other) == [0, 0]
        others = sockets_of(own_fork_server().pid) - before
        [pid, _] = pids_of(Rank.running(client, 1, FAMILY))
        assert others
        assert not others & sockets_of(pid)


# ---- Fresh interpreters ----------------------------------------------------------------------------------------------


def test_rank_with_an_early_variable_is_a_fresh_interpreter_that_dies_with_the_server() -> None:
    fork_client.shutdown()
    with contextlib.closing(fork_client.connect()) as client:
        Rank(client, 0, Doing(os._exit, 7), TORCH_LOGS="+dynamo")
        source = """
            import os, sys, time
            print("torch" in sys.modules, os.getsid(0) == os.getpid(), os.getppid())
            print("to stderr", file=sys.stderr)
            print(os.getpid())
            time.sleep(600)
        """
        rank = Rank.running(client, 1, source, TORCH_LOGS="+dynamo")
        server = own_fork_server()
        assert rank.line() == f"False True {server.pid}"
        assert rank.line() == "to stderr"
        [pid] = pids_of(rank)
        assert next_exit(client) == [0, 7]
        assert not sockets_of(pid) & sockets_of(server.pid)
        server.kill()
        await_end(pid)
        server.wait()


# ---- Nothing is left ------------------------------------------------------------------------------------------------


def test_closing_a_client_kills_its_ranks_and_their_children() -> None:
    client = fork_client.connect()
    pids = [pid for key in (0, 1) for pid in pids_of(Rank.running(client, key, FAMILY))]
    client.close()
    await_end(*pids)


def test_sigterm_to_all_processes_ends_none_of_ours_from_their_first_instant() -> None:
    fork_client.shutdown()
    with contextlib.closing(fork_client.connect()) as client:
        server = own_fork_server()
        server.terminate()  # it has hardly begun
        rank = Rank(client, 0)
        until(lambda: ranks_of(server), "the rank")
        [process] = ranks_of(server)
        process.terminate()  # nor has this
        rank.channel.send(Doing(exec, "import os, time; print(os.getpid(), flush=True); time.sleep(600)"))
        assert pids_of(rank) == [process.pid]
        process.terminate()
        server.terminate()
        Rank(client, 1, Doing(os._exit, 5))
        assert next_exit(client) == [1, 5]
        assert is_alive(process.pid)
    await_end(process.pid)


def test_handlers_and_children_of_a_ranks_code_heed_sigterm_as_everywhere(client: ForkServerClient) -> None:
    source = """
        import multiprocessing, signal, subprocess, threading, time
        fork = multiprocessing.get_context("fork")
        for child in (fork.Process(target=time.sleep, args=(600,)), fork.Process(target=time.sleep, args=(600,))):
            child.start()
            child.terminate()
            child.join()
            print(child.exitcode)
        child = subprocess.Popen(["sleep", "600"])
        child.terminate()
        print(child.wait())
        signal.signal(signal.SIGTERM, lambda *_: print("heard"))
        print("ready")
        time.sleep(600)
    """
    rank = Rank.running(client, 0, source)
    assert [rank.line() for _ in range(4)] == ["-15", "-15", "-15", "ready"]
    client.kill(0, signal.SIGTERM)
    assert rank.line() == "heard"


def is_stopped(processes: list[psutil.Process]) -> bool:
    """Whether one of them is; any other may end any moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(process.status() == psutil.STATUS_STOPPED for process in processes)
    return False


OWNER = """
    import json, os, sys, time
    from multiprocessing.connection import Pipe
    from flytekitplugins.daskpytorch.node import fork_client

    client = fork_client.connect()
    for key in (0, 1):
        mine, theirs = Pipe()
        client.spawn(key, theirs.fileno(), 1)
        globals()[f"channel_{key}"] = mine
    client.kill(1, 19)  # SIGSTOP
    if not (child := os.fork()):
        time.sleep(600)
    print(json.dumps({"server": fork_client._owned.process.pid, "child": child}), flush=True)
    time.sleep(600)
"""


def test_killing_the_owner_leaves_no_rank_and_no_server_though_a_fork_of_the_owner_lives_on() -> None:
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        said = json.loads(owner.stdout.readline())
        server, child = psutil.Process(said["server"]), psutil.Process(said["child"])
        until(lambda: is_stopped(server.children()), "the second rank to stop")
        ranks = server.children()
        assert len(ranks) == 2
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    try:
        await_end(server.pid, *(rank.pid for rank in ranks))
        assert child.is_running()
    finally:
        child.kill()


def test_killing_the_server_kills_its_ranks_and_the_next_connect_starts_another(client: ForkServerClient) -> None:
    rank = Rank.running(client, 0, "import os, time; print(os.getpid()); time.sleep(600)")
    pids = pids_of(rank)
    first = own_fork_server()
    first.kill()
    with pytest.raises(fork_client.ForkServerLostError):
        next_exit(client)
    await_end(*pids)
    first.wait()
    with contextlib.closing(fork_client.connect()) as again:
        assert own_fork_server().pid != first.pid
        Rank(again, 0, Doing(os._exit, 5))
        assert next_exit(again) == [0, 5]


def test_what_only_trainings_need_is_imported_after_a_rank_that_trains_and_beside_none(
    client: ForkServerClient,
) -> None:
    look, keys = "import sys; print('torch._dynamo' in sys.modules)", itertools.count(1)
    trains = "import types, wrapt; wrapt.notify_module_loaded(types.ModuleType('torch._dynamo')); print('trains')"
    assert Rank.running(client, 0, f"{trains}; import time; time.sleep(600)").line() == "trains"
    time.sleep(0.3)  # in which the server would begin
    assert Rank.running(client, next(keys), "import sys; print('sympy' in sys.modules)").line() == "False"
    client.kill(0, signal.SIGKILL)
    # Exits that nobody reads would block the server.
    until(lambda: Rank.running(client, next(keys), look).line() == "True" or not next_exit(client), "the imports")


# ---- What ends a server itself --------------------------------------------------------------------------------------


@pytest.fixture
def fresh_server() -> Iterator[None]:
    fork_client.shutdown()
    yield
    fork_client.shutdown()


def error_of_first_rank() -> BaseException:
    """Return what an agent hears whose rank cannot be forked."""
    with contextlib.closing(fork_client.connect()) as client:
        try:
            Rank(client, 0)
            client.next_event()
        except RuntimeError as error:
            return error
        raise AssertionError("a rank was forked, and has ended")


@pytest.mark.usefixtures("fresh_server")
@pytest.mark.parametrize(
    ("statement", "said"),
    [("raise SystemExit('why')", "has ended with exit code 1: the log of"), ("os.abort()", "has ended with SIGABRT: ")],
)
def test_server_that_fails_says_why_and_is_told_from_one_that_is_lost(
    statement: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"failing_{len(statement)}"
    (tmp_path / f"{name}.py").write_text(f"import os\ndef fail(): {statement}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_client, "_imported_ahead", [f"{name}:fail"])
    error = error_of_first_rank()
    assert type(error) is fork_client.ForkServerFailedError
    assert said in str(error)
