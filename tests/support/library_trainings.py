"""Trainings by Lightning and Transformers that are killed or stopped on the way, for `test_libraries_integration.py`.

They shuffle, drop out, and have an optimizer with a memory: the result is the undisturbed one only if all comes back.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import library_examples
from flytekitplugins.daskpytorch import current_rank
from processes import until

NUM_SAMPLES = 16
"""Four steps to an epoch, with two ranks and batches of two."""


def break_when_due(folder: str, step: int, breaks_at: int | None) -> None:
    """Kill rank 1 after a step, once, with the checkpoint of step 4 safe."""
    if step == breaks_at and current_rank().rank == 1 and not Path(folder, "broken").exists():
        until(lambda: Path(folder, "kept-4").exists(), "the checkpoint of step 4")
        Path(folder, "broken").touch()
        time.sleep(1)  # lost, which has to be more than a busy driver is late to hear that the ranks have met
        os.kill(os.getpid(), signal.SIGKILL)


def start(folder: str, step: int) -> None:
    """Leave a trace of where an attempt starts."""
    with Path(folder, f"start-{current_rank().rank}").open("a") as file:
        file.write(f"{step} {os.getpid()}\n")


def note_metrics(folder: str) -> None:
    """Leave a trace of what the best checkpoint was saved with, if the gang keeps one."""
    checkpoint = current_rank().checkpoint
    if current_rank().is_main:
        try:
            checkpoint.load(best=True)
        except ValueError:  # the gang keeps no best one
            return
        assert checkpoint.loaded is not None
        Path(folder, "best").write_text(json.dumps([checkpoint.loaded.step, dict(checkpoint.loaded.metrics)]))


def evaluated_by_lightning() -> dict[str, float]:
    """The loss of a checkpoint of `by_lightning` over all samples."""
    from flytekitplugins.daskpytorch.lightning import GangCallback

    gang = GangCallback()  # holds the files
    assert gang.ckpt_path is not None
    weights = torch.load(gang.ckpt_path, weights_only=False)["state_dict"]
    model = library_examples.network()
    model.load_state_dict({name.removeprefix("network.0."): value for name, value in weights.items()})
    with torch.no_grad():
        losses = [float(library_examples.loss_of(model.eval(), batch)) for batch in loader()]
    return {"loss_beside": sum(losses) / len(losses)}


def evaluated_by_transformers() -> dict[str, float]:
    """The loss of a checkpoint of `by_transformers` over all samples."""
    from transformers import GPT2LMHeadModel

    from flytekitplugins.daskpytorch.transformers import GangCallback

    gang = GangCallback()  # holds the files
    assert gang.resume_from_checkpoint is not None
    texts = library_examples.texts(NUM_SAMPLES)
    batch = {name: torch.stack([text[name] for text in texts]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        return {"loss_beside": float(GPT2LMHeadModel.from_pretrained(gang.resume_from_checkpoint).eval()(**batch).loss)}


def by_lightning(folder: str, breaks_at: int | None = None, epochs: int = 3) -> dict[str, torch.Tensor]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from flytekitplugins.daskpytorch.lightning import GangCallback

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Sequential(library_examples.network(), torch.nn.Dropout(0.5))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = library_examples.loss_of(self.network, batch)
            self.log("own_loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("validated", library_examples.loss_of(self.network, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Trace(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            start(folder, trainer.global_step)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            break_when_due(folder, trainer.global_step, breaks_at)

    model = Training()
    torch.manual_seed(1 + current_rank().rank)  # every rank drops out on its own
    gang = GangCallback()
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[gang, Trace()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
    )
    trainer.fit(model, loader(shuffle=True), loader(), ckpt_path=gang.ckpt_path)
    Path(folder, f"ended-{current_rank().rank}").write_text(str(trainer.global_step))
    note_metrics(folder)
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_transformers(folder: str, breaks_at: int | None = None, epochs: int = 3) -> dict[str, torch.Tensor]:
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from flytekitplugins.daskpytorch.transformers import GangCallback

    class Trace(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            start(folder, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            break_when_due(folder, state.global_step, breaks_at)

    set_seed(1)
    model = library_examples.language_model(dropout=0.5)
    arguments = TrainingArguments(
        # As on two machines: what one rank writes is not there for the other.
        output_dir=f"{folder}/output-{current_rank().rank}",
        num_train_epochs=epochs,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        logging_steps=2,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        save_on_each_node=True,
        report_to="none",
        disable_tqdm=True,
    )
    gang = GangCallback()
    texts = library_examples.texts(NUM_SAMPLES)
    trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts, callbacks=[gang, Trace()])
    trainer.train(resume_from_checkpoint=gang.resume_from_checkpoint)
    Path(folder, f"ended-{current_rank().rank}").write_text(str(trainer.state.global_step))
    note_metrics(folder)
    return {name: value.clone() for name, value in model.state_dict().items()}


def loader(**options: Any) -> torch.utils.data.DataLoader[Any]:
    samples = torch.randn(2, NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples), batch_size=2, **options)


EVALUATIONS: dict[str, Callable[[], dict[str, float]]] = {
    "lightning": evaluated_by_lightning,
    "transformers": evaluated_by_transformers,
}
TRAININGS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "lightning": by_lightning,
    "transformers": by_transformers,
}
