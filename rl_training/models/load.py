"""Loads a causal language model and its tokenizer, with errors that say what to do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_bitsandbytes_available, logging

from rl_training.errors import UserError
from rl_training.models.adapter_patterns import refuse_endless_patterns
from rl_training.records.files.limited import read_text
from rl_training.records.folder import ADAPTER_CONFIG_FILE

TINY_PATH = Path(__file__).parent / "assets" / "tiny"  # the model that ships with the package: see tiny.py
IMPLEMENTATION = "_implementation"  # end of the settings of a config.json that can name a kernel from the Hub


def load_causal_lm(
    name: str | Path, dtype: str = "float32", quantization: str | None = None, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return (model, tokenizer) from a folder or the Hugging Face Hub. Code that comes with the model is never run.

    Args:
        name: A folder, or a name on the Hub.
        dtype: dtype of the weights: "float32", "bfloat16" or "auto". Trained weights should be fp32, with bf16
            autocast. Frozen weights under an adapter can have the checkpoint's dtype.
        quantization: "nf4" loads the linear layers in 4 bits, to train an adapter on top. Matrix products are computed
            in `dtype`.
        attn_implementation: "sdpa", "eager", "flash_attention_2", …; None uses the model's default. If the
            implementation supports only 16 bits, measurements in fp32 use sdpa.

    Raises:
        UserError: If the checkpoint is missing, incomplete or corrupt, or has no end-of-sequence token.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"model.dtype={dtype} is not a dtype of torch: use float32, bfloat16 or auto")
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if quantization is not None:
        options["quantization_config"] = _four_bits(quantization, dtype)
    with _explain_failed_load(name):
        _refuse_kernels(name, attn_implementation)
        refuse_code_in_adapter(Path(name))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=False)
    _keep_backward_on_cpu(model)
    _check_tokenizer(tokenizer, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


@contextlib.contextmanager
def _explain_failed_load(name: str | Path) -> Iterator[None]:
    """Turn the error of any library inside the context into a UserError that says what to give as model.name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a missing or damaged file raises errors of various libraries
        if "trust_remote_code" in str(error):
            raise UserError(
                f"model.name={name} needs code that comes with it (auto_map), which is never run here: choose a model "
                "that transformers has itself"
            ) from error
        if str(name).startswith(("/", ".", "~")) and not Path(name).is_dir():
            raise UserError(f"model.name={name}: there is no such folder") from error
        raise UserError(
            f"no model could be loaded from model.name={name}: {type(error).__name__}: {error}\n"
            "Give model.name=FOLDER with config.json, weights and tokenizer files as save_pretrained writes them, "
            "or a name on the Hub, or use model=tiny"
        ) from error


def _keep_backward_on_cpu(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from changing 4-bit layers, on CPUs, to a layout for evaluation, which has no backward."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Raise UserError for a tokenizer without content or without an end-of-sequence token."""
    if not tokenizer("a 1").input_ids:  # without tokenizer files, transformers returns an empty tokenizer
        raise UserError(f"model.name={name} has no tokenizer: put its files there (tokenizer.json, as it was trained)")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of model.name={name} has no end-of-sequence token: set its eos_token")


def refuse_code_in_adapter(folder: Path, names: Iterable[str] = ()) -> None:
    """Raise UserError if the adapter in a folder names a module that PEFT would import, or has an endless pattern.

    Args:
        folder: The folder.
        names: Names of the modules that its patterns are matched with, as far as they are known.
    """
    file = folder / ADAPTER_CONFIG_FILE
    adapter = json.loads(read_text(file)) if file.is_file() else {}
    if not isinstance(adapter, dict):
        raise UserError(f"{file} holds no settings of an adapter: repair it")
    if adapter.get("megatron_config"):
        raise UserError(f"{file} names modules to be imported (megatron_config), which no run writes: remove them")
    refuse_endless_patterns(adapter, str(file), names)


def adapter_base(folder: Path) -> str:
    """Return the name of the model that the adapter in a folder was trained on. UserError if it names none."""
    with contextlib.suppress(ValueError, OSError):
        name = json.loads(read_text(folder / ADAPTER_CONFIG_FILE)).get("base_model_name_or_path")
        if name:
            return str(name)
    raise UserError("its adapter does not name its base model: give model=hub model.name=PATH")


def _refuse_kernels(name: str | Path, attn_implementation: str | None) -> None:
    """Raise UserError if the config.json of a model names a kernel of the Hub, which would be fetched and run.

    transformers takes a name, or names by part of the model, at any depth: {"": "somebody/kernel"}. What the caller
    asks for replaces it for attention alone.
    """
    config = PreTrainedConfig.get_config_dict(name)[0]
    for setting, kernel in _kernels_in(config):
        if setting.endswith("attn_implementation") and attn_implementation is not None:
            continue
        fix = "give model.attn_implementation=sdpa" if setting.endswith("attn_implementation") else "remove it"
        raise UserError(
            f"the config.json of model.name={name} would fetch and run compiled code: {setting}: {kernel!r}; {fix}"
        )


def _kernels_in(node: Any, setting: str = "") -> Iterator[tuple[str, str]]:
    """Yield the setting and the name of each kernel that a model's configuration names."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _kernels_in(value, str(key) if str(key).endswith(IMPLEMENTATION) else setting)
    elif isinstance(node, list):
        for value in node:
            yield from _kernels_in(value, setting)
    elif setting and isinstance(node, str) and "/" in node:
        yield setting, node


def load_tiny(
    dtype: str = "float32", quantization: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the (model, tokenizer) that ship with the package. See tiny.py."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would show for a moment only
    try:
        return load_causal_lm(TINY_PATH, dtype, quantization)
    finally:
        if shown:
            logging.enable_progress_bar()


def _four_bits(quantization: str, dtype: str) -> BitsAndBytesConfig:
    if quantization != "nf4":
        raise UserError(f"model.quantization={quantization} is not known: use nf4, or null for none")
    if not is_bitsandbytes_available():
        raise UserError("4-bit weights need bitsandbytes: pip install 'rl-training[qlora]', or use adapter=lora")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=None if dtype == "auto" else dtype,
    )
