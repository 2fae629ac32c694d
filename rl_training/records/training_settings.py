"""Which recorded settings affect training: a resumed run must keep them, and runs are compared by them."""

from __future__ import annotations

# Prefixes of fields of GRPOConfig that choose what is reported, and where. Those of a trainer are not recorded at all.
REPORTING_FIELDS = (
    *("hub_", "push_to_hub", "log_", "do_", "include_", "trackio_", "wandb_", "resume_from_checkpoint", "local_rank"),
    *("restore_callback_states_from_checkpoint", "skip_memory_metrics", "num_completions_to_print", "load_best_model"),
    *("report_to", "deepspeed_plugin", "distributed_state", "torch_empty_cache_steps", "vllm_server_", "vllm_gpu_"),
)
# Prefixes of the other fields that do not affect the steps: where and how often something is written, and max_steps: a
# longer run takes the same steps first.
WRITING_FIELDS = (
    *("output_dir", "max_steps", "save_", "logging_", "disable_tqdm", "run_name", "project", "ddp_timeout", "eval_"),
    "dataloader_",
)
# Prefixes of settings by dotted name. attached.whole_prompts follows from the probes: the order in which a step's rows
# are summed.
NOT_OF_TRAINING = (
    *("run_dir", "resume", "probes.", "provenance.", "rollouts.", "logger.", "additional_steps"),
    *(f"trainer.{field}" for field in (*REPORTING_FIELDS, *WRITING_FIELDS)),
    "attached.whole_prompts",
)


def affects_training(name: str) -> bool:
    """Return whether the setting with this dotted name affects the steps of a training.

    >>> affects_training("trainer.beta"), affects_training("trainer.save_steps")
    (True, False)
    """
    return not name.startswith(NOT_OF_TRAINING)
