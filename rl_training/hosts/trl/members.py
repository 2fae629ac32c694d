"""Tables of everything that is read from TRL's trainer, its arguments and the libraries' modules.

They hold in every supported version, except for what versions.py says. If a version lacks a member, or a method takes
other parameters, `attach` refuses it by name. sharding.py relies on DeepSpeed's members, parallel/fsdp.py on FSDP2's.
"""

from __future__ import annotations

FORWARD_PASS = "_get_per_token_logps_and_entropies"  # training's forward pass, from whose scores the loss is computed
# Methods that are called or wrapped here, with the parameters that must exist, in whatever order.
METHODS: dict[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint",),
    # inputs: a list of rows; returns the batch dictionary, keys as in batches.read_rollout
    "_generate_and_score_completions": ("inputs",),
    # returns a tuple: token ids of prompts, token ids of completions, tool masks (a list per sequence, or None),
    # completions, and the sampler's log-probabilities (a list per sequence, or None)
    "_generate": ("prompts",),
    # returns (sequences of all ranks, reward functions)
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    # returns the dictionary of one microbatch, and keeps those of the whole rollout in _buffered_inputs
    "_prepare_inputs": ("generation_batch",),
    # returns (log-probabilities (B, T), entropies (B, T), auxiliary loss or None), see versions.NUM_SCORES
    FORWARD_PASS: ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
    "compute_loss": ("model", "inputs"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    # returns a tuple that begins with the token ids of each prompt
    "_tokenize_prompts": ("prompts",),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "add_callback": ("callback",),
    "remove_callback": ("callback",),
}
# Attributes that a trainer has once it is made.
TRAINER_ATTRIBUTES = (
    "_buffered_inputs",  # None until the first rollout, then the list of its microbatches' dictionaries
    "_step",  # number of microbatches so far, over all trainings of this trainer
    "_metrics",  # {"train": {name: [values]}, "eval": …}; the log line has their means
    *("model", "model_wrapped", "ref_model", "args", "state", "accelerator", "callback_handler", "processing_class"),
    *("train_dataset", "optimizer", "is_deepspeed_enabled", "is_fsdp_enabled"),
    *("reward_funcs", "reward_func_names", "reward_weights", "multi_objective_aggregation"),
    *("tools", "environments", "rollout_func", "use_vllm", "temperature", "num_generations", "max_completion_length"),
    *("beta", "loss_type", "epsilon_low", "epsilon_high", "mask_truncated_completions"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
)
# Attributes that a trainer has while it trains, or only with one way of generating.
LATER_ATTRIBUTES = (
    *("lr_scheduler", "current_gradient_accumulation_steps"),
    *("generation_config", "generation_kwargs"),  # without vLLM
    "vllm_generation",
)
# Settings of a trainer's arguments, apart from those that are only recorded.
SETTINGS = (
    *("scale_rewards", "loss_type", "multi_objective_aggregation", "beta", "importance_sampling_level", "delta"),
    *("top_entropy_quantile", "off_policy_mask_threshold", "cast_lm_head_to_fp32"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "use_vllm"),
    *("vllm_structured_outputs_regex", "generation_batch_size", "steps_per_generation", "num_iterations"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "max_grad_norm"),
    *("gradient_checkpointing_kwargs", "fp16", "seed", "learning_rate", "lr_scheduler_type", "output_dir"),
    *("save_strategy", "should_save"),
)
SHUFFLE = "shuffle_sequence_dict"  # in trl.trainer.grpo_trainer: shuffles a generation batch before splitting it
REWRITE_LOGS = "rewrite_logs"  # in transformers.integrations.integration_utils: prefixes all names with train/
