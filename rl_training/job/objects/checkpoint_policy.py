"""Loads the policy of a checkpoint: a full model, or an adapter on the run's first model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_training.errors import UserError
from rl_training.evaluation.policy import CheckpointPolicy
from rl_training.models.load import adapter_base, load_causal_lm, refuse_code_in_adapter
from rl_training.policy.finite import refuse_diverged
from rl_training.records.checkpoint_flaws import NO_WEIGHTS, NOT_COMPLETE
from rl_training.records.checkpoint_states import NOT_WEIGHTS
from rl_training.records.folder import ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, TRAINER_STATE_FILE

LoadedModel = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_policy(
    checkpoint: Path,
    load_initial: Callable[[], LoadedModel] | None,
    *,
    with_reference: bool,
    temperature: float,
    max_completion_length: int,
    device: str = "cpu",
    dtype: str = "float32",
    quantization: str | None = None,
) -> CheckpointPolicy:
    """Load the policy of a checkpoint folder: a full model, or an adapter on the run's first model.

    Args:
        load_initial: Loads the model that the run started from. None if the run is unknown.

    Raises:
        UserError: The folder has no weights, or they cannot be loaded, or are not finite.
    """
    require_weights(checkpoint)
    reference: PreTrainedModel | None = None
    if (checkpoint / ADAPTER_CONFIG_FILE).is_file():
        from peft import PeftModel

        if load_initial is None:
            base, tokenizer = load_causal_lm(adapter_base(checkpoint), dtype)
        else:
            base, tokenizer = load_initial()
        try:
            refuse_code_in_adapter(checkpoint, (name for name, _ in base.named_modules()))
            model = PeftModel.from_pretrained(base, str(checkpoint))
        except UserError:
            raise
        except Exception as error:  # a damaged file raises whatever error the library that reads it has
            raise UserError(f"its adapter cannot be loaded: {type(error).__name__}: {error}") from error
        reference = model if with_reference else None
    else:
        try:
            model, tokenizer = load_causal_lm(checkpoint, dtype, quantization)
        except ValueError as error:
            raise UserError(f"its model cannot be loaded: {error.__cause__ or error}") from error
        if with_reference and load_initial is not None:
            reference = load_initial()[0].to(device).eval()
    refuse_diverged(model.named_parameters())
    return CheckpointPolicy(model.to(device).eval(), tokenizer, reference, temperature, max_completion_length)


def require_weights(checkpoint: Path) -> None:
    """Raise a UserError if a checkpoint folder holds no weights, or was not written completely.

    Training and analyses need a checkpoint that `find_weights_flaw` in records/checkpoint_flaws.py accepts. An
    evaluation needs less: any folder with a model will do, from whatever trainer and without a trainer's state.
    """
    if not checkpoint.is_dir():
        raise UserError("there is no such folder")
    weights = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]
    if all(path.name.startswith((*NOT_WEIGHTS, "training_args.bin")) for path in weights):
        raise UserError(NO_WEIGHTS)
    if (checkpoint / OPTIMIZER_FILE).is_file() and not (checkpoint / TRAINER_STATE_FILE).is_file():
        raise UserError(NOT_COMPLETE)
