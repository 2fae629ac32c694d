"""The members of TRL, transformers and accelerate that this package stands on and that their makers do not promise.

One table, checked once in `attach`: a version that has lost one is refused by its name, before training begins, and
not by an AttributeError in the middle of it. DeepSpeed's are in zero.py and zero3.py, FSDP2's in fsdp.py.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from dataclasses import dataclass

from accelerate import Accelerator
from transformers import Trainer
from trl import GRPOTrainer

WRITTEN_FOR = {"trl": "1.16", "transformers": "5.23", "accelerate": "1.15"}


@dataclass(frozen=True)
class Method:
    """A method that we call or stand in front of, with the names of the parameters that we rely on."""

    owner: type
    name: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    def why_not(self) -> str:
        """Returns what is wrong with it in the installed version, "" if nothing is."""
        method = getattr(self.owner, self.name, None)
        if method is None:
            return f"{self} is gone"
        found = tuple(inspect.signature(method).parameters)[1:]  # less self
        if not set(self.parameters) <= set(found):
            return f"{self} takes ({', '.join(found)}), not ({', '.join(self.parameters)}, …)"
        return ""


METHODS = (
    # inputs: a list of rows; returns the batch dictionary, keys as in host.read_rollout
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
# Set on the model where training begins, under autocast: its forward without accelerate's wrapper.
ORIGINAL_FORWARD = "_original_forward"


def refuse_unknown_versions(trainer: GRPOTrainer) -> None:
    """Raises ValueError, naming what is gone or takes other arguments, where a library is not the one we know."""
    for method in METHODS:
        _refuse(method.why_not(), "transformers" if method.owner is Trainer else "trl")
    for name in TRAINER_ATTRIBUTES:
        _refuse("" if hasattr(trainer, name) else f"GRPOTrainer.{name} is gone", "trl")
    sets_it = ORIGINAL_FORWARD in inspect.getsource(Accelerator.prepare_model)
    _refuse("" if sets_it else f"Accelerator.prepare_model no longer sets {ORIGINAL_FORWARD}", "accelerate")


def _refuse(what: str, library: str) -> None:
    if what:
        raise ValueError(
            f"written for {library} {WRITTEN_FOR[library]}, found {importlib.metadata.version(library)}: {what}; "
            f"install {library}=={WRITTEN_FOR[library]}.*"
        )
