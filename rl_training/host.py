"""What the host does: facts of TRL, Transformers and accelerate, read and written in one place.

Together with attach.py and sampling.py the only file that names their internals. Written against trl 1.16 and
transformers 5.23. What DeepSpeed keeps elsewhere than torch does is read in zero.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from trl import GRPOTrainer

from rl_training import zero
from rl_training.adamw import AdamWState
from rl_training.sgd import SGDState
from rl_training.types import Microbatch, OptimizerView, Rollout, Scores

# Keys that ride along in TRL's batch dictionaries.
ROLLOUT_ROW = "rollout_row"  # the row before TRL's shuffle
REWARD = "rollout_reward"

Forward = Callable[..., tuple[Tensor, Tensor, Tensor | None]]  # GRPOTrainer._get_per_token_logps_and_entropies


# What generate may do beside the temperature, and with which value it does nothing; None always does nothing.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "penalty_alpha": 0.0,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "top_h": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
}


def _refuse_other_sampling(trainer: GRPOTrainer) -> None:
    """Raises ValueError when responses are not sampled from the very policy whose log-probabilities are taken."""
    args = trainer.args
    asked = {key: getattr(args, key) for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    asked |= {"do_sample": True, **(args.generation_kwargs or {})}
    of_model = {} if args.use_vllm else trainer.model.generation_config.to_dict()  # fills what is not asked for
    effective = {**of_model, **{key: value for key, value in asked.items() if value is not None}}
    for key, neutral in {**NEUTRAL_SAMPLING, "temperature": args.temperature}.items():
        value = effective.get(key)
        if value is not None and value != neutral:
            where = "" if asked.get(key) == value else " in the model's generation_config.json"
            raise ValueError(
                f"{key}={value}{where} makes the sampled policy differ from the scored one, so its entropy gradient "
                f"cannot be estimated from these samples: set {key}={neutral}, or train without probes (probe=none)"
            )


def refuse_what_cannot_be_measured(trainer: GRPOTrainer) -> None:
    """Raises ValueError, saying what to do, where probes would corrupt training or measure something else."""
    args = trainer.args
    _refuse_other_sampling(trainer)
    if trainer.num_generations < 2:
        raise ValueError("probes need num_generations >= 2: one response has no leave-one-out baseline")
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "reentrant gradient checkpointing gives a second backward no gradients: "
            'set gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    ddp = trainer.accelerator.ddp_handler
    if args.ddp_static_graph or (ddp is not None and ddp.static_graph):
        raise ValueError("DDP's static_graph is silently corrupted by a second backward: set ddp_static_graph=False")
    if args.fp16:
        raise ValueError("fp16 scales the loss, and with it the gradients that probes read: use bf16 or fp32")
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "probes do not run under FSDP, whose parameters and gradients are sharded: use DDP (launch/ddp.yaml) or "
            "ZeRO-2 (launch/zero2.yaml), or train without probes (probe=none)"
        )
    if trainer.is_deepspeed_enabled:
        zero.refuse_what_cannot_be_read(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
    if trainer.mask_truncated_completions:
        raise ValueError(
            "mask_truncated_completions hides the truncated responses, whose entropy is part of the policy's: "
            "set mask_truncated_completions=False"
        )
    if trainer._is_vlm or trainer.tools or trainer.environments is not None:
        raise ValueError("probes read text rollouts of one turn: no images, tools or environments")
    local_batch = args.per_device_train_batch_size * args.steps_per_generation
    if local_batch % trainer.num_generations:
        raise ValueError(
            f"a process generates {local_batch} sequences (per_device_train_batch_size x steps_per_generation), which "
            f"is not a multiple of num_generations={trainer.num_generations}: a prompt's responses would lie on two "
            f"processes; use {_next_multiple(local_batch, trainer.num_generations)}"
        )


def refuse_split_prompts(trainer: GRPOTrainer) -> None:
    """Raises ValueError when microbatches cannot hold whole prompts."""
    if trainer._is_vlm:
        raise ValueError("the whole-prompt order of microbatches is for text only: use trl.GRPOTrainer for images")
    size, group = trainer.args.per_device_train_batch_size, trainer.num_generations
    if size % group:
        raise ValueError(
            f"per_device_train_batch_size={size} is not a multiple of num_generations={group}, so a microbatch cannot "
            f"hold all responses of its prompts: use {_next_multiple(size, group)}"
        )


def is_dr_grpo(trainer: GRPOTrainer) -> bool:
    """Returns whether the loss is Dr-GRPO's: no division by a group's standard deviation or a length, no KL term."""
    args = trainer.args
    return args.loss_type == "dr_grpo" and args.scale_rewards == "none" and args.beta == 0.0


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def steps_per_rollout(trainer: GRPOTrainer) -> int:
    """Returns how many optimizer steps lie between two step ends at which a rollout is used up.

    Off these ends TRL holds sampled sequences that it does not save: training cannot be resumed exactly from there.
    """
    microbatches = trainer.args.steps_per_generation * trainer.num_iterations
    accumulation = trainer.args.gradient_accumulation_steps
    return math.lcm(microbatches, accumulation) // accumulation


def in_whole_prompt_order(buffered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns TRL's buffered microbatches with their sequences back in rollout order, where prompts are contiguous.

    TRL shuffles a generation batch before it splits it. Undoing that leaves its use of the random stream as it is.
    """
    order = torch.cat([batch[ROLLOUT_ROW] for batch in buffered]).argsort().split(len(buffered[0][ROLLOUT_ROW]))

    def pick(values: list[Any], rows: Tensor) -> Any:
        if isinstance(values[0], Tensor) and values[0].ndim > 0:
            return torch.cat(values)[rows]
        if isinstance(values[0], list):
            joined = [item for part in values for item in part]
            return [joined[i] for i in rows]
        return values[0]  # one value for the whole generation batch

    return [{key: pick([batch[key] for batch in buffered], rows) for key in buffered[0]} for rows in order]


def read_rollout(inputs: Mapping[str, Any], first_prompt: int, responses_per_prompt: int, on_policy: bool) -> Rollout:
    """Returns the sequences of one of TRL's batch dictionaries. Its prompts are numbered from `first_prompt`."""
    return Rollout(
        prompt_ids=inputs["prompt_ids"],
        prompt_mask=inputs["prompt_mask"],
        completion_ids=inputs["completion_ids"],
        completion_mask=inputs["completion_mask"],
        advantages=inputs["advantages"],
        rewards=inputs.get(REWARD),
        prompt_index=first_prompt + inputs[ROLLOUT_ROW] // responses_per_prompt,
        sampling_logps=inputs.get("old_per_token_logps"),
        on_policy=on_policy,
    )


def join_microbatches(
    microbatches: Sequence[Microbatch], loss_weights: Sequence[Tensor]
) -> tuple[Rollout, Scores, Tensor]:
    """Returns sequences, scores and loss weights of a whole step, padded to one width: it may hold several rollouts."""
    parts = [m.rollout for m in microbatches]
    scores = [m.scores for m in microbatches if m.scores is not None]
    assert len(scores) == len(parts)
    rewards = [p.rewards for p in parts if p.rewards is not None]
    sampled = [p.sampling_logps for p in parts if p.sampling_logps is not None]
    prompt_width = max(p.prompt_ids.shape[1] for p in parts)
    width = max(p.completion_ids.shape[1] for p in parts)

    def left(tensors: list[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(t, (prompt_width - t.shape[1], 0)) for t in tensors])

    def right(tensors: list[Tensor]) -> Tensor:
        return torch.cat([nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

    rollout = Rollout(
        prompt_ids=left([p.prompt_ids for p in parts]),
        prompt_mask=left([p.prompt_mask for p in parts]),
        completion_ids=right([p.completion_ids for p in parts]),
        completion_mask=right([p.completion_mask for p in parts]),
        advantages=torch.cat([p.advantages for p in parts]),
        rewards=torch.cat(rewards) if len(rewards) == len(parts) else None,
        prompt_index=torch.cat([p.prompt_index for p in parts]),
        sampling_logps=right(sampled) if len(sampled) == len(parts) else None,
        on_policy=all(p.on_policy for p in parts),
    )
    joined = Scores(
        logps=right([s.logps for s in scores]),
        entropies=right([s.entropies for s in scores]),
        mask=rollout.completion_mask,
    )
    return rollout, joined, right(list(loss_weights))


def score(trainer: GRPOTrainer, forward: Forward, rollout: Rollout, rows: Tensor) -> Scores:
    """Returns log-probabilities and entropies WITH graph for some rows, on the unwrapped model.

    Each sequence starts in the first column, and the batch is as wide as the longest of these rows. What stands to the
    right of a sequence no causal model looks at, so there is no attention mask to build and to apply. The random
    streams (dropout) are put back as they were.
    """
    prompt_mask, mask = rollout.prompt_mask[rows], rollout.completion_mask[rows]
    prompt_length, length = prompt_mask.sum(dim=1), mask.sum(dim=1)
    width, shortest_prompt = int((prompt_length + length).max()), int(prompt_length.min())
    padded = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], dim=1)
    columns = (prompt_mask.shape[1] - prompt_length).unsqueeze(1) + torch.arange(width, device=padded.device)
    ids = padded.gather(1, columns.clamp(max=padded.shape[1] - 1))
    devices = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        scores = forward(
            trainer.model, ids, torch.ones_like(ids), logits_to_keep=width - shortest_prompt, compute_entropy=True
        )
    mask = mask[:, : int(length.max())]
    columns = (prompt_length - shortest_prompt).unsqueeze(1) + torch.arange(mask.shape[1], device=ids.device)
    columns = columns.clamp(max=width - shortest_prompt - 1)
    return Scores(logps=scores[0].gather(1, columns), entropies=scores[1].gather(1, columns), mask=mask)


def refuse_dependence_on_padding(trainer: GRPOTrainer, forward: Forward, rollout: Rollout) -> None:
    """Raises ValueError when the log-probabilities of a response change with the padding on the left of its prompt."""
    row = rollout.prompt_mask.sum(dim=1).argmin().view(1)  # the one with the most padding
    ids = torch.cat([rollout.prompt_ids[row], rollout.completion_ids[row]], dim=1)
    mask = torch.cat([rollout.prompt_mask[row], rollout.completion_mask[row]], dim=1)
    modes = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.eval()  # dropout would be a difference too
    with torch.no_grad():
        alone = score(trainer, forward, rollout, row)
        padded, _, _ = forward(trainer.model, ids, mask, logits_to_keep=rollout.completion_ids.shape[1])
    for module, mode in modes:
        module.training = mode
    difference = (alone.logps - padded[:, : alone.logps.shape[1]])[alone.mask.bool()].abs().max()
    rounded = trainer.args.bf16 or any(p.dtype.itemsize < 4 for p in trainer.model.parameters())
    if float(difference) > (0.5 if rounded else 0.01):
        raise ValueError(
            f"a response's log-probabilities change by up to {float(difference):.2g} nats with the padding on the left "
            "of its prompt (absolute position embeddings?), so what is sampled, trained on and measured are three "
            "policies: use a model with rotary positions, or train without probes (probe=none)"
        )


@contextlib.contextmanager
def shifted(parameters: Mapping[str, nn.Parameter], shift: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which parameters point to moved copies of themselves; what they pointed to is never written to."""
    originals = {name: param.data for name, param in parameters.items()}
    try:
        for name, param in parameters.items():
            param.data = param.data + shift[name]
        yield
    finally:
        for name, param in parameters.items():
            param.data = originals[name]


def decode(trainer: GRPOTrainer, ids: Tensor) -> str:
    """Returns the text of one sequence of tokens, as TRL decodes completions."""
    return trainer._tokenizer.decode(ids, skip_special_tokens=True)


def deepspeed_engine(trainer: GRPOTrainer) -> Any | None:
    """Returns DeepSpeed's engine, which exists once training has begun and steps within `training_step`; else None."""
    return trainer.model_wrapped if trainer.is_deepspeed_enabled else None


def mean_gradients(trainer: GRPOTrainer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the gradients of the step by name: mean over microbatches and ranks, not clipped.

    Raises ValueError when a trainable parameter has none. ZeRO knows of no such parameter: it has zeros for it.
    """
    engine = deepspeed_engine(trainer)
    if engine is not None:
        of_param = zero.mean_gradients(engine.optimizer)
        return {name: of_param[param] for name, param in parameters.items()}
    missing = [name for name, p in parameters.items() if p.grad is None]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters get no gradient from the loss, {missing[0]!r} among them: "
            "freeze what is not trained (requires_grad_(False))"
        )
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def view_optimizer(trainer: GRPOTrainer, parameters: Mapping[str, nn.Parameter]) -> OptimizerView:
    """Returns the optimizer before its step: its states by parameter name, or the reason why there is no formula.

    Under ZeRO this is a collective: the states are gathered.
    """
    engine = deepspeed_engine(trainer)
    readers: dict[type, Callable[..., AdamWState | SGDState]] = {
        torch.optim.AdamW: _read_adam_state,
        torch.optim.Adam: _read_adam_state,
    }
    if engine is not None:  # it holds torch's optimizer, and clips
        optimizer, max_grad_norm = engine.optimizer.optimizer, zero.max_grad_norm(engine.optimizer)
    else:
        optimizer, max_grad_norm = trainer.optimizer, trainer.args.max_grad_norm or float("inf")
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        readers[torch.optim.SGD] = _read_sgd_state
    read_state = readers.get(type(optimizer))
    if read_state is None:
        known = ", ".join(kind.__name__ for kind in readers)
        reason = f"the step of {type(optimizer).__name__} has no formula here, only those of {known}"
        return OptimizerView(None, max_grad_norm, reason)
    if any(group.get("amsgrad") or group["maximize"] for group in optimizer.param_groups):
        return OptimizerView(None, max_grad_norm, "amsgrad and maximize have no formula here")
    if engine is not None:
        group_of, state_of = zero.optimizer_states(engine.optimizer)
    else:
        group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        state_of = optimizer.state
    rounded = [name for name, param in parameters.items() if engine is None and param.dtype.itemsize < 4]
    if rounded:
        dtype = str(parameters[rounded[0]].dtype).removeprefix("torch.")
        reason = f"{rounded[0]} is kept in {dtype}, whose rounding decides what a step is: train weights in float32"
        return OptimizerView(None, max_grad_norm, reason)
    outside = [name for name, param in parameters.items() if param not in group_of]
    if outside:
        return OptimizerView(None, max_grad_norm, f"parameter {outside[0]} is trainable but not in the optimizer")
    states = {name: read_state(param, state_of.get(param, {}), group_of[param]) for name, param in parameters.items()}
    return OptimizerView(states, max_grad_norm)


def _read_adam_state(param: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> AdamWState:
    """Returns Adam's view of one parameter; its state is zero before the first step, when torch has none yet."""
    return AdamWState(
        exp_avg=state["exp_avg"] if state else torch.zeros_like(param),
        exp_avg_sq=state["exp_avg_sq"] if state else torch.zeros_like(param),
        step=int(state["step"]) if state else 0,
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )


def _read_sgd_state(param: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> SGDState:
    return SGDState(
        momentum_buffer=state.get("momentum_buffer"),
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    )
