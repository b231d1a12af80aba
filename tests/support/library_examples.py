"""Each library's two-rank training as its own documentation has it, for `test_libraries_integration.py`. In ranks.

All see four samples in each step, two on each rank: only ranks that train together come, step after step, to what one
process makes of all four. On its own a rank would take two steps where both take one.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EPOCHS = 3
LEARNING_RATE = 0.1


def run_all(names: list[str], folder: str) -> list[dict[str, Any]]:
    """What each example of these names found on each rank."""
    found = {name: EXAMPLES[name](Path(folder)) for name in names}
    together: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(together, found)
    return together


# ---- What they have in common


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(*torch.randn(2, 4, 4, generator=generator))


def loader(**options: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(data(), batch_size=2, **options)


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def loss_of(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def alone() -> list[torch.Tensor]:
    """The weights that one process comes to with all samples in each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss_of(model, list(data().tensors)).backward()
        optimizer.step()
    return list(model.parameters())


def found(model: torch.nn.Module, expected: list[torch.Tensor], **others: Any) -> dict[str, Any]:
    """How far the weights are from those."""
    pairs = zip(model.parameters(), expected, strict=True)
    return {"distance": max(float((one - other).detach().abs().max()) for one, other in pairs), **others}


# ---- The libraries


def lightning_trainer(_: Path) -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.num_batches = 0

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.num_batches += 1
            loss = loss_of(self.network, batch)
            self.log("mean_loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    model = Regression()
    trainer = Trainer(
        max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=1
    )
    trainer.fit(model, loader())
    losses = float(trainer.callback_metrics["mean_loss_epoch"])
    results = found(model.network, alone(), num_batches=model.num_batches, size=trainer.world_size, mean_loss=losses)
    of_one, of_four = {"devices": 1, "num_nodes": 1}, {"devices": 2, "num_nodes": 2}
    for name, options in {"one": of_one, "four": of_four, "spawning": {"strategy": "ddp_spawn"}}.items():
        beside = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
        results[name] = refusal(lambda own=beside: own.fit(Regression(), loader()))
    return results


def refusal(call: Callable[[], object]) -> str | None:
    """What is said against something that does not fit the gang."""
    try:
        call()
    except ValueError as error:
        return str(error).partition(" of 2 ranks, and ")[2].partition(".")[0]
    return None


def lightning_fabric(_: Path) -> dict[str, Any]:
    """A program for `fabric run`, which leaves the launch to that; a call of its own changes nothing."""
    from lightning.fabric import Fabric

    fabric = Fabric()
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    num_batches = 0
    for _epoch in range(EPOCHS):
        for batch in fabric.setup_dataloaders(loader()):
            optimizer.zero_grad()
            fabric.backward(loss_of(wrapped, batch))
            optimizer.step()
            num_batches += 1
    ranks = float(fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum"))
    three = refusal(lambda: Fabric(devices=3, accelerator="cpu"))
    fabric.launch()
    return found(model, alone(), num_batches=num_batches, size=fabric.world_size, ranks=ranks, three=three)


def accelerate(_: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    wrapped, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    num_batches = 0
    for _epoch in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(loss_of(wrapped, batch))
            optimizer.step()
            num_batches += 1
    accelerator.wait_for_everyone()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index + 1.0])).sum().item()
    return found(model, alone(), num_batches=num_batches, size=accelerator.num_processes, ranks=ranks)


def transformers(folder: Path) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    model = language_model()
    one_process = copy.deepcopy(model)
    optimizer = torch.optim.SGD(one_process.parameters(), lr=LEARNING_RATE)
    batch = {name: torch.stack([text[name] for text in texts()]) for name in ("input_ids", "labels")}
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        one_process(**batch).loss.backward()
        optimizer.step()
    arguments = TrainingArguments(
        output_dir=str(folder / "transformers"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=texts())
    trainer.train()
    size, num_batches = arguments.world_size, trainer.state.global_step
    return found(model, list(one_process.parameters()), num_batches=num_batches, size=size)


def language_model(dropout: float = 0.0) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**shape, **dropouts, bos_token_id=0, eos_token_id=0))


def texts(number: int = 4) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(16, (number, 6), generator=torch.Generator().manual_seed(7))
    # The first of a text is nothing to predict; the Trainer counts it among the losses unless it is marked so.
    return [{"input_ids": text, "labels": torch.cat([torch.tensor([-100]), text[1:]])} for text in tokens]


EXAMPLES: dict[str, Callable[[Path], dict[str, Any]]] = {
    example.__name__: example for example in (lightning_trainer, lightning_fabric, accelerate, transformers)
}
