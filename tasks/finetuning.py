"""The model, the examples and the evaluation of a fine-tuning by LoRA. `stream_trainer` has the training."""

from __future__ import annotations

import hashlib
import math
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as BytesToText
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from tasks.checks import COUNT, is_whole, raise_if_wrong
from tasks.embedded_names import EMBEDDED_NAMES

END = "<|end|>"
MAX_LENGTH_OF_TINY = 64
"""Largest number of tokens of an example for the tiny model."""


@dataclass
class Hyperparameters(StrictInputs):
    """Hyper-parameters. A plain dataclass can be the input of a workflow."""

    steps: int = 200
    """Number of steps. The stream begins again at its end."""
    batch_size: int = 8
    """Examples per step of one rank."""
    learning_rate: float = 0.01
    """Initial learning rate of AdamW, which falls linearly to zero. For a pretrained model, 1e-4 to 2e-4 is usual."""
    lora_rank: int = 8
    """Rank of the adapter's matrices in all linear layers."""
    max_length: int = MAX_LENGTH_OF_TINY
    """Largest number of tokens of an example, which is cut off there."""
    checkpoint_interval: int = 50
    """Number of steps from one checkpoint and its evaluation to the next."""
    held_out: float = 0.1
    """Share of the examples to evaluate on. An example's hash decides."""
    num_held_out: int = 64
    """Largest number of held-out examples for one evaluation."""
    seed: int = 0
    """Seed of the tiny model's weights and of the adapter's initial weights."""

    def __post_init__(self) -> None:
        counts = ("steps", "lora_rank", "max_length", "checkpoint_interval", "num_held_out")
        raise_if_wrong(self, {name: (is_whole(getattr(self, name), 1), COUNT) for name in counts})


# ---- The model


def load_base(model: str, seed: int = 0) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """Return the model to fine-tune and its tokenizer.

    Args:
        model: A name at the Hugging Face Hub, or a folder. Empty: a tiny model with random weights.
        seed: Seed of the tiny model's weights.

    Raises:
        ValueError: No model can be loaded by this name, or from this folder.
    """
    if not model:
        return _tiny_model(seed)
    tokenizer = _pretrained(AutoTokenizer, model)
    base = _pretrained(AutoModelForCausalLM, model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return base, tokenizer


def check_model(model: str) -> None:
    """Raise a `ValueError` if the model's configuration or tokenizer cannot be loaded."""
    for kind in (AutoConfig, AutoTokenizer) if model else ():
        _pretrained(kind, model)


def _pretrained(kind: Any, model: str) -> Any:
    try:
        return kind.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={model!r} cannot be loaded: {str(error).splitlines()[0]} Give the name of a causal model at the "
            "Hugging Face Hub, with HF_TOKEN set for a gated one, or a folder by save_pretrained of model and tokenizer"
        ) from error


def _tiny_model(seed: int) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    pairs = Tokenizer(BPE())
    pairs.pre_tokenizer, pairs.decoder = ByteLevel(add_prefix_space=False), BytesToText()
    texts = (example["prompt"] + example["completion"] for example in _embedded_examples())
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=[END], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=END, pad_token=END)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,  # with the usual 0.02, an adapter could change next to nothing
        max_position_embeddings=MAX_LENGTH_OF_TINY,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer


# ---- The examples


def open_stream(data: str) -> IterableDataset:
    """Return a stream of examples, each with a `prompt` and a `completion`.

    Args:
        data: JSON lines with these two keys: a path, a pattern such as `data/*.jsonl`, https:// or s3://. Empty: an
            embedded exercise with the names of pets.

    Raises:
        ValueError: The data cannot be read, or the first example lacks a key.
    """
    if not data:
        return IterableDataset.from_generator(_embedded_examples)
    try:
        stream = load_dataset("json", data_files=data, split="train", streaming=True)
        first = next(iter(stream), {})
    except Exception as error:  # fsspec and each of its file systems have errors of their own
        what = str(error) or "no file has this name, or matches this pattern"
        raise ValueError(f"data={data!r} cannot be read as JSON lines: {type(error).__name__}: {what}") from error
    if missing := [key for key in ("prompt", "completion") if not isinstance(first.get(key), str)]:
        raise ValueError(
            f"data={data!r}: the first example has the keys {', '.join(first) or 'of no example'}, and no text for "
            f"{' and '.join(missing)}; give JSON lines such as " + '{"prompt": "2 + 2 =", "completion": " 4"}'
        )
    return stream.select_columns(["prompt", "completion"])


def _embedded_examples() -> Iterator[dict[str, str]]:
    for name in EMBEDDED_NAMES:
        if len(name) > 1 and set(name) <= set(string.ascii_lowercase):
            yield {"prompt": f"A pet's name from {name[0]} to {name[-1]}:", "completion": f" {name}"}


def split(stream: IterableDataset, held_out: float) -> tuple[IterableDataset, IterableDataset]:
    """Return the examples to train on, and the held-out ones. A hash of each example decides."""

    def is_held_out(example: dict[str, str]) -> bool:
        digest = hashlib.sha256(f"{example['prompt']}\0{example['completion']}".encode()).digest()
        return int.from_bytes(digest[:8]) < held_out * 2**64

    return stream.filter(lambda example: not is_held_out(example)), stream.filter(is_held_out)


# ---- The evaluation


def held_out_loss(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, data: str, hp: Hyperparameters) -> float:
    """Return the mean cross-entropy of the held-out completions, in nats per token."""
    device = current_rank().device
    model = model.to(device).eval()
    total, count = 0.0, 0
    for example in split(open_stream(data), hp.held_out)[1].take(hp.num_held_out):
        prompt = tokenizer(example["prompt"])["input_ids"]
        both = tokenizer(example["prompt"] + example["completion"] + tokenizer.eos_token)["input_ids"][: hp.max_length]
        if len(both) <= len(prompt):
            continue
        tokens = torch.tensor([both], device=device)
        with torch.no_grad():
            scores = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        total += float(torch.nn.functional.cross_entropy(scores, tokens[0, len(prompt) :], reduction="sum"))
        count += len(both) - len(prompt)
    return total / count if count else math.nan


def with_adapter(model: str, hp: Hyperparameters, adapter: str | Path) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Return the model with an adapter's weights, and its tokenizer."""
    base, tokenizer = load_base(model, hp.seed)
    return PeftModel.from_pretrained(base, str(adapter)), tokenizer


def complete(model: PeftModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return the model's most probable completion of a prompt."""
    inputs = tokenizer(prompt, return_tensors="pt").to(current_rank().device)
    tokens = model.generate(input_ids=inputs["input_ids"], max_new_tokens=12, do_sample=False)[0]
    return str(tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
