"""Reports of a gang's checkpoints from ranks, and ranks' questions for checkpoints. Runs in the driver."""

from dataclasses import replace

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.manifest import lack_of_metric
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Written
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Kept

GOES_ON = "the training goes on, and until the next checkpoint a restart begins from an earlier one"


class Checkpoints(Part):
    _awaits_evaluations = False
    """A question for the best checkpoint waits for evaluations."""
    _has_told_lack = False
    takes = (Written, Ask)

    def __init__(self, state: GangState, vault: Vault) -> None:
        self._state = state
        self._observers = state.observers
        self.vault = vault

    def equip(self, job: Job) -> Job:
        self.vault.take_back()
        self.vault.lend(newest := self.vault.newest())
        return replace(
            job, checkpoint=newest, sharding=self.vault.shards.sharding(self.vault.sharded), kept=self.vault.saved()
        )

    def begin(self, attempt: Attempt) -> None:
        self._asked: list[Ask] = []
        self._awaits_evaluations = False

    # ---- what happens

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        match report:
            case Written(entry, failure) if entry.attempt == attempt.number:
                attempt.steps[rank] = entry.step
                self._note_written(attempt, entry, failure)
            case Ask() if rank == 0:
                self._asked.append(report)

    def _note_written(self, attempt: Attempt, entry: CheckpointEntry, failure: str | None) -> None:
        try:
            if failure is None:
                self.vault.add(entry)
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        if failure is not None:
            kind = "sharded checkpoint" if entry.is_sharded else "checkpoint"
            self._observers.note(f"the {kind} of step {entry.step} was not kept ({failure}); {GOES_ON}")
            self.vault.shards.sweep_through(entry)
            return
        for part in self._state.parts:
            part.note_kept(entry)
        attempt.has_progressed = True
        self._observers.tell(journal.Checkpointed(step=entry.step))
        self.tell_kept()

    def note_evaluated(self) -> None:
        self.tell_kept()

    def tell_kept(self) -> None:
        kept = self.vault.saved()
        self._observers.tell(journal.Listed(checkpoints=kept))
        lack = lack_of_metric(kept, self.vault.keep)
        if lack is not None and self._state.request.settings.evaluate is None and not self._has_told_lack:
            self._has_told_lack = True
            self._observers.note(lack)
        attempt = self._state.attempt
        if attempt is not None and not attempt.is_over:
            attempt.tell(messages.Tell(Kept(kept)))

    # ---- what there is

    def blocks(self, moment: Moment) -> bool:
        return moment is Moment.HUNG and self._awaits_evaluations

    def newest_step(self) -> int | None:
        newest = self.newest_entry
        return newest.step if newest is not None else None

    @property
    def newest_entry(self) -> CheckpointEntry | None:
        newest = [*self.vault.intact()[-1:], *self.vault.sharded[-1:]]
        return max(newest, key=lambda one: one.step, default=None)

    # ---- what is done

    def orders(self, now: float) -> None:
        """Answer rank 0's questions for a checkpoint, to all ranks. Those for the best one wait for evaluations."""
        attempt = self._state.training
        if attempt is None or not self._asked:
            return
        if any(asked.about[1] is None for asked in self._asked):
            self._awaits_evaluations = self._state.blocks(Moment.CHOICE)
            if self._awaits_evaluations:
                return
            attempt.excuse()  # ranks that have waited do not count as hung
        for asked in self._asked:
            is_sharded, step = asked.about
            chosen = self.vault.choose(step, is_sharded=is_sharded)
            attempt.tell(messages.Tell(Answer(asked.number, chosen)))
        self._asked = []

    def settle(self, *, is_last: bool) -> None:
        if is_last:
            self.vault.worker.shorten_pauses()

    def restart(self, number: int) -> None:
        self.vault.fence(number)

    def farewell(self, timeout: float) -> str:
        storage = self._state.request.storage
        step = self.newest_step()
        is_stored = self.vault.flush(timeout)
        if step is None:
            told = "there is no checkpoint, so the next attempt starts afresh"
        elif storage is None:
            told = (
                f"the newest checkpoint (step {step}) is deleted with this process: "
                "Gang(checkpoint_uri=...) names storage that stays"
            )
        elif not is_stored:
            told = f"the checkpoint of step {step} did not reach {storage.own} in time"
        elif storage.own == storage.previous:
            told = (
                f"the checkpoint of step {step} is in {storage.own}, and the same call in a new process goes on from it"
            )
        elif storage.resume is not None:
            told = f"the checkpoint of step {step} is kept, {storage.resume} go on from it"
        else:
            told = f"the next attempt goes on from the checkpoint of step {step}"
        return told
