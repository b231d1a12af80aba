"""A callback that joins a Lightning `Trainer` with its gang. Imported by a user's program; runs in ranks.

gang = GangCallback()
trainer = Trainer(max_epochs=10, callbacks=[gang])
trainer.fit(model, ckpt_path=gang.ckpt_path)
"""

from __future__ import annotations

import contextlib
import math
import pickle
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import require_extra
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.rank.checkpoint import KeptFiles, keep_files
from flytekitplugins.daskpytorch.rank.libraries import require
from flytekitplugins.daskpytorch.rank.sharded import gathered

MINIMUM_VERSION = "2.6"
"""Killed and resumed trainings had a wrong result under Lightning 2.4."""

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    require_extra("lightning", "flytekitplugins.daskpytorch.lightning")
    from lightning.pytorch.callbacks import Checkpoint

    require("lightning", MINIMUM_VERSION)
else:  # the same library under its old name, which the program has imported before
    from pytorch_lightning.callbacks import Checkpoint

    require("pytorch_lightning", MINIMUM_VERSION)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["GangCallback"]

FILE = "gang.ckpt"


class GangCallback(Checkpoint):  # type: ignore[misc]
    """Lightning callback that logs metrics in the gang, saves checkpoints there, and stops when the gang stops.

    The module's metrics go to `current_rank().log` every `log_every_n_steps` steps and after each validation, with the
    loss and the epoch. Checkpoints are Lightning's own, with the random generators of all ranks added. They go to
    `current_rank().checkpoint` at the end of epochs and when the gang stops. The Trainer writes checkpoints to a folder
    only if it has a `ModelCheckpoint`, too. The checkpoint of an epoch's end has the logged and validated values as
    metrics, by which `Gang(keep=Keep(best=..., metric=...))` keeps the best.

    After a restart in the middle of an epoch, Lightning begins with the first batches of its data again, unless they
    come from torchdata's `StatefulDataLoader`.

    Examples:
        >>> from flytekitplugins.daskpytorch.lightning import GangCallback
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> gang = GangCallback(every_n_train_steps=500)
        >>> trainer = Trainer(max_epochs=1, callbacks=[gang], enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(BoringModel(), ckpt_path=gang.ckpt_path)
        >>> trainer.global_step
        64
    """

    def __init__(self, *, every_n_epochs: int = 1, every_n_train_steps: int | None = None) -> None:
        """Set how often a checkpoint is saved.

        Args:
            every_n_epochs: Number of epochs from one checkpoint to the next.
            every_n_train_steps: Number of optimizer steps from one additional checkpoint to the next. None: no
                additional checkpoints.

        Raises:
            ValueError: A value is not a whole number above 0.
        """
        self.every_n_epochs = every_n_epochs
        self.every_n_train_steps = every_n_train_steps
        rules = {"every_n_epochs": checks.COUNT, "every_n_train_steps": checks.optional(checks.COUNT)}
        checks.Problems("GangCallback", self, rules).raise_any()
        self._last_step = 0
        self._validated_step = -1
        self._evaluating = contextlib.ExitStack()
        self._num_steps: int | None = None
        self._kept = KeptFiles()

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint from which this attempt starts, for `trainer.fit`. None: there is no checkpoint."""
        return None if self._kept.folder is None else str(self._kept.folder / FILE)

    # ---- What the Trainer calls

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the temporary copy of the checkpoint, which the Trainer has loaded by now."""
        self._last_step = trainer.global_step
        num_steps = trainer.estimated_stepping_batches
        self._num_steps = int(num_steps) if math.isfinite(num_steps) and num_steps > 0 else None
        self._kept.remove()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log metrics and save a checkpoint if due. If the gang stops, save a checkpoint and stop the Trainer."""
        if current_rank().should_stop():
            self._save(trainer)
            trainer.should_stop = True
            # No time is left for a validation, or for the user's least numbers of epochs and steps.
            trainer.limit_val_batches = trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0
            return
        if trainer.global_step == self._last_step:  # gradients are accumulated
            return
        self._last_step = trainer.global_step
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._log(trainer, {} if loss is None else {"loss": loss})
        if self.every_n_train_steps is not None and trainer.global_step % self.every_n_train_steps == 0:
            self._save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the time from now to the validation's end as `Goodput.evaluation`."""
        self._evaluating.enter_context(current_rank().evaluating())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the time that counts as evaluation, and log the validation's metrics in the gang."""
        self._evaluating.close()
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step
            self._log(trainer, {})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a checkpoint if one is due after this epoch.

        The checkpoint has the logged metrics, unless the last validation belongs to an earlier step.
        """
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0 and not trainer.should_stop:
            is_validated = not trainer.enable_validation or self._validated_step == trainer.global_step
            self._save(trainer, trainer.callback_metrics if is_validated else {})  # else they are of an earlier state

    def state_dict(self) -> dict[str, Any]:
        """Return the random generators of all ranks, which each checkpoint has in addition to Lightning's state."""
        return {"generators": gathered(_generators())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's random generators. In a larger gang than the saved one, additional ranks keep theirs."""
        generators = state_dict["generators"]
        if (rank := current_rank().rank) < len(generators):  # now: what iterates over the data draws a number, too
            _restore_generators(generators[rank])

    # ---- How

    def _log(self, trainer: Trainer, loss: dict[str, Any]) -> None:
        metrics = {"epoch": trainer.current_epoch + 1, **loss, **trainer.callback_metrics}
        current_rank().log(metrics, step=trainer.global_step, num_steps=self._num_steps)

    def _save(self, trainer: Trainer, metrics: Mapping[str, Any] | None = None) -> None:
        with TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder) / FILE)
            keep_files(Path(folder), trainer.global_step, metrics=metrics)


def _generators() -> bytes:
    import torch

    of_numpy = numpy.random.get_state() if (numpy := sys.modules.get("numpy")) else None
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return pickle.dumps((random.getstate(), of_numpy, torch.get_rng_state(), on_gpu))


def _restore_generators(state: bytes) -> None:
    import torch

    of_python, of_numpy, on_cpu, on_gpu = pickle.loads(state)  # noqa: S301 - from our own checkpoint
    random.setstate(of_python)
    if of_numpy is not None and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(of_numpy)
    torch.set_rng_state(on_cpu)
    if on_gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(on_gpu)
