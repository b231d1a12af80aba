"""Transfer of a gang's checkpoints from ranks and to ranks. Runs in the driver.

Rank 0 writes a whole checkpoint, which its agent sends to the driver (`vault`). All ranks write the shards of a sharded
checkpoint directly to storage, and the driver commits the checkpoint (`committer`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.committer import Committed, Committer
from flytekitplugins.daskpytorch.driver.goodput import Accountant
from flytekitplugins.daskpytorch.driver.manifest import find, hint_of_metric, listed, retained
from flytekitplugins.daskpytorch.protocol import messages, orders, reports
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.observer import Observers
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint, Sharding, WrittenShards
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MAX_RETRIES = 2
"""Maximum number of retries of a checkpoint's fetch whose connection broke."""


class Saving:
    """Handles one gang's checkpoints, across all attempts."""

    def __init__(
        self,
        committer: Committer,
        accountant: Accountant,
        observers: Observers,
    ) -> None:
        self._vault = committer.vault
        self._committer = committer
        self._accountant = accountant
        self._observers = observers
        self._fetches = Fetches(self._vault.keep, self._vault.entries)
        self.has_news = False
        """True if a checkpoint has been kept since `Brain` last reset this."""
        self.commits: dict[tuple[int, int], int] = {}
        """Attempt number and save number -> step of a sharded checkpoint during its commit."""

    # ---- what happens

    def note_saved(self, peer: Peer, attempt: Attempt, rank: int, file: CheckpointFile) -> None:
        """Record that a rank wrote a whole checkpoint, and request the file from its agent."""
        attempt.steps[rank] = file.step
        self._fetches.fetch(peer, file)

    def note_sent(self, peer: Peer, attempt: Attempt | None, sent: messages.Sent) -> None:
        """Keep a whole checkpoint that an agent has linked into the driver's folder, or record the agent's failure."""
        error: Exception | None = None
        if sent.failure is not None:
            error = OSError(f"{peer.node.worker} could not send it: {sent.failure}")
        else:
            try:
                self._vault.add(sent.file)
            except (OSError, ValueError) as refusal:
                error = refusal
        self.note_kept(attempt, sent.file, error)

    def note_kept(self, attempt: Attempt | None, file: CheckpointFile, error: Exception | None) -> None:
        """Record the arrival of a whole checkpoint in the driver, or its failed transfer."""
        if error is None:
            self._fetches.note_end(file)
            self._count_as_kept(attempt, file.attempt, file.step)
        elif self._fetches.note_failure(file, is_worth_a_retry=isinstance(error, (EOFError, ConnectionError))):
            self._observers.note(
                f"the checkpoint of step {file.step} was not kept ({type(error).__name__}: {error}); the training goes "
                "on"
            )

    def note_shards(self, attempt: Attempt, rank: int, said: WrittenShards | reports.ShardsNotWritten) -> None:
        """Record a rank's written shards or failure. After the last rank, commit or discard the checkpoint."""
        if isinstance(said, WrittenShards) and said.attempt != attempt.number:
            return
        attempt.steps[rank] = said.step
        if (all_said := attempt.note_shards(rank, said)) is None:
            return
        written = [each for _, each in sorted(all_said.items()) if isinstance(each, WrittenShards)]
        if len(written) == attempt.world_size:
            self.commits[attempt.number, said.number] = said.step
            self._committer.commit(written)
            return
        failed, why = next((r, each) for r, each in sorted(all_said.items()) if not isinstance(each, WrittenShards))
        self._observers.note(
            f"the sharded checkpoint of step {said.step} was not kept: rank {failed} could not write its part "
            f"({why.reason}); the training goes on"
        )
        self._committer.sweep(attempt.number, said.number)
        attempt.tell(messages.Tell(orders.Settled(said.number)))

    def note_committed(self, attempt: Attempt | None, commit: Committed) -> None:
        """Record the commit of a sharded checkpoint, or its failure."""
        self.commits.pop((commit.attempt, commit.number), None)
        if commit.error is None:
            self._count_as_kept(attempt, commit.attempt, commit.step)
        else:
            self._observers.note(
                f"the sharded checkpoint of step {commit.step} was not kept ({commit.error!r}); the training goes on"
            )
        self._committer.sweep(commit.attempt, commit.number)
        if attempt is not None and attempt.number == commit.attempt and not attempt.is_over:
            attempt.note_sign_of_life()
            attempt.tell(messages.Tell(orders.Settled(commit.number)))

    def forget(self, peer: Peer) -> None:
        """Cancel fetches from a lost agent."""
        self._fetches.forget(peer)

    def _count_as_kept(self, attempt: Attempt | None, number: int, step: int) -> None:
        self.has_news = True
        if attempt is not None and attempt.number == number:
            attempt.has_saved = True
            self._accountant.keep(step)
        self._observers.tell("kept", step)
        kept = self.saved()
        self._observers.tell("keeps", kept)
        if (hint := hint_of_metric(kept, self._vault.keep)) is not None:
            self._observers.hint("metric", hint)
        if attempt is not None and not attempt.is_over:
            attempt.tell(messages.Tell(orders.Kept(kept)))

    # ---- what there is

    @property
    def is_fetching(self) -> bool:
        """True while a checkpoint is being fetched from an agent."""
        return self._fetches.is_busy

    @property
    def is_committing(self) -> bool:
        """True during commits of sharded checkpoints."""
        return bool(self.commits)

    @property
    def is_busy(self) -> bool:
        """True during fetches and commits."""
        return self.is_fetching or self.is_committing

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        """Return all kept checkpoints of both kinds, as users receive them."""
        return listed(self._vault.saved(), (entry.saved for entry in self._vault.sharded))

    def sharding(self) -> Sharding:
        """Return the folder for new shards, and the sharded checkpoints available to ranks."""
        return self._committer.sharding()

    @property
    def newest(self) -> CheckpointFile | None:
        """Whole checkpoint from which the next attempt starts, or None."""
        return self._vault.newest()

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint of both kinds. None without checkpoints."""
        newest = [self.newest, *self._vault.sharded[-1:]]
        return max((one.step for one in newest if one is not None), default=None)

    # ---- what is done

    def give_wanted(self, attempt: Attempt) -> None:
        """Answer ranks' requests for checkpoints, once all fetches, commits and sharded writes have ended.

        Other ranks get the checkpoint that rank 0's request with the same number has got.
        """
        if not attempt.wanted or self.is_busy or attempt.shards:
            return
        waiting, attempt.wanted = attempt.wanted, []
        for _, rank, wanted in waiting:
            if rank == 0:
                attempt.chosen[wanted.number] = self._choose(attempt, wanted)
        for peer, rank, wanted in waiting:
            if wanted.number in attempt.chosen:
                peer.send(messages.Bring(attempt.chosen[wanted.number]))
            else:
                attempt.wanted.append((peer, rank, wanted))

    def _choose(self, attempt: Attempt, wanted: reports.Wanted) -> orders.Arrived:
        found: CheckpointFile | ShardedCheckpoint | None
        if wanted.is_sharded:
            found = find(self._vault.sharded, self._vault.keep, wanted.step)
        else:
            found = find(self._vault.intact(), self._vault.keep, wanted.step)
        return orders.Arrived(attempt.number, wanted.number, found)

    def give_up_fetches(self) -> None:
        """Cancel the current fetch and all waiting fetches."""
        self._fetches.clear()

    def begin(self, number: int) -> None:
        """Begin an attempt. Accept only this attempt's checkpoints from now on."""
        self._vault.fence(number)
        self._committer.sweep(number)

    def shorten_pauses(self) -> None:
        """Keep the pauses before storage retries short, as no other attempt follows."""
        self._vault.worker.shorten_pauses()

    def store(self, storage: StoragePaths | None, timeout: float) -> str:
        """Wait until storage has the newest checkpoint. Return a message about the next attempt's start.

        Args:
            storage: Folders of the checkpoints. None without storage.
            timeout: Longest wait, in seconds.
        """
        step = self.newest_step
        is_stored = self._vault.flush(timeout) or step in [entry.step for entry in self._vault.sharded[-1:]]
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
        else:
            told = f"the next attempt goes on from the checkpoint of step {step}"
        for uncommitted in self.commits.values():
            told += f"; that of step {uncommitted} could not be committed in time"
        return told


@dataclass
class Fetches:
    """Fetches checkpoints from the agents' nodes, one at a time.

    Newer checkpoints replace older ones in the queue, except the best.
    """

    keep: Keep = field(default_factory=Keep)
    kept: Callable[[], Sequence[CheckpointFile]] = tuple
    """Returns the checkpoints on the driver's disk."""
    _queue: list[tuple[Peer, CheckpointFile]] = field(default_factory=list)
    """Fetches in the order of writing. The first one is running."""
    _num_retries: int = 0
    """Number of retries of the running fetch."""

    @property
    def is_busy(self) -> bool:
        """True while a fetch is running."""
        return bool(self._queue)

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        """Queue a checkpoint's fetch. Older checkpoints in the queue are skipped, except the best."""
        self._queue.append((peer, file))
        stay = retained([*self.kept(), *(queued for _, queued in self._queue)], replace(self.keep, last=1))
        self._queue = [*self._queue[:1], *(queued for queued in self._queue[1:] if queued[1] in stay)]
        if len(self._queue) == 1:
            self._request()

    def note_end(self, file: CheckpointFile) -> None:
        """Record that a checkpoint has arrived, and begin the next fetch."""
        if self._is_running(file):
            self._turn()

    def note_failure(self, file: CheckpointFile, *, is_worth_a_retry: bool) -> bool:
        """Record that a checkpoint's fetch has failed, and begin a retry or the next fetch.

        Args:
            file: The checkpoint.
            is_worth_a_retry: True if a retry may succeed.

        Returns:
            True if the checkpoint is given up. False after the start of a retry, or for a fetch that had already ended.
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
        """Drop the fetches from a lost agent."""
        is_running = bool(self._queue) and self._queue[0][0] is peer
        self._queue[1:] = [queued for queued in self._queue[1:] if queued[0] is not peer]
        if is_running:
            self._turn()

    def clear(self) -> None:
        """Drop the running fetch and the queue."""
        self._queue.clear()

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
