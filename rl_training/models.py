"""Loading of a causal language model and its tokenizer, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rl_training.tiny import TINY_PATH


def load_causal_lm(name: str | Path, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns (model, tokenizer) of a folder or of a name on the Hugging Face Hub.

    dtype  of the weights, "float32", "bfloat16" or "auto"; training in fp32 weights with bf16 autocast is the norm

    Raises ValueError when the checkpoint is missing, incomplete or corrupt, or has no end-of-sequence token.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"model.dtype={dtype} is not a dtype of torch: use float32, bfloat16 or auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except Exception as error:  # each missing or damaged file raises an error of its own library's
        where = "folder" if Path(name).is_dir() else "folder of that name, and on the Hugging Face Hub none was loaded"
        if str(name).startswith(("/", ".", "~")) and not Path(name).is_dir():
            raise ValueError(f"model.name={name}: there is no such folder") from error
        raise ValueError(
            f"no model could be loaded from model.name={name} ({where}): {type(error).__name__}: {error}\n"
            "Give model.name=FOLDER with config.json, weights and tokenizer files as save_pretrained writes them, "
            "or a name on the Hub, or use model=tiny"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of model.name={name} has no end-of-sequence token: set its eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the (model, tokenizer) that ship with the package. See rl_training/tiny.py."""
    return load_causal_lm(TINY_PATH)
