"""What is relied on in verl 0.9. verl promises none of it ("Interface is subject to change before release").

Methods are checked when this package is imported, so that a change is named before training, not met within it. The
rest is checked by the tests of hosts/verl alone. All settings of verl that are read are in refusals.py,
training_settings.py and whole_prompts.py.

    verl.workers.engine.EngineRegistry      looks up (device, vendor) before the device alone
    engine, an FSDPEngineWithLMHead         module, optimizer, optimizer_config.clip_grad, model_config.tokenizer,
                                            engine_config (use_dynamic_bsz, micro_batch_size_per_gpu), _autocast_dtype
    engine.train_batch                      calls, in this order: for each microbatch forward_step, which calls
                                            prepare_model_outputs and then the loss, and its backward; optimizer_step.
                                            Returns {"loss": [float per microbatch], "metrics": {name: [float]}}
    engine.optimizer_step                   returns the norm before clipping; skips the step if that is not finite
    prepare_micro_batches                   cuts a batch like train_batch does
    loss function                           functools.partial(ppo_loss, config=ActorConfig), called by keywords
    model output                            log_probs, and entropy if it is calculated: nested, (prompt + response) of
                                            each row, shifted by one. output.logits is not scaled in place
    a microbatch's TensorDict               prompts, responses, response_mask, input_ids, advantages, rm_scores,
                                            old_log_probs, uid, temperature; rollout_log_probs, rollout_is_weights
    trainer, a PPOTrainerSync               config, tokenizer, global_steps, actor_rollout_wg.world_size
    trainer's batch, a KVBatchMeta          keys, UID_SESSION_INDEX; tags (seq_len, min_ and max_global_steps);
                                            reorder; extra_info, which arrives in the workers' TensorDict
    TaskRunnerV1.__ray_actor_class__        the class under @ray.remote
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from types import EllipsisType

from rl_training.errors import UserError

Parameters = tuple[str | EllipsisType, ...]  # names after self; ... for any others, which are passed on unread

# Methods that are overridden.
ENGINE_METHODS: dict[str, Parameters] = {
    "train_batch": ("data", "loss_function"),
    "forward_step": ("micro_batch", "loss_function", "forward_only"),
    "prepare_model_outputs": ("output", "output_args", "micro_batch", "logits_processor_func"),
    "optimizer_step": (),
    "save_checkpoint": ("local_path", ...),
    "load_checkpoint": ("local_path", ...),
}
TRAINER_METHODS: dict[str, Parameters] = {
    "_balance_batch": ("batch", "metrics", ...),
    "_update_actor": ("batch", "metrics"),
}


def refuse_other_methods(kind: type, methods: Mapping[str, Parameters]) -> None:
    """Raise UserError, which names it, for a method of a class of verl that is gone or takes other parameters."""
    for name, known in methods.items():
        method = getattr(kind, name, None)
        taken = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        is_open = known[-1:] == (...,)
        if method is None or (taken[: len(known) - 1] != known[:-1] if is_open else taken != known):
            change = "is gone" if method is None else f"takes ({', '.join(taken)})"
            raise UserError(
                f"{kind.__name__}.{name} {change} in verl {version('verl')}: probes are written against verl 0.9.1; "
                "install that, or run python -m verl.trainer.main_ppo without them"
            )
