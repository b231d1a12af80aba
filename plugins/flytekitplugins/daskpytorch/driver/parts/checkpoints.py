"""Transfer of a gang's checkpoints from ranks and to ranks. Runs in the driver.

Rank 0 writes a whole checkpoint, which its agent sends to the driver (`vault`). All ranks write the shards of a sharded
checkpoint directly to storage, and the driver commits the checkpoint (`committer`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.committer import Committed, Committer
from flytekitplugins.daskpytorch.driver.manifest import find, hint_of_metric, retained
from flytekitplugins.daskpytorch.driver.part import Moment, Part, Stage
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointFile, ShardedCheckpoint, WrittenShards
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Kept, Question
from flytekitplugins.daskpytorch.settings import Keep

MAX_RETRIES = 2
"""Retries of a checkpoint's fetch from an agent, after a broken connection."""
GOES_ON = "the training goes on, and until the next checkpoint a restart begins from an earlier one"


class Checkpoints(Part):
    _awaits_evaluations = False
    """A question for the best checkpoint waits for evaluations."""
    takes = (CheckpointFile, WrittenShards, Question.CHECKPOINT, Question.SHARDED, messages.Sent)

    def __init__(self, state: GangState, committer: Committer) -> None:
        self._state = state
        self._observers = state.observers
        self.vault = committer.vault
        self.committer = committer
        self.fetches = Fetches(self.vault.keep, self.vault.entries)
        self.commits: dict[tuple[int, int], int] = {}
        """Step by (attempt number, save number)."""

    def equip(self, job: Job) -> Job:
        return replace(job, checkpoint=self.vault.newest(), sharding=self.committer.sharding(), kept=self.vault.saved())

    def begin(self, attempt: Attempt) -> None:
        self._asked: list[tuple[Peer, int, Ask]] = []
        self._chosen: dict[tuple[Question, int], Answer] = {}
        """Answers to rank 0, by kind and number of the question, for the other ranks, too."""
        self._awaits_evaluations = False

    # ---- what happens

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        match report:
            case CheckpointFile(step=step):
                attempt.steps[rank] = step
                self.fetches.fetch(peer, report)
            case WrittenShards(step=step):
                attempt.steps[rank] = step
                self._note_shards(attempt, report)
            case Ask():
                self._asked.append((peer, rank, report))

    def hear(self, peer: Peer, attempt: Attempt | None, message: object) -> None:
        """Keep a whole checkpoint that an agent has linked into the driver's folder."""
        if not isinstance(message, messages.Sent):
            return
        error: Exception | None = None
        if message.failure is not None:
            error = OSError(f"{peer.node.title} could not send it: {message.failure}")
        else:
            try:
                self.vault.add(message.file)
            except (OSError, ValueError) as refusal:
                error = refusal
        self.note_upload(message.file, error)

    def lose_agent(self, peer: Peer) -> None:
        self.fetches.forget(peer)

    def note_upload(self, file: CheckpointFile, error: Exception | None) -> None:
        if error is None:
            self._note_kept(file, before=lambda: self.fetches.note_end(file))
        elif self.fetches.note_failure(file, is_worth_a_retry=isinstance(error, (EOFError, ConnectionError))):
            self._observers.note(
                f"the checkpoint of step {file.step} was not kept ({type(error).__name__}: {error}); {GOES_ON}"
            )

    def _note_shards(self, attempt: Attempt, said: WrittenShards) -> None:
        if said.attempt != attempt.number:
            return
        if said.failure is None:
            self.commits[said.attempt, said.number] = said.step
            self.committer.commit(said)
            return
        self._observers.note(f"the sharded checkpoint of step {said.step} was not kept: {said.failure}; {GOES_ON}")
        self.committer.sweep(said.attempt, said.number)

    def note_commit(self, commit: Committed) -> None:
        self.commits.pop((commit.attempt, commit.number), None)
        if commit.made is not None:
            self._note_kept(commit.made)
        else:
            self._observers.note(
                f"the sharded checkpoint of step {commit.step} was not kept ({commit.error!r}); {GOES_ON}"
            )
        self.committer.sweep(commit.attempt, commit.number)

    def _note_kept(
        self, entry: CheckpointFile | ShardedCheckpoint, before: Callable[[], object] = lambda: None
    ) -> None:
        """`before` is called before observers and ranks hear of the checkpoint."""
        self._state.note_kept(entry)
        before()
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
            case Moment.RESTART:
                return self.fetches.is_busy or bool(self.commits)
            case Moment.RESULT:  # only for what stays after the gang
                return bool(self.commits) or (self.fetches.is_busy and self.vault.is_users_folder)
            case _:
                return False

    def newest_step(self) -> int | None:
        newest = self.newest_entry
        return newest.step if newest is not None else None

    @property
    def newest_entry(self) -> CheckpointFile | ShardedCheckpoint | None:
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
        if any(rank == 0 and asked.about is None for _, rank, asked in self._asked):
            self._awaits_evaluations = self._state.blocks(Moment.CHOICE)
            if self._awaits_evaluations:
                return
            attempt.excuse()  # ranks that have waited do not count as hung
        waiting, self._asked = self._asked, []
        for _, rank, asked in waiting:
            if rank == 0:
                self._chosen[asked.question, asked.number] = self._choose(asked)
        for peer, rank, asked in waiting:
            if (answer := self._chosen.get((asked.question, asked.number))) is not None:
                peer.send(messages.Bring(answer, attempt.number))
            else:
                self._asked.append((peer, rank, asked))

    def _choose(self, asked: Ask) -> Answer:
        found: CheckpointFile | ShardedCheckpoint | None
        if asked.question is Question.SHARDED:
            found = find(self.vault.sharded, self.vault.keep, asked.about)
        else:
            found = find(self.vault.intact(), self.vault.keep, asked.about)
        return Answer(asked.question, asked.number, found)

    def settle(self, *, is_last: bool) -> None:
        """Try storage more often at the end of the gang."""
        if is_last:
            self.vault.worker.shorten_pauses()

    def enter(self, stage: Stage) -> None:
        if stage == "settled":
            self.fetches.clear()

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


@dataclass
class Fetches:
    """Fetches whole checkpoints, one at a time. Newer ones replace queued older ones, except the best."""

    keep: Keep = field(default_factory=Keep)
    kept: Callable[[], Sequence[CheckpointFile]] = tuple
    _queue: list[tuple[Peer, CheckpointFile]] = field(default_factory=list)
    """In the order in which ranks wrote them. The first fetch runs."""
    _num_retries: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        self._queue.append((peer, file))
        stay = retained([*self.kept(), *(queued for _, queued in self._queue)], replace(self.keep, last=1))
        self._queue = [*self._queue[:1], *(queued for queued in self._queue[1:] if queued[1] in stay)]
        if len(self._queue) == 1:
            self._request()

    def note_end(self, file: CheckpointFile) -> None:
        if self._is_running(file):
            self._turn()

    def note_failure(self, file: CheckpointFile, *, is_worth_a_retry: bool) -> bool:
        """Begin a retry or the next fetch.

        Return True if the checkpoint is given up, False after a retry or a late failure.
        """
        if not self._is_running(file):
            return False
        if is_worth_a_retry and len(self._queue) == 1 and self._num_retries < MAX_RETRIES:
            self._num_retries += 1
            self._request()
            return False
        self._turn()
        return True

    def forget(self, peer: Peer) -> None:
        is_running = bool(self._queue) and self._queue[0][0] is peer
        self._queue[1:] = [queued for queued in self._queue[1:] if queued[0] is not peer]
        if is_running:
            self._turn()

    def clear(self) -> None:
        self._queue, self._num_retries = [], 0

    def _is_running(self, file: CheckpointFile) -> bool:
        return bool(self._queue) and self._queue[0][1] == file

    def _turn(self) -> None:
        self._queue.pop(0)
        self._num_retries = 0
        self._request()

    def _request(self) -> None:
        if self._queue:
            peer, file = self._queue[0]
            peer.send(messages.Fetch(file))
