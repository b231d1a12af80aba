"""A callback that joins a Transformers `Trainer` with its gang. Imported by a user's program; runs in ranks.

gang = GangCallback()
trainer = Trainer(model, TrainingArguments(save_strategy="epoch"), train_dataset=data, callbacks=[gang])
trainer.train(resume_from_checkpoint=gang.resume_from_checkpoint)
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.checks import require_extra
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.rank.checkpoint import KeptFiles, keep_files
from flytekitplugins.daskpytorch.rank.libraries import require

__all__ = ["GangCallback"]

require_extra("transformers", "flytekitplugins.daskpytorch.transformers")
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402 - or its error

require("transformers", "5.20")  # 5.19 needs a GPU or torch 2.7, older ones cannot go on from a checkpoint on CPUs


class GangCallback(TrainerCallback):  # type: ignore[misc]
    """Trainer callback that logs metrics in the gang, saves checkpoints there, and stops when the gang stops.

    The Trainer's logs go to `current_rank().log`, as often as `logging_strategy` says. Its checkpoints in `output_dir`
    go to `current_rank().checkpoint`, too, as often as `save_strategy` says, with the random generators of all ranks.
    When the gang stops, the Trainer saves once more and returns.

    Evaluations during the training count as `Goodput.evaluation`. Put your own calls of `trainer.evaluate()` and
    `trainer.predict()` into `with current_rank().evaluating():`.

    A checkpoint that follows an evaluation has the evaluation's numbers, such as `eval_loss`, as metrics, by which
    `Gang(keep=Keep(best=..., metric=...))` keeps the best.

    Examples:
        >>> from flytekitplugins.daskpytorch.transformers import GangCallback
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> gang = GangCallback()
        >>> small = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8, bos_token_id=0, eos_token_id=0)
        >>> texts = [{"input_ids": [number] * 4, "labels": [number] * 4} for number in range(8)]
        >>> arguments = TrainingArguments("output", num_train_epochs=2, save_strategy="epoch", report_to="none")
        >>> trainer = Trainer(GPT2LMHeadModel(small), arguments, train_dataset=texts, callbacks=[gang])
        >>> trainer.train(resume_from_checkpoint=gang.resume_from_checkpoint).global_step
        {'train_runtime': ...}
        2
    """

    def __init__(self) -> None:
        self._evaluated: tuple[int, dict[str, Any]] = (-1, {})
        self._evaluating = contextlib.ExitStack()
        self._kept = KeptFiles()

    @property
    def resume_from_checkpoint(self) -> str | None:
        """Path of the checkpoint from which this attempt starts, for `trainer.train`. None: there is no checkpoint."""
        return None if self._kept.folder is None else str(self._kept.folder)

    # ---- What the Trainer calls

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If the gang stops, let the Trainer save a last checkpoint, skip the evaluation, and stop."""
        self._kept.remove()  # all ranks have read the files, since they have exchanged gradients
        if current_rank().should_stop():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        self._note_evaluation(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """If an evaluation follows the epoch, begin to count time as `Goodput.evaluation`."""
        self._note_evaluation(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the evaluation's metrics, which a checkpoint of the same step gets."""
        self._evaluating.close()
        numbers = {name: value for name, value in kwargs["metrics"].items() if isinstance(value, (int, float))}
        self._evaluated = state.global_step, numbers

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the checkpoint that the Trainer has written as a checkpoint of the gang."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        step, metrics = self._evaluated
        own = [f"rng_state_{args.process_index}.pth"]
        keep_files(folder, state.global_step, own, metrics if step == state.global_step else {})

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pass what the Trainer logs to `current_rank().log`."""
        current_rank().log(kwargs["logs"], step=state.global_step, num_steps=state.max_steps)

    def _note_evaluation(self, control: TrainerControl) -> None:
        """Begin to count time as evaluation if the Trainer evaluates next. No callback marks its beginning."""
        self._evaluating.close()
        if control.should_evaluate:
            self._evaluating.enter_context(current_rank().evaluating())
