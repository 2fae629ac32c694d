"""How advice names settings: as a program in Python gives them, or as on the command line."""

from __future__ import annotations

from collections.abc import Sequence


class Spelling:
    """Names settings as a program in Python gives them.

    In the texts with braces, {size} is the number of sequences per microbatch, {count} that of microbatches per step
    and process, {sequences} that of sequences on all processes, {name} the name of a probe and {probe} its class.
    """

    batch_setting = "per_device_train_batch_size={size}, gradient_accumulation_steps={count} in GRPOConfig"
    steps_setting = "gradient_accumulation_steps={count} in GRPOConfig"
    num_folds_setting = "{probe}(num_folds={folds})"
    size_of_rollout = "per_device_train_batch_size x steps_per_generation x processes = {sequences}"
    separator = ", "  # between settings
    in_config = " in GRPOConfig"  # after settings of the trainer
    no_intervention = "no intervention"
    buffer = "FilteredBuffer"
    no_buffer = "train without a buffer"
    with_adapter = "give the trainer a peft_config"
    continue_itself = "resume without resume_as_branch and without that intervention"

    def name(self, setting: str) -> str:
        """Return the name of a setting of the trainer."""
        return setting

    def setting(self, name: str, value: object) -> str:
        """Return a setting of the trainer with its value."""
        return f"{self.name(name)}={value!r}"

    def interventions(self, names: Sequence[str]) -> str:
        """Return the setting that trains with these interventions."""
        return f"interventions={[*names]}"


class CommandLine(Spelling):
    """Names settings as arguments of `rl-training train`."""

    batch_setting = "batch.microbatch_size={size} batch.sequences_per_step={sequences}"
    steps_setting = "batch.sequences_per_step={sequences}"
    num_folds_setting = "probes.{name}.num_folds={folds}"
    size_of_rollout = "batch.sequences_per_step={sequences}"
    separator = " "
    in_config = ""
    no_intervention = "intervention=null"
    buffer = "buffer=filtered"
    no_buffer = "use buffer=plain"
    with_adapter = "use adapter=lora"
    continue_itself = "continue the run itself with resume="

    def name(self, setting: str) -> str:
        return f"trainer.{setting}"

    def setting(self, name: str, value: object) -> str:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        return f"{self.name(name)}={text}"

    def interventions(self, names: Sequence[str]) -> str:
        return f"intervention={','.join(names)}"


PYTHON = Spelling()
COMMAND_LINE = CommandLine()

# Where it is not known how the trainer was made.
WITHOUT_PROBES = "train without probes (no attach; probe=none)"
