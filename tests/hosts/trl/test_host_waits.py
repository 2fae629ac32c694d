"""How often the host waits for a GPU on behalf of probes at steps that none of them measures, on a simulated GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_gpu import GPU, PretendGpu

from rl_training.hosts.trl.guard import Guard
from rl_training.hosts.trl.hooks.loss import LossHook
from rl_training.hosts.trl.measured_trainer import MeasuredTrainer
from rl_training.hosts.trl.options import Options
from rl_training.hosts.trl.rollouts import batches
from rl_training.hosts.trl.rollouts import current as rollouts_module
from rl_training.hosts.trl.rollouts.current import Rollouts
from rl_training.probes.token_classes import TokenClassesProbe

NONE: Any = None
ROWS, T = 8, 5


def batch_on_gpu() -> dict[str, Any]:
    """Return TRL's output for two prompts with four responses each, with an engine's log-probabilities."""
    ids = torch.arange(3, 3 + ROWS).unsqueeze(1).expand(ROWS, T)
    prompts = torch.tensor([[1, 1], [2, 2]]).repeat_interleave(4, dim=0)
    tables = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids, "completion_mask": torch.ones_like(ids), "advantages": torch.ones(ROWS),
        batches.SAMPLING_LOGPS: torch.full((ROWS, T), -0.5), batches.OLD_LOGPS: torch.full((ROWS, T), -0.5),
    }  # fmt: skip
    return {name: torch.tensor(table.tolist(), device=GPU) for name, table in tables.items()}


def rollouts_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    monkeypatch.setattr(rollouts_module, "sampling_reason", lambda trainer, scored_temperature: None)
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(process_index=0, num_processes=1), num_generations=4, eos_token_ids=[9],
        args=SimpleNamespace(
            per_device_train_batch_size=4, steps_per_generation=2, num_iterations=1, gradient_accumulation_steps=2
        ),
        mask_truncated_completions=False, state=SimpleNamespace(global_step=0),
        processing_class=SimpleNamespace(pad_token_id=0), model=SimpleNamespace(training=True), _step=0,
    )  # fmt: skip
    policy: Any = SimpleNamespace(model=torch.nn.Module(), scorer=SimpleNamespace(temperature=1.0))  # without dropout
    return Rollouts(trainer, policy)


def test_a_rollout_takes_one_wait_and_a_microbatch_that_nothing_reads_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts, taken = rollouts_on_gpu(monkeypatch), []
    driver: Any = SimpleNamespace(
        awaits_gradients=True, num_microbatches=0, needs_scores=False, plan=lambda *_: None,
        microbatch=lambda *given: taken.append(given),
    )  # fmt: skip
    writer: Any = SimpleNamespace(wants_rollouts_of=lambda step: False)
    loss_without_interventions: Any = SimpleNamespace(interventions=(), settings=None)
    guard = Guard(driver, writer, Options(strict=True))
    measured = MeasuredTrainer(rollouts._trainer, NONE, rollouts, loss_without_interventions, Options())
    hook = LossHook(measured, driver, guard, writer)
    compute_loss = guard.around(hook.around_loss)
    with PretendGpu() as gpu:
        output = batch_on_gpu()
        gpu.start_counting()
        rollouts.begin_rollout(output, is_measured=True)
        assert sum(gpu.waits.values()) == 1, gpu.waits
        monkeypatch.setattr(rollouts, "sizes_of_step", lambda inputs: [ROWS])
        loss = torch.zeros((), device=GPU)
        gpu.start_counting()
        assert compute_loss(lambda *_: loss, NONE, output) is loss
        assert not gpu.waits
        ((rollout, *_),) = taken
        assert rollout.prompt_index.tolist() == [ROWS, ROWS, ROWS, ROWS, *[ROWS + 1] * 4]
        assert rollout.truncated.tolist() == [True] * 6 + [False, True]  # token 9 ends a response


def test_the_texts_of_all_tokens_take_one_copy_whatever_their_number() -> None:
    waits = []
    with PretendGpu() as gpu:
        for num_tokens in (2, 30):
            ids = (torch.arange(60) % num_tokens).view(4, 15).to(GPU)
            mask = torch.ones(4, 15, device=GPU)
            batch = SimpleNamespace(
                scores=SimpleNamespace(mask=mask, entropies=mask),
                rollout=SimpleNamespace(completion_ids=ids, advantages_of_tokens=mask),
            )
            policy = SimpleNamespace(has_text=True, decode=lambda token: str(token.tolist()))
            ctx: Any = SimpleNamespace(
                step=SimpleNamespace(batch=batch), policy=policy, ranks=SimpleNamespace(reduce=lambda x: x)
            )
            gpu.start_counting()
            TokenClassesProbe().kinds(ctx)
            waits.append(sum(gpu.waits.values()))
    assert waits[0] == waits[1]
