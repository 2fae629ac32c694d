"""DrGRPOTrainer: TRL's GRPOTrainer with Dr-GRPO as its default loss, probes attached, and interventions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer as GRPOTrainer  # re-exported: offline and job read TRL's trainer through hosts/trl alone

from rl_training.engine.probe import Probe
from rl_training.errors import UserError
from rl_training.hosts.estimate_writer import as_records
from rl_training.hosts.probes import as_probes
from rl_training.hosts.trl.attachment import Attachment
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.hosts.trl.config import DrGRPOConfig
from rl_training.hosts.trl.fill_rollout import fill_rollout, start_buffer
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.output.destination import destination_of
from rl_training.hosts.trl.resuming import SaveBetweenRollouts, keep_settings
from rl_training.hosts.trl.reward_functions import refuse_infinite_rewards
from rl_training.hosts.trl.rollouts.batches import total_rewards
from rl_training.hosts.trl.settings.loss import DR_GRPO, loss_settings
from rl_training.hosts.trl.settings.rollout_shape import steps_per_rollout
from rl_training.hosts.trl.settings.spelling import COMMAND_LINE, PYTHON, Spelling
from rl_training.hosts.trl.trained_loss import with_settings
from rl_training.interventions.named import interventions_to_train, list_of_names
from rl_training.records.checkpoint_states import load_buffer_state, save_buffer_state, writing
from rl_training.records.writer import Records

logger = logging.get_logger(__name__)


def _refuse_few_prompts(trainer: GRPOTrainer, spelling: Spelling) -> None:
    """Raise UserError if the training set has fewer prompts than a rollout: TRL would silently train nothing."""
    batch = trainer.args.generation_batch_size
    group = trainer.num_generations
    rows = trainer.train_dataset
    if isinstance(rows, Sized) and len(rows) < batch // group:
        size, smaller = (spelling.size_of_rollout.format(sequences=n) for n in (batch, max(len(rows), 1) * group))
        raise UserError(
            f"the training set has {len(rows)} prompt{'s' * (len(rows) != 1)}, and a rollout needs {batch // group} "
            f"({size} / {spelling.setting('num_generations', group)}): use {smaller} or less, or more data"
        )


def _keep_adapter_in_float32(trainer: GRPOTrainer) -> None:
    """Undo TRL's cast of a 4-bit model's adapter to bf16, which rounds small steps away."""
    if is_peft_model(trainer.model):
        for param in trainer.model.parameters():
            if param.requires_grad and param.dtype.itemsize < 4:
                param.data = param.data.float()


class DrGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with Dr-GRPO as its default loss, with probes, interventions and a prompt filter.

    All responses to a prompt stay in consecutive rows. Training is bitwise the same with any probes and with none; a
    plain GRPOTrainer sums a step's microbatches in another order. `.attachment.latest` holds the latest estimates,
    and `.attachment.remove()` removes the probes from a trainer without interventions and `target_kl_share`.

    Args:
        *args, **kwargs: As for `trl.GRPOTrainer`, with a `DrGRPOConfig` as `args`.
        probes: What to measure: names, as on the command line, or probe objects.
        records: Where rank 0 writes metrics.jsonl and probes.jsonl: a folder or `Records`. With "RUN/logs",
            `rl-training report RUN` shows them. None writes nothing.
        interventions: What to train with, by name and in this order, such as `["psr", "bonus:0.02"]`.
            interventions/named.py lists them.
        buffer: A `FilteredBuffer`, which draws the prompts instead of the data loader and replaces those whose
            advantages are zero.
        is_cli: Whether a command trains, whose settings are trainer.NAME=VALUE and which locks the folder of `records`.
    """

    args: DrGRPOConfig

    def __init__(
        self,
        *args: Any,
        probes: Sequence[Probe | str] | Probe | str = (),
        records: Records | str | Path | None = None,
        interventions: Sequence[str] = (),
        buffer: FilteredBuffer | None = None,
        is_cli: bool = False,
        **kwargs: Any,
    ) -> None:
        interventions = list_of_names(interventions, "interventions")
        trained_with = interventions_to_train(interventions)
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, DrGRPOConfig):
            raise UserError(f"DrGRPOTrainer needs args=DrGRPOConfig(...), got {type(self.args).__name__}")
        if not self.reward_weights.isfinite().all():
            raise UserError(f"reward_weights={self.reward_weights.tolist()} must be finite numbers")
        self._spelling = COMMAND_LINE if is_cli else PYTHON
        _refuse_few_prompts(self, self._spelling)
        _keep_adapter_in_float32(self)
        self.interventions = tuple(interventions)
        options = Options(
            whole_prompts=True,
            metrics="all",
            target_kl_share=self.args.target_kl_share,
            interventions=trained_with,
            keep_attached=True,
            spelling=self._spelling,
        )
        destination = destination_of(as_records(records), is_locked=is_cli)
        self.attachment = Attachment(self, as_probes(probes), destination, options)
        self.args = with_settings(self.args, trained_with)
        self._sets_learning_rate = any(intervention.lr_factor != 1.0 for intervention in trained_with)
        self.add_callback(SaveBetweenRollouts(steps_per_rollout(self.args)))
        self._is_branch = False
        self._has_own_rng = False
        self.buffer = buffer
        if buffer is not None:
            start_buffer(self, buffer, self._spelling)

    def resume_as_branch(self, has_own_rng: bool) -> None:
        """Resume from another run's checkpoint, but with this trainer's settings.

        Args:
            has_own_rng: Whether to ignore the checkpoint's RNG state, for a branch with another seed.
        """
        self._is_branch = True
        self._has_own_rng = has_own_rng

    @property
    def loss_description(self) -> str:
        """The name of the loss: "Dr-GRPO", and the settings and interventions by which it differs from that."""
        settings = loss_settings(self)
        differing = [f"{name}={getattr(self.args, name)}" for name in DR_GRPO if name in settings.differs]
        differing += ["mask_truncated_completions=true"] * settings.hides_truncated
        differing += [f"intervention={name}" for name in self.interventions]
        return f"Dr-GRPO except for {', '.join(differing)}" if differing else "Dr-GRPO"

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's rollout for these rows. When training with a buffer, the buffer draws the rows instead."""
        generate = super()._generate_and_score_completions
        try:
            if self.buffer is None or not self.model.training:
                return generate(inputs)
            return fill_rollout(self, self.buffer, lambda rows: (generate(rows), self._latest_rewards), len(inputs))
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):  # torch raises this when it samples from nan
                raise
            message = self._divergence_message(self.state.global_step + 1, "the policy's probabilities are nan")
            raise UserError(message) from error

    def _divergence_message(self, step: int, what: str) -> str:
        spelling = self._spelling
        trained_with = spelling.interventions(self.interventions)
        clip = f", and clip the gradient with {spelling.setting('max_grad_norm', 1)}"
        clipping = "" if 0 < self.args.max_grad_norm <= 1 else clip
        or_intervention = f", or {trained_with} too strong" if self.interventions else ""
        rate = f"{spelling.name('learning_rate')}={self.args.learning_rate:g}"
        return (
            f"step {step}: {what}: training has diverged. Most likely {rate} is too large{or_intervention}: "
            f"lower it{clipping}"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        not_finite = [key for key in ("loss", "grad_norm") if not math.isfinite(float(logs.get(key, 0)))]
        if not_finite:
            name = not_finite[0]
            raise UserError(self._divergence_message(self.state.global_step, f"{name} is {logs[name]}"))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Return TRL's rewards, (sequences of all ranks, reward functions), once every sequence has a finite one.

        TRL itself would continue: a nan reward gets an advantage of 0, and an infinite one makes its whole group nan.
        """
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except ValueError as error:
            # TRL raises this if a function returns too few or too many rewards. A function's own error has a note.
            if "rewards, but" not in str(error) or getattr(error, "__notes__", None):
                raise
            raise UserError(f"step {self.state.global_step + 1}: {error}") from error
        refuse_infinite_rewards(self, rewards, completions)
        self._latest_rewards = total_rewards(self, rewards)
        return rewards

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        card = Path(self.args.output_dir) / "README.md"
        if self.is_world_process_zero():  # TRL links a base model from a local folder as "None"
            folder = Path(self.model.name_or_path).name
            text = card.read_text(encoding="utf-8")
            text = text.replace("[None](https://huggingface.co/None)", f"the model in the folder `{folder}`")
            card.write_text(text, encoding="utf-8")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with writing(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.buffer is not None and self.args.should_save:
            save_buffer_state(self.buffer, Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._has_own_rng:
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        own_settings = checkpoint is not None and (self._is_branch or self._sets_learning_rate)
        with keep_settings(self, self._spelling) if own_settings else contextlib.nullcontext():
            super()._load_optimizer_and_scheduler(checkpoint)
        if self.buffer is not None and checkpoint is not None:
            load_buffer_state(self.buffer, Path(checkpoint))
