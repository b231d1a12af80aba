"""Train a LoRA adapter with TRL's `SFTTrainer` in a gang, on a stream whose position checkpoints keep.

    stream of examples -> TRL's tokenisation -> StreamLoader (position of the gang) -> StreamTrainer -> adapter

All ranks read the whole stream, and each trains on its share of every batch. One position therefore holds for all
ranks, and a gang that starts again with fewer ranks goes on with the next example.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.transformers import GangCallback
from tasks.finetuning import Hyperparameters, load_base, open_stream, split

POSITION = "stream.json"
"""File in each checkpoint with the position in the stream."""


class StreamLoader:
    """Batches of this rank from a stream, with the position of the whole gang after the last batch.

    No batch is fetched ahead, so the position is exact. A stream that shuffles in a buffer has no exact position.
    """

    def __init__(self, stream: IterableDataset, batch_size: int, collate: Callable[[list[Any]], Any]) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._collate = collate

    def __iter__(self) -> Iterator[Any]:
        rank = current_rank()
        examples = iter(self._stream)
        while of_all := list(itertools.islice(examples, self._batch_size * rank.world_size)):
            yield self._collate(of_all[rank.rank :: rank.world_size])

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks, as values that JSON can hold."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position, also to that of a gang with another number of ranks."""
        self._stream.load_state_dict(state)


class StreamTrainer(SFTTrainer):
    """Trainer that takes its batches from a `StreamLoader`, and writes the position into each checkpoint."""

    def get_train_dataloader(self) -> StreamLoader:
        """Return the loader, whose position the callback saves."""
        return self.loader

    def prepare(self, gang: GangCallback) -> None:
        """Put the loader at the position of the checkpoint from which this attempt starts."""
        self.loader = StreamLoader(self.train_dataset, self.args.per_device_train_batch_size, self.data_collator)
        if gang.resume_from_checkpoint is not None:
            self.loader.load_state_dict(json.loads(Path(gang.resume_from_checkpoint, POSITION).read_text()))
        self.add_callback(KeepPosition(self.loader))
        self.add_callback(gang)  # afterwards, since it saves what is in the folder by then


class KeepPosition(TrainerCallback):
    """Callback that adds the position in the stream to the Trainer's checkpoints."""

    def __init__(self, loader: StreamLoader) -> None:
        self._loader = loader

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the position beside the files that the Trainer has written."""
        if current_rank().is_main:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / POSITION).write_text(json.dumps(self._loader.state_dict()))


def train(model: str, data: str, hp: Hyperparameters, folder: Path) -> Path:
    """Train on all ranks together, and return rank 0's folder with the adapter's files."""
    base, tokenizer = load_base(model, hp.seed)
    stream, _ = split(open_stream(data), hp.held_out)
    arguments = SFTConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=hp.steps,
        per_device_train_batch_size=hp.batch_size,
        learning_rate=hp.learning_rate,
        max_length=hp.max_length,
        seed=hp.seed,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        ddp_find_unused_parameters=False,
        save_steps=hp.checkpoint_interval,
        save_total_limit=1,
        logging_steps=5,
        report_to="none",  # the gang's trackers get the metrics
        disable_tqdm=True,
        ignore_data_skip=True,  # the loader is at its position already
    )
    trainer = StreamTrainer(
        base,
        arguments,
        train_dataset=stream.repeat(None),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=hp.lora_rank, lora_alpha=2 * hp.lora_rank, target_modules="all-linear"),
    )
    gang = GangCallback()
    trainer.prepare(gang)
    trainer.train(resume_from_checkpoint=gang.resume_from_checkpoint)
    adapter = folder / "adapter"
    if current_rank().is_main:
        trainer.model.save_pretrained(adapter)
        tokenizer.save_pretrained(adapter)
    return adapter
