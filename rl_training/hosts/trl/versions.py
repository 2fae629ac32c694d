"""The versions of TRL and transformers that work here, and everything in which they differ.

No other module compares versions. Nothing is added to a trainer: where an older version lacks an attribute,
`of_trainer` and `setting` return what a newer one would have. The tests check each `since` against the installed
versions.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import metadata
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOTrainer
from trl import __version__ as trl_version
from trl.models import unwrap_model_for_generation as trl_unwrap
from trl.trainer import grpo_trainer

WRITTEN_FOR = "trl>=1.0,<2"  # the same as in setup.cfg
TESTED = {"trl": "1.16", "transformers": "5.23", "torch": "2.13"}  # the same as in constraints.txt
NO_CPU = "1.15"  # this minor version of TRL computes its loss with a Triton kernel, which needs a GPU


class Newer(NamedTuple):
    """An attribute that the older of the supported versions lack."""

    since: str  # the library and the first version that has it
    before: Callable[[Any], Any]  # returns the value that describes an older version, from the object that lacks it


# Attributes of a trainer.
OF_TRAINER: dict[str, Newer] = {
    # all tokens that end a response; before, only the tokenizer's did
    "eos_token_ids": Newer("trl 1.14.2", lambda trainer: [tokenizer_of(trainer).eos_token_id]),
    # the function or functions that make environments, None without; before, the environments themselves
    "environment_factories": Newer("trl 1.8.0", lambda trainer: trainer.environments),
    # whether a mixture of experts adds its load-balancing loss; before, it never did
    "aux_loss_enabled": Newer("trl 1.7.0", lambda trainer: False),
    # bounds of the importance weights of vLLM's samples; before, there was only an upper one
    "vllm_importance_sampling_clip_min": Newer("trl 1.6.0", lambda trainer: None),
    "vllm_importance_sampling_clip_max": Newer("trl 1.6.0", lambda trainer: trainer.vllm_importance_sampling_cap),
}
# Attributes of a trainer's arguments.
OF_ARGUMENTS: dict[str, Newer] = {
    "entropy_coef": Newer("trl 1.8.0", lambda args: 0.0),
    "use_adaptive_entropy": Newer("trl 1.8.0", lambda args: False),
    "ddp_static_graph": Newer("transformers 5.6.0", lambda args: False),
}
# Fields of GRPOConfig, in all supported versions together, whose effect on loss and sampling is known here.
KNOWN_SETTINGS = {
    "beta", "cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "delta", "disable_dropout",
    "ds3_gather_for_generation", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min",
    "entropy_target", "epsilon", "epsilon_high", "generation_batch_size", "generation_kwargs",
    "importance_sampling_level", "log_completions", "log_completions_hub_repo", "log_multimodal",
    "log_unique_prompts", "loss_type", "mask_truncated_completions", "max_completion_length",
    "max_tool_calling_iterations", "min_p", "model_init_kwargs", "multi_objective_aggregation",
    "num_completions_to_print", "num_generations", "num_generations_eval", "num_iterations",
    "off_policy_mask_threshold", "pad_to_multiple_of", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "repetition_penalty", "reward_weights", "router_aux_loss_coef", "sapo_temperature_neg",
    "sapo_temperature_pos", "scale_rewards", "shuffle_dataset", "steps_per_generation", "sync_ref_model",
    "temperature", "top_entropy_quantile", "top_k", "top_p", "transformers_continuous_batching_config",
    "trust_remote_code", "use_adaptive_entropy", "use_bias_correction_kl",
    "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm", "vespo_k_neg", "vespo_k_pos",
    "vespo_lambda_neg", "vespo_lambda_pos", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization",
    "vllm_group_port", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port", "vllm_server_timeout", "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
}  # fmt: skip


@functools.cache  # asked for twice per microbatch, and metadata is read from a file
def is_installed(since: str) -> bool:
    """Return whether a library is installed in this version or a later one, given as in "trl 1.8.0"."""
    library, version = since.split()
    return _numbers(metadata.version(library)) >= _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version; one before a release (1.17.0.dev0) counts as the release."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def installed_members(newer: Mapping[str, Newer]) -> set[str]:
    """Return the names in OF_TRAINER or OF_ARGUMENTS that the installed versions have."""
    return {name for name, row in newer.items() if is_installed(row.since)}


def of_trainer(trainer: GRPOTrainer, name: str) -> Any:
    """Return an attribute of a trainer that is in OF_TRAINER."""
    return getattr(trainer, name) if hasattr(trainer, name) else OF_TRAINER[name].before(trainer)


def setting(args: Any, name: str) -> Any:
    """Return a setting of a trainer's arguments, also one that its version does not have yet."""
    return OF_ARGUMENTS[name].before(args) if name in OF_ARGUMENTS and not hasattr(args, name) else getattr(args, name)


def tokenizer_of(trainer: GRPOTrainer) -> PreTrainedTokenizerBase:
    """Return the tokenizer, also of a processor for images. TRL keeps it as `_tokenizer` since 1.3.0."""
    processor = trainer.processing_class
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def has_images(trainer: GRPOTrainer) -> bool:
    """Return whether prompts may hold images. TRL keeps it as `_is_vlm` since 1.1.0."""
    return isinstance(trainer.processing_class, ProcessorMixin)


def generation_calls_code(trainer: GRPOTrainer) -> bool:
    """Return whether generation calls tools, environments or a rollout_func, whose state it may change."""
    environments = of_trainer(trainer, "environment_factories")
    return bool(trainer.tools) or environments is not None or trainer.rollout_func is not None


def parameters_of(method: Callable[..., Any]) -> set[str]:
    """Return the names of a method's parameters."""
    return {*inspect.signature(method).parameters, *_signature(method)}


def argument_of(name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call of a trainer's method, by its name in TRL's own method.

    Arguments that a subclass adds, after TRL's or by name, are ignored.

    Args:
        name: The name of the argument.
        method: The name of the method.
        args: What the call has passed by position, without the trainer.
        kwargs: What it has passed by name.
    """
    signature = _signature(getattr(GRPOTrainer, method))
    by_position = dict(zip([parameter for parameter in signature if parameter != "self"], args, strict=False))
    given = {**by_position, **kwargs}
    return given[name] if name in given else signature[name].default


def _signature(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a method's parameters in their order. TRL 1.14 names those of its forward pass in a function it calls."""
    named = inspect.signature(method).parameters
    passes_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in named.values())
    callee = getattr(GRPOTrainer, "_full_logits_logps", None)
    return inspect.signature(callee).parameters if passes_on and callee is not None else named


# The positions of an image's patches, among the model's inputs in a batch: renamed in 1.1.0.
IMAGE_POSITIONS = "image_position_ids" if is_installed("trl 1.1.0") else "pixel_position_ids"
# The forward pass returns log-probabilities, entropies and, since 1.7.0, the auxiliary loss or None.
NUM_SCORES = 3 if is_installed("trl 1.7.0") else 2


def unwrap_for_generation(model: Any, accelerator: Any, checkpointing: dict[str, Any] | None) -> AbstractContextManager:
    """Unwrap a model for generation, without gathering weights of ZeRO-3.

    Args:
        model: The wrapped model.
        accelerator: The trainer's.
        checkpointing: The arguments with which gradient checkpointing is switched on again afterwards; since 1.16.0.
    """
    newer = {"gradient_checkpointing_kwargs": checkpointing} if is_installed("trl 1.16.0") else {}
    return trl_unwrap(model, accelerator, gather_deepspeed3_params=False, **newer)


def enable_checkpointing(model: PreTrainedModel, arguments: dict[str, Any] | None) -> None:
    """Switch on a model's gradient checkpointing, whose method has been renamed in transformers 5.23.0."""
    if is_installed("transformers 5.23.0"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def keep_graph_of_entropies(undo: ExitStack) -> None:
    """Until `undo` is closed, let the forward pass return entropies with graph, as it always does since 1.15.0.

    Before, it does so only if the loss has an entropy bonus: 1.14 passes this to the function that computes them, and
    older versions call it under no_grad.
    """
    if is_installed("trl 1.15.0"):
        return
    name = "selective_log_softmax_and_entropy" if is_installed("trl 1.14.0") else "entropy_from_logits"
    original: Callable[..., Any] = getattr(grpo_trainer, name)

    @functools.wraps(original)
    def with_graph(*args: Any, **kwargs: Any) -> Any:
        if "entropy_requires_grad" in kwargs:
            kwargs["entropy_requires_grad"] = True
        with torch.enable_grad():
            return original(*args, **kwargs)

    setattr(grpo_trainer, name, with_graph)
    undo.callback(setattr, grpo_trainer, name, original)


def cannot_train_reason(device: torch.device) -> str | None:
    """Return the reason why the installed TRL itself cannot train on a device, with the fix, or None."""
    if device.type == "cpu" and trl_version.startswith(f"{NO_CPU}."):
        return f"trl {trl_version} computes its loss on a GPU only, by a Triton kernel: pip install 'trl!={NO_CPU}.*'"
    return None
