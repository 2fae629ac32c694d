"""Tables of everything that is read from TRL's trainer, its arguments and the libraries' modules.

They hold in every supported version, except for what versions.py says. If a version lacks a member, or a method takes
other parameters, `attach` refuses it by name. DeepSpeed's members exist once `train()` has begun, so they are refused
then. parallel/fsdp.py relies on FSDP2's.
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
    "model",  # the policy, with its adapter if it has one
    "model_wrapped",  # the same, as DDP, DeepSpeed or FSDP wraps it
    "ref_model",  # the reference model, or None
    "args",  # a GRPOConfig
    "state",  # transformers' TrainerState: `global_step` counts optimizer steps
    "accelerator",  # knows processes and device, and whether a step's gradients are complete
    "callback_handler",  # has the callbacks, in the order in which they are called
    "processing_class",  # the tokenizer, or a processor of text and images
    "train_dataset",
    "optimizer",  # None until `train()`, unless the trainer was given one
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "reward_funcs",
    "reward_func_names",
    "reward_weights",  # (reward functions,)
    "multi_objective_aggregation",  # how the rewards of several functions become one advantage
    "tools",  # functions that the policy may call; empty or None without
    "environments",  # those of the responses in generation; None without
    "rollout_func",  # the user's function that generates responses, or None
    "use_vllm",
    "temperature",  # of generation, and of the scores
    "num_generations",  # responses per prompt
    "max_completion_length",  # in tokens
    "beta",  # coefficient of the KL term
    "loss_type",
    "epsilon_low",  # ratios are clipped at 1 - epsilon_low
    "epsilon_high",  # and at 1 + epsilon_high
    "mask_truncated_completions",  # whether the loss leaves truncated responses out
    "vllm_importance_sampling_correction",  # whether the loss corrects for vLLM's own probabilities
    "vllm_importance_sampling_mode",  # "LEVEL_KIND": by token or sequence, by truncating or masking
)
# Attributes that a trainer has while it trains, or only with one way of generating.
LATER_ATTRIBUTES = (
    "lr_scheduler",
    "current_gradient_accumulation_steps",  # microbatches of this step, fewer at the end of an epoch
    "generation_config",  # without vLLM: all options of the next generation
    "generation_kwargs",  # without vLLM: the trainer's own options, before a callback changes them
    "vllm_generation",  # with vLLM: the engine, with its options
)
# Settings of a trainer's arguments, apart from those that are only recorded.
SETTINGS = (
    # of the loss
    "scale_rewards",  # what advantages are divided by
    "loss_type",
    "multi_objective_aggregation",
    "beta",
    "importance_sampling_level",  # "token" or "sequence"
    "delta",  # upper bound of all ratios, before they are clipped; None without
    "top_entropy_quantile",  # share of tokens, those of highest entropy, that the loss uses
    "off_policy_mask_threshold",  # above this KL, responses with negative advantages are left out; None keeps all
    "cast_lm_head_to_fp32",
    # of generation
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",  # further options
    "use_vllm",
    "vllm_structured_outputs_regex",  # the pattern that responses follow, or None
    # of rollouts, steps and microbatches
    "generation_batch_size",  # responses per rollout, on all processes
    "steps_per_generation",  # microbatches per rollout
    "num_iterations",  # how often a rollout is learned from
    "per_device_train_batch_size",  # responses per microbatch
    "gradient_accumulation_steps",  # microbatches per optimizer step
    # of training
    "gradient_checkpointing",
    "max_grad_norm",
    "gradient_checkpointing_kwargs",
    "fp16",
    "seed",
    "learning_rate",
    "lr_scheduler_type",
    "output_dir",  # has the checkpoints
    "save_strategy",
    "should_save",  # whether this process writes checkpoints
)
SHUFFLE = "shuffle_sequence_dict"  # in trl.trainer.grpo_trainer: shuffles a generation batch before splitting it
REWRITE_LOGS = "rewrite_logs"  # in transformers.integrations.integration_utils: prefixes all names with train/
# Members of DeepSpeed's optimizer, by the class of ZeRO stages 1 and 2, and of stage 3. sharding.py reads them.
ZERO = "DeepSpeedZeroOptimizer"
ZERO3 = "DeepSpeedZeroOptimizer_Stage3"
ZERO_MEMBERS: dict[str, tuple[str, ...]] = {
    ZERO: (
        "optimizer",  # the torch optimizer, whose parameters are this rank's flat weights
        "clip_grad",  # the threshold at which gradients are clipped
        "averaged_gradients",  # by flat vector, this rank's pieces of the mean over ranks
        "single_partition_of_fp32_groups",  # this rank's flat weights, one vector per group
        "round_robin_bit16_groups",  # the parameters of each group, in their order in the flat vector
        "round_robin_bit16_offsets",  # where each begins
    ),
    ZERO3: (
        "optimizer",
        "clip_grad",
        "averaged_gradients",
        "fp32_partitioned_groups_flat",  # this rank's flat weights
        "grad_position",  # by parameter id: index of its flat vector, start in it, and number of entries
        "get_param_id",
        "sub_group_to_group_id",  # by index of a flat vector: number of its group
        "empty_partition_cache",  # frees weights that are gathered
        "persistent_parameters",  # the small parameters, which stay gathered
    ),
}
