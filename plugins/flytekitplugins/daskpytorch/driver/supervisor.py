"""Collects messages from a gang's agents, and lets the `brain` decide. Runs in the driver, one `Supervisor` a gang."""

import contextlib
import functools
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.driver.agents import Action, Agents
from flytekitplugins.daskpytorch.driver.blame import from_user
from flytekitplugins.daskpytorch.driver.brain import Brain
from flytekitplugins.daskpytorch.driver.listener import Listener, Transfer
from flytekitplugins.daskpytorch.driver.parts.calls import Calls
from flytekitplugins.daskpytorch.driver.parts.checkpoints import Checkpoints
from flytekitplugins.daskpytorch.driver.parts.debugger import Debugger
from flytekitplugins.daskpytorch.driver.parts.evaluation import Evaluator, MakeGang
from flytekitplugins.daskpytorch.driver.parts.goodput import Accounting
from flytekitplugins.daskpytorch.driver.parts.hang import HangWatch
from flytekitplugins.daskpytorch.driver.parts.workers import Growth, Preemption
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.storage import claimed, start_of
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangCancelledError, PreemptedError
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.process.system import MAX_FILES, allow_files, check_system
from flytekitplugins.daskpytorch.protocol import host, journal, messages
from flytekitplugins.daskpytorch.protocol.code import pack_code
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.host import AgentLauncher, current_execution, running
from flytekitplugins.daskpytorch.protocol.observer import Observers

LAST_SHARDS = 60.0
"""Seconds for which results wait until storage has the manifest of the last sharded checkpoint."""


class Assembled:
    def __init__(
        self,
        request: Request,
        agents: Agents,
        vault: Vault,
        observers: Observers,
        received: ReceivedResults,
        make: MakeGang,
        debugging: Debugging,
        *,
        asked_at: float,
        clock: Callable[[], float] = time.monotonic,
        running_clock: Callable[[], float] | None = None,
    ) -> None:
        """`running_clock` counts all deadlines, perhaps without times in which the driver was suspended."""
        state = GangState(request, agents, observers, received, asked_at=asked_at, clock=running_clock or clock)
        self.state = state
        self.checkpoints = Checkpoints(state, vault)
        self.evaluator = Evaluator(state, vault, make)
        self.debugger = Debugger(state, debugging)
        self.accounting = Accounting(state, clock, vault)
        calls = [request.calls] if isinstance(request.calls, Calls) else []
        for part in calls:
            part.join(state)
        # Evaluations hold a checkpoint before it counts, and the goodput counts it before observers hear of it.
        seeing = [self.evaluator, self.accounting, self.debugger, *calls, self.checkpoints]
        state.use([*seeing, Preemption(state), HangWatch(state), Growth(state)])


class RunningClock:
    """Clock without the time in which this process stood still: suspended, migrated, or in a long C call.

    Must be called at least once per second. Longer gaps count as `MAX_GAP` seconds, so the driver reads waiting
    messages before deadlines expire.
    """

    MAX_GAP = 2.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._called_at = clock()
        self._stood_still = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if (gap := now - self._called_at) > self.MAX_GAP:
            self._stood_still += gap - self.MAX_GAP
        self._called_at = now
        return now - self._stood_still


class Supervisor:
    """Runs one gang from its first worker to its last exit. Raises `GangStartError` if the system is not Linux."""

    _gang: Assembled

    def __init__(self, request: Request, launcher: AgentLauncher, received: ReceivedResults | None = None) -> None:
        check_system()
        self._request = request
        self._execution = current_execution()
        self._launcher = launcher
        self._observers = Observers(request.observers, name=request.name)
        self.received = received or ReceivedResults()
        self._calls: queue.SimpleQueue[Action] = queue.SimpleQueue()  # signal handlers may put calls here
        self._staying = request.calls if isinstance(request.calls, Calls) else None
        if self._staying is not None:
            self._staying.post = self._calls.put
        self._asked_at = time.monotonic()
        self._debugging = Debugging.here() if request.start is None else Debugging()
        self._brain: Brain | None = None

    def cancel(self) -> None:
        self._calls.put(lambda: self._gang.state.cancel())  # noqa: PLW0108 - there may be no state yet

    def preempt(self, reason: str, *, is_awaited: bool = False) -> None:
        """Have the gang save a checkpoint and end, from any thread or signal handler. `run` raises `PreemptedError`.

        `is_awaited`: a user waits for the end. If no rank has ever called `should_stop`, all ranks end at once.
        """
        self._calls.put(lambda: self._gang.state.request_stop(reason, is_awaited=is_awaited))

    def run(self) -> list[Any]:
        """Run the gang until its end, and return the ranks' results in rank order.

        Raises a rank's own exception, with a `GangError` as cause. Else a `GangError` (`GangStartError`,
        `WorkerLostError`, ...), `PreemptedError`, `GangCancelledError`, an observer's `StoppedEarlyError`, or
        `ValueError` if the workers do not suit the settings.
        """
        error: Exception | None = None
        running.add(self)
        if self._request.training is not None:
            self._observers.tell(journal.Began(training=self._request.training))
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._launcher.close)
                storage = stack.enter_context(claimed(self._request.storage, self._request.name, self._give_up))
                folder = stack.enter_context(scratch_folder("daskpytorch-checkpoints-"))
                self._vault = vault = Vault(self._request.settings, storage, folder, self._execution.filesystem)
                stack.callback(vault.close)
                self._gang = gang = self._listen(vault, folder, stack)
                stack.callback(gang.checkpoints.tell_kept)  # after the last write to storage and `evaluator.end`
                stack.callback(gang.evaluator.end)
                ends = gang.state.deadlines
                try:
                    results = self._see_through(gang, vault)
                except Exception as failure:  # the next attempt or call begins from the newest checkpoint
                    # After cancellation a user waits. After preemption, `Brain` has waited for storage.
                    is_short = isinstance(failure, (GangCancelledError, PreemptedError))
                    gang.evaluator.close()
                    vault.finish(ends.cancelled if is_short else ends.storage)
                    raise
                if vault.is_users_folder or vault.sharded:
                    vault.finish(max(LAST_SHARDS, ends.storage) if vault.sharded else ends.storage)
                return results
        except Exception as caught:
            error = from_user(caught)
            raise error  # noqa: B904 - the same, with fewer frames
        finally:
            running.discard(self)
            if self._brain is not None:
                self._observers.tell(journal.Accounted(goodput=self._gang.accounting.final(error)))
            self._observers.tell(journal.Ended.by(error))

    def _give_up(self) -> None:
        """Called once a newer gang has taken over the storage."""
        self._vault.close()
        self.cancel()

    def _listen(self, vault: Vault, folder: Path, stack: contextlib.ExitStack) -> Assembled:
        request, launcher = self._request, self._launcher
        allow_files(MAX_FILES)
        token = os.urandom(32)
        serve = functools.partial(self._serve_file, vault)
        self._listener = listener = Listener(launcher.host, token, self._calls, serve)
        agents = Agents(
            launcher=launcher,
            order=host.AgentOrder(driver=listener.address, token=token, num_gpus=request.num_gpus, folder=folder),
            post=self._calls.put,
            num_least=request.settings.min_workers or launcher.num_wanted,
        )
        gang = Assembled(
            request,
            agents,
            vault,
            self._observers,
            self.received,
            Supervisor,
            self._debugging,
            asked_at=self._asked_at,
            running_clock=RunningClock(),
        )
        listener.listen(gang.state)
        stack.callback(gang.debugger.end)
        stack.callback(listener.end)
        stack.callback(listener.dismiss, messages.Close(), gang.state.deadlines.dismiss)
        return gang

    def _serve_file(self, vault: Vault, connection: Connection, request: Transfer) -> None:
        if isinstance(request, messages.Upload):
            connection.send(vault.receive(connection, request.file))
            return
        caller = self._staying.current if self._staying is not None else self._request
        if request.name == messages.CALL and caller is not None and caller.call is not None:
            connection.send(None)
            connection.send_raw(caller.call)
            return
        path = vault.lent / Path(request.name).name
        is_there = path.exists()
        connection.send(None if is_there else f"the driver has no file {request.name}")
        if is_there:
            connection.send_file(path)

    def _see_through(self, gang: Assembled, vault: Vault) -> list[Any]:
        state, checkpoints, evaluator = gang.state, gang.checkpoints, gang.evaluator
        state.agents.launch(self._launcher.workers)
        code = self._request.code or pack_code(self._request.script)  # while the agents start
        if self._request.start is not None:
            vault.adopt(self._request.start)
        else:
            vault.restore()
        gang.accounting.restore()
        vault.begin()
        evaluator.prepare(code if self._request.script is None else None, checkpoints.newest_entry)
        if (step := checkpoints.newest_step()) is not None:
            self._observers.tell(journal.Resumed(step=step))
            self._observers.tell(journal.Listed(checkpoints=vault.saved()))
        text = start_of(self._request.storage, self._request.settings, step)
        if text is not None and self._request.start is None:
            self._observers.note(text)
        self._brain = brain = Brain(state, code)
        while (results := brain.decide()) is None:
            try:
                call = self._calls.get(timeout=brain.patience)
            except queue.Empty:
                call = bool  # does nothing
            call()
            while self._listener.beats:
                state.note_beat(*self._listener.beats.popitem())
            state.look_for_silence()
        evaluator.conclude()
        evaluator.end()  # before the last write to storage, which applies the retention policy
        return results
