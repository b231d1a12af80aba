"""Transfer of a gang's checkpoints from ranks and to ranks. Runs in the driver.

Rank 0 writes a whole checkpoint to the driver's folder, or uploads it (`vault`). All ranks write the shards of a
sharded checkpoint directly to storage, and the driver commits the checkpoint (`committer`).
"""

from dataclasses import replace

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.committer import Committed, Committer
from flytekitplugins.daskpytorch.driver.manifest import find, hint_of_metric
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Written
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Kept, Question

GOES_ON = "the training goes on, and until the next checkpoint a restart begins from an earlier one"


class Checkpoints(Part):
    _awaits_evaluations = False
    """A question for the best checkpoint waits for evaluations."""
    takes = (Written, Question.CHECKPOINT)

    def __init__(self, state: GangState, committer: Committer) -> None:
        self._state = state
        self._observers = state.observers
        self.vault = committer.vault
        self.committer = committer
        self.commits: dict[str, int] = {}

    def equip(self, job: Job) -> Job:
        self.vault.take_back()
        self.vault.lend(newest := self.vault.newest())
        return replace(job, checkpoint=newest, sharding=self.committer.sharding(), kept=self.vault.saved())

    def begin(self, attempt: Attempt) -> None:
        self._asked: list[tuple[Peer, int, Ask]] = []
        self._chosen: dict[int, Answer] = {}
        """Answers to rank 0, by number of the question, for the other ranks, too."""
        self._awaits_evaluations = False

    # ---- what happens

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        match report:
            case Written(entry, failure) if entry.attempt == attempt.number:
                attempt.steps[rank] = entry.step
                self._note_written(entry, failure)
            case Ask():
                self._asked.append((peer, rank, report))

    def _note_written(self, entry: CheckpointEntry, failure: str | None) -> None:
        if failure is not None:
            self._note_lost(entry, failure)
        elif entry.is_sharded:
            self.commits[entry.name] = entry.step
            self.committer.commit(entry)
        else:
            try:
                self.vault.add(entry)
            except (OSError, ValueError) as error:
                self._note_lost(entry, f"{type(error).__name__}: {error}")
            else:
                self._note_kept(entry)

    def _note_lost(self, entry: CheckpointEntry, reason: str) -> None:
        kind = "sharded checkpoint" if entry.is_sharded else "checkpoint"
        self._observers.note(f"the {kind} of step {entry.step} was not kept ({reason}); {GOES_ON}")
        if entry.is_sharded:
            self.committer.sweep_through(entry)

    def note_commit(self, commit: Committed) -> None:
        entry = commit.entry
        self.commits.pop(entry.name, None)
        if commit.error is not None:
            self._note_lost(entry, f"{commit.error!r}")
            return
        self._note_kept(entry)
        self.committer.sweep_through(entry)

    def _note_kept(self, entry: CheckpointEntry) -> None:
        self._state.note_kept(entry)
        attempt = self._state.attempt
        if attempt is not None and attempt.number == entry.attempt:
            attempt.has_progressed = True
        self._observers.tell(journal.Checkpointed(step=entry.step))
        self.tell_kept()

    def note_evaluated(self) -> None:
        self.tell_kept()

    def tell_kept(self) -> None:
        kept = self.vault.saved()
        self._observers.tell(journal.Listed(checkpoints=kept))
        hint = hint_of_metric(kept, self.vault.keep)
        if hint is not None and self._state.request.settings.evaluate is None:  # else other metrics may come
            self._observers.hint("metric", hint)
        attempt = self._state.attempt
        if attempt is not None and not attempt.is_over:
            attempt.tell(messages.Tell(Kept(kept)))

    # ---- what there is

    def blocks(self, moment: Moment) -> bool:
        match moment:
            case Moment.HUNG:
                return self._awaits_evaluations
            case Moment.RESTART | Moment.RESULT:
                return bool(self.commits)
            case _:
                return False

    def newest_step(self) -> int | None:
        newest = self.newest_entry
        return newest.step if newest is not None else None

    @property
    def newest_entry(self) -> CheckpointEntry | None:
        newest = [self.vault.newest(), *self.vault.sharded[-1:]]
        return max((one for one in newest if one is not None), key=lambda one: one.step, default=None)

    # ---- what is done

    def orders(self, now: float) -> None:
        """Answer ranks' questions for a checkpoint, once none is being saved.

        Questions for the best checkpoint also wait for evaluations. Other ranks get the same as rank 0 for the same
        number.
        """
        attempt = self._state.training
        if attempt is None or not self._asked or self.blocks(Moment.RESTART):
            return
        if any(rank == 0 and asked.about[1] is None for _, rank, asked in self._asked):
            self._awaits_evaluations = self._state.blocks(Moment.CHOICE)
            if self._awaits_evaluations:
                return
            attempt.excuse()  # ranks that have waited do not count as hung
        waiting, self._asked = self._asked, []
        for _, rank, asked in waiting:
            if rank == 0:
                self._chosen[asked.number] = self._choose(asked)
        for peer, rank, asked in waiting:
            if (answer := self._chosen.get(asked.number)) is not None:
                peer.send(messages.Tell(answer))
            else:
                self._asked.append((peer, rank, asked))

    def _choose(self, asked: Ask) -> Answer:
        is_sharded, step = asked.about
        found = find(self.vault.sharded if is_sharded else self.vault.intact(), self.vault.keep, step)
        if not is_sharded:
            self.vault.lend(found)
        return Answer(asked.question, asked.number, found)

    def settle(self, *, is_last: bool) -> None:
        if is_last:
            self.vault.worker.shorten_pauses()

    def restart(self, number: int) -> None:
        self.vault.fence(number)
        self.committer.sweep(number)

    def farewell(self, timeout: float) -> str:
        storage = self._state.request.storage
        step = self.newest_step()
        is_stored = self.vault.flush(timeout) or step in [entry.step for entry in self.vault.sharded[-1:]]
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
            told = f"the checkpoint of step {step} is in {storage.own}, and the same call goes on from it"
        elif storage.resume is not None:
            told = f"the checkpoint of step {step} is kept, {storage.resume} go on from it"
        else:
            told = f"the next attempt goes on from the checkpoint of step {step}"
        for uncommitted in self.commits.values():
            told += f"; that of step {uncommitted} could not be committed in time"
        return told
