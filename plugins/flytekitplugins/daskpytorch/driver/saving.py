"""Transfer of a gang's checkpoints from ranks and to ranks. Runs in the driver.

Rank 0 writes a whole checkpoint, which its agent sends to the driver (`checkpoints`). All ranks write the shards of a
sharded checkpoint directly to storage, and the driver commits the checkpoint (`committer`).
"""

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.announcer import Announcer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.checkpoints import Checkpoints, Fetches
from flytekitplugins.daskpytorch.driver.committer import Committed, Committer
from flytekitplugins.daskpytorch.driver.goodput import Accountant
from flytekitplugins.daskpytorch.driver.retention import hint_of_metric, listed
from flytekitplugins.daskpytorch.protocol import messages, orders, reports
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.sharded import Sharding, WrittenShards
from flytekitplugins.daskpytorch.settings import Keep


class Saving:
    """Handles one gang's checkpoints, across all attempts."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        committer: Committer,
        accountant: Accountant,
        announcer: Announcer,
        *,
        keep: Keep,
    ) -> None:
        self._checkpoints = checkpoints
        self._committer = committer
        self._accountant = accountant
        self._announcer = announcer
        self._keep = keep
        self._fetches = Fetches(keep, checkpoints.entries)
        self.newest: CheckpointFile | None = None
        """Whole checkpoint from which the attempt starts, or None."""
        self.has_news = False
        """True if a checkpoint has been kept since `Brain` last reset this."""
        self.commits: dict[tuple[int, int], int] = {}
        """Attempt number and save number -> step of a sharded checkpoint during its commit."""

    # ---- what happens

    def note_saved(self, peer: Peer, attempt: Attempt, rank: int, file: CheckpointFile) -> None:
        """Record that a rank wrote a whole checkpoint, and request the file from its agent."""
        attempt.steps[rank] = file.step
        self._fetches.fetch(peer, file)

    def note_kept(self, attempt: Attempt | None, file: CheckpointFile, error: Exception | None) -> None:
        """Record the arrival of a whole checkpoint in the driver, or its failed transfer."""
        if error is None:
            self._fetches.note_end(file)
            self._count_as_kept(attempt, file.attempt, file.step)
        elif self._fetches.note_failure(file, is_worth_a_retry=isinstance(error, (EOFError, ConnectionError))):
            self._announcer.note(
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
        self._announcer.note(
            f"the sharded checkpoint of step {said.step} was not kept: rank {failed} could not write its part "
            f"({why.reason}); the training goes on"
        )
        self._committer.sweep(attempt.number, said.number)
        attempt.tell(messages.Tell(orders.Settled(said.number, said.step, committed=False)))

    def note_committed(self, attempt: Attempt | None, commit: Committed) -> None:
        """Record the commit of a sharded checkpoint, or its failure."""
        self.commits.pop((commit.attempt, commit.number), None)
        if commit.error is None:
            self._count_as_kept(attempt, commit.attempt, commit.step)
        else:
            self._announcer.note(
                f"the sharded checkpoint of step {commit.step} was not kept ({commit.error!r}); the training goes on"
            )
        self._committer.sweep(commit.attempt, commit.number)
        if attempt is not None and attempt.number == commit.attempt and not attempt.is_over:
            attempt.note_stirring()
            attempt.tell(messages.Tell(orders.Settled(commit.number, commit.step, committed=commit.error is None)))

    def forget(self, peer: Peer) -> None:
        """Cancel fetches from a lost agent."""
        self._fetches.forget(peer)

    def _count_as_kept(self, attempt: Attempt | None, number: int, step: int) -> None:
        self.has_news = True
        if attempt is not None and attempt.number == number:
            attempt.has_saved = True
            self._accountant.keep(step)
        self._announcer.tell("kept", step)
        kept = self.saved()
        self._announcer.tell("keeps", kept)
        if (hint := hint_of_metric(kept, self._keep)) is not None:
            self._announcer.hint("metric", hint)
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
        return listed(self._checkpoints.saved(), self._committer.saved())

    def sharding(self) -> Sharding:
        """Return the folder for new shards, and the sharded checkpoints available to ranks."""
        return self._committer.sharding()

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint of both kinds. None without checkpoints."""
        newest = (self.newest, self._committer.newest())
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
        found = (self._committer if wanted.is_sharded else self._checkpoints).find(wanted.step)
        return orders.Arrived(attempt.number, wanted.number, found)

    def give_up_fetches(self) -> None:
        """Cancel the current fetch and all waiting fetches."""
        self._fetches.clear()

    def begin(self, number: int) -> None:
        """Begin an attempt. Accept only this attempt's checkpoints from now on, and set `newest`."""
        self._checkpoints.fence(number)
        self._committer.sweep(number)
        self.newest = self._checkpoints.newest()

    def hurry(self) -> None:
        """Keep the pauses before storage retries short, as no other attempt follows."""
        self._committer.vault.worker.hurry()

    def store(self, storage: StoragePaths | None, timeout: float) -> str:
        """Wait until storage has the newest checkpoint. Return a message about the next attempt's start.

        Args:
            storage: Folders of the checkpoints. None without storage.
            timeout: Longest wait, in seconds.
        """
        self.newest = self._checkpoints.newest()
        step, sharded = self.newest_step, self._committer.newest()
        is_stored = self._checkpoints.flush(timeout) or (sharded is not None and sharded.step == step)
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
