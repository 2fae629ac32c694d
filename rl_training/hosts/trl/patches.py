"""The private members of TRL and transformers that this package relies on, and `wrap`.

One table, checked once in `attach`, with one forward pass over four tokens: a version that lacks a member, or
returns something else, is refused by name before training begins. DeepSpeed's are in sharding.py, FSDP2's in
engine/fsdp2.py.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from transformers import Trainer
from transformers.utils import logging
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

logger = logging.get_logger(__name__)

WRITTEN_FOR = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}


class Method(NamedTuple):
    """A method that we call or wrap, with the names of the parameters that we rely on."""

    owner: type
    name: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


METHODS = (
    # inputs: a list of rows; returns the batch dictionary, keys as in batches.read_rollout
    Method(GRPOTrainer, "_generate_and_score_completions", ("inputs",)),
    # returns a tuple whose third entry is the mask of tools: a list for each sequence, or None
    Method(GRPOTrainer, "_generate", ("prompts",)),
    # returns (sequences of all ranks, reward functions)
    Method(GRPOTrainer, "_calculate_rewards", ("inputs", "prompts", "completions", "completion_ids_list")),
    # returns one microbatch's dictionary, and leaves all of the rollout's in _buffered_inputs
    Method(GRPOTrainer, "_prepare_inputs", ("generation_batch",)),
    # returns (log-probabilities (B, T), entropies (B, T), auxiliary loss or None), both with graph
    Method(
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        ("model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy"),
    ),
    Method(GRPOTrainer, "compute_loss", ("model", "inputs")),
    Method(GRPOTrainer, "training_step", ("model", "inputs", "num_items_in_batch")),
    # returns a tuple that begins with the token ids of each prompt
    Method(GRPOTrainer, "_tokenize_prompts", ("prompts",)),
    Method(Trainer, "_save_checkpoint", ("model", "trial")),
    Method(Trainer, "_save_optimizer_and_scheduler", ("output_dir",)),
    Method(Trainer, "_save_rng_state", ("output_dir",)),
    Method(Trainer, "_load_optimizer_and_scheduler", ("checkpoint",)),
)
# Set by GRPOTrainer.__init__.
TRAINER_ATTRIBUTES = (
    "_buffered_inputs",  # None until the first rollout, then its microbatches: a list of dictionaries
    "_metrics",  # {"train": {name: [values]}, "eval": …}, whose means go into the log line
    "_tokenizer",
    "_is_vlm",
)
SHUFFLE = "shuffle_sequence_dict"  # of trl.trainer.grpo_trainer: shuffles a generation batch before it is split


def refuse_missing_members(trainer: GRPOTrainer) -> None:
    """Raises ValueError, naming what is missing or takes other arguments; warns once of an untested version."""
    for of in METHODS:
        library = "transformers" if of.owner is Trainer else "trl"
        _demand(hasattr(of.owner, of.name), f"{of} is gone", library)
        found = list(inspect.signature(getattr(of.owner, of.name)).parameters)[1:]  # less self
        others = f"{of} takes ({', '.join(found)}), not ({', '.join(of.parameters)}, …)"
        _demand(set(of.parameters) <= set(found), others, library)
    for name in TRAINER_ATTRIBUTES:
        _demand(hasattr(trainer, name), f"GRPOTrainer.{name} is gone")
    _demand(hasattr(grpo_trainer, SHUFFLE), f"trl.trainer.grpo_trainer.{SHUFFLE} is gone")
    installed = {library: importlib.metadata.version(library) for library in WRITTEN_FOR}
    untried = [
        f"{library} {version} (tested: {WRITTEN_FOR[library]})"
        for library, version in installed.items()
        if not version.startswith(f"{WRITTEN_FOR[library]}.")
    ]
    if untried:
        logger.warning_once(
            f"probes have not been tested with {', '.join(untried)}; the methods that they rely on are present"
        )


def check_behaviour(trainer: GRPOTrainer) -> None:
    """Raises ValueError where a forward pass over four tokens does not return what is read: shapes, a graph.

    Random streams stay as they were. Skipped where weights are sharded or the model takes images.
    """
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if sharded or trainer._is_vlm or not any(p.requires_grad for p in trainer.model.parameters()):
        return
    device = next(trainer.model.parameters()).device
    ids = torch.tensor([[0, 1, 2, 3]], device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        found = _without_profiling(trainer._get_per_token_logps_and_entropies)(
            trainer.model, ids, torch.ones_like(ids), logits_to_keep=2, compute_entropy=True
        )
    scores = "GRPOTrainer._get_per_token_logps_and_entropies"
    _demand(isinstance(found, tuple) and len(found) == 3, f"{scores} does not return three values")
    for name, values in zip(("log-probabilities", "entropies"), found, strict=False):
        shape = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else "no tensor"
        _demand(shape == "of shape (1, 2)", f"the {name} of {scores} are {shape}")
    _demand(found[0].grad_fn is not None, f"the log-probabilities of {scores} have no graph")


def _without_profiling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method without TRL's decorator, which logs its duration to dashboards that are not open yet."""
    if not inspect.ismethod(method):
        return method
    return types.MethodType(inspect.unwrap(method.__func__), method.__self__)


def wrap(owner: object, name: str, method: Callable[..., Any], undo: ExitStack) -> None:
    """Makes owner.<name>(...) call method(original, ...), until `undo` is closed."""
    before = vars(owner).get(name)  # somebody else may have wrapped it
    setattr(owner, name, functools.partial(method, getattr(owner, name)))
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def _demand(there: bool, what: str, library: str = "trl") -> None:
    """Raises ValueError, saying what is wrong with the installed version, where a thing is not as it must be."""
    if not there:
        raise ValueError(
            f"written for {library} {WRITTEN_FOR[library]}, found {importlib.metadata.version(library)}: {what}; "
            f"install {library}=={WRITTEN_FOR[library]}.*"
        )
