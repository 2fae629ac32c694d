"""What the noise of X along a real step is made of, and how far ratios within one batch are off, along a run.

    OMP_NUM_THREADS=1 python benchmarks/within_batch.py [--at 2 10 20 30 40] [--prompts 96] [--seed 11]
        [--condition lora]

After each of these steps 8 fresh responses to each of so many prompts give, response by response, its share a of
∂H_seq · δθ and b of ∂E[T] · δθ (a central difference along the step), with H and T. Batches of 32 prompts are drawn
from these with replacement:

    noise    of the change per token along the step, from k random responses of each prompt; of all 8 it is 1
    bias     of the ratio (mean a − H_tok mean b) / E[T] of one batch, all from the same prompts: its mean over batches
             less its value over all prompts, and the same where H_tok is that of the other seven folds
    sums     over these steps, a batch at each, from one response of each prompt: the root mean square of error over
             bar, and how many 95 % intervals hold the sum over all prompts, where the jackknife takes H_tok as given
             and where it has that of the other folds. `--at $(seq 40)`: a run whose batches are drawn DRAWS times

Nothing is known here of how well 96 prompts stand for all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import rl_training.job.silence  # noqa: F401

import torch
from along_run import CONDITIONS, settings_of
from along_run_tables import quantile
from default_task import default_trainer
from torch import Tensor

from rl_training import Estimate, Probe
from rl_training.engine.step import Step
from rl_training.hosts.trl.policy import as_rollout, respond
from rl_training.mathematics.entropy import surrogate_weights

RESPONSES, PROMPTS, FOLDS = 8, 32, 8  # of a prompt; of a batch
DIFFERENCE = 0.25  # of the step: the central difference moves this far both ways
DRAWS = 10_000


class Shares(Probe):
    """Keeps a, b, H and T of each response after some steps, (prompts, RESPONSES, 4)."""

    name = "shares"

    def __init__(self, at: Sequence[int], num_prompts: int) -> None:
        super().__init__()
        self._at, self._num_prompts = at, num_prompts
        self.trainer: Any = None
        self.shares: dict[int, Tensor] = {}

    def measures_at(self, step: int) -> bool:
        return step in self._at

    def prepare(self, step: Step) -> None:
        self._old = {name: p.detach().clone() for name, p in step.gradients.parameters.items()}

    def after_step(self, step: Step) -> None:
        shift = {name: DIFFERENCE * (p.detach() - self._old[name]) for name, p in step.gradients.parameters.items()}
        index = torch.arange(self._num_prompts).repeat_interleave(RESPONSES)
        prompts = [self.trainer.train_dataset[int(i)]["prompt"] for i in index]
        parts = [respond(self.trainer, prompts[i : i + 256], step.number, i) for i in range(0, len(prompts), 256)]
        asked, given = ([ids for part in parts for ids in part[which]] for which in (0, 1))
        rollout = as_rollout(self.trainer, asked, given, index.tolist())
        scores, ends = step.policy.score_rollout(rollout), []
        for sign in (1.0, -1.0):
            with step.policy.shifted({name: sign * d for name, d in shift.items()}):
                ends.append(step.policy.score_rollout(rollout))
        padding = scores.mask == 0
        known = (scores.entropies.double(), scores.mask, index)
        (w, u), (w_length, _) = (surrogate_weights(*known, target=target) for target in ("sequence", "length"))
        d_logps, d_entropies = (
            ((getattr(ends[0], name) - getattr(ends[1], name)).double() / (2 * DIFFERENCE)).masked_fill(padding, 0.0)
            for name in ("logps", "entropies")
        )
        columns = [w * d_logps + u * d_entropies, w_length * d_logps, known[1].masked_fill(padding, 0.0), known[2]]
        shares = torch.stack([column.sum(dim=1) for column in columns], dim=1)
        self.shares[step.number] = shares.view(self._num_prompts, RESPONSES, 4).double()

    def results(self) -> dict[str, Estimate]:
        return {"shares/kept": Estimate(float(len(self.shares)))}


def change(a: Tensor, b: Tensor, entropy: Tensor, length: Tensor) -> Tensor:
    """Returns the change per token, from sums or from means."""
    return (a - entropy / length * b) / length


def noise_rows(shares: Tensor, generator: torch.Generator) -> list[float]:
    """Returns the noise of a batch's change from 1, 2, 4 and all responses of each prompt, over that from all."""
    a, b, entropy, length = shares.unbind(-1)
    terms = (a - entropy.sum() / length.sum() * b) / length.mean()
    prompts = torch.randint(len(shares), (DRAWS, PROMPTS), generator=generator)
    order = torch.rand(DRAWS, PROMPTS, RESPONSES, generator=generator).argsort(dim=-1)
    noise = [float(terms[prompts].gather(2, order[..., :k]).mean(dim=(1, 2)).std()) for k in (1, 2, 4, 8)]
    return [value / noise[-1] for value in noise]


def biases(shares: Tensor, generator: torch.Generator) -> list[float]:
    """Returns the change over all prompts and, as shares of it, the bias of a batch's ratio with its own H_tok and with
    that of the other folds, and the error that the draws leave."""
    everything = float(change(*shares.mean(dim=(0, 1))))
    prompts = torch.randint(len(shares), (DRAWS, PROMPTS), generator=generator)
    one = torch.randint(RESPONSES, (DRAWS, PROMPTS), generator=generator)
    a, b = (shares[prompts, one, column].view(DRAWS, FOLDS, -1).sum(dim=2) for column in (0, 1))
    entropy, length = (shares[..., c].mean(dim=1)[prompts].view(DRAWS, FOLDS, -1).sum(dim=2) for c in (2, 3))
    total = length.sum(dim=1)
    own = change(a.sum(dim=1), b.sum(dim=1), entropy.sum(dim=1), total)
    level = (entropy.sum(dim=1, keepdim=True) - entropy) / (total.unsqueeze(1) - length)
    others = (a - level * b).sum(dim=1) / total
    found = [float(values.mean()) / everything - 1.0 for values in (own, others)]
    return [everything, *found, float(own.std()) / DRAWS**0.5 / abs(everything)]


def sums_rows(shares: Sequence[Tensor], generator: torch.Generator) -> list[str]:
    """Returns rows on sums over steps, from the shares of each step: error over bar, and what intervals hold."""
    names = ("token, H_tok as given", "token, H_tok of the other folds", "sequence")
    errors, variances, squares = (torch.zeros(len(names), DRAWS, dtype=torch.float64) for _ in range(3))
    for of_step in shares:
        prompts = torch.randint(len(of_step), (DRAWS, PROMPTS), generator=generator)
        one = torch.randint(RESPONSES, (DRAWS, PROMPTS), generator=generator)
        terms = torch.cat([of_step[prompts, one, :2], of_step[..., 2:].mean(dim=1)[prompts]], dim=-1)
        folds = terms.view(DRAWS, FOLDS, -1, 4).mean(dim=2)
        whole, everything = folds.mean(dim=1), of_step.mean(dim=(0, 1))
        a, b, entropy, length = ((FOLDS * whole.unsqueeze(1) - folds) / (FOLDS - 1)).unbind(-1)
        given = (a - (whole[:, 2] / whole[:, 3]).unsqueeze(1) * b) / length
        without = torch.stack([given, change(a, b, entropy, length), a])  # of each fold, (bars, DRAWS, FOLDS)
        variance = (FOLDS - 1) ** 2 / FOLDS * without.var(dim=2)
        per_token = change(*whole.unbind(-1)) - change(*everything)
        errors += torch.stack([per_token, per_token, whole[:, 0] - everything[0]])
        variances += variance
        squares += variance.square()
    ratios = errors / variances.sqrt()
    held = ratios.abs() < quantile(1 + (FOLDS - 1) * variances.square() / squares)
    numbers = zip(names, ratios.square().mean(dim=1).sqrt(), held.double().mean(dim=1), strict=True)
    return [f"| {name} | {float(ratio):.3f} | {float(share):.3f} |" for name, ratio, share in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=int, nargs="+", default=[2, 10, 20, 30, 40])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--condition", choices=CONDITIONS, default="default")
    options = parser.parse_args()
    probe = Shares(options.at, options.prompts)
    with tempfile.TemporaryDirectory() as folder:
        probe.trainer = default_trainer(
            folder, [probe], max(options.at), seed=options.seed, **settings_of(options.condition)
        )
        probe.trainer.train()
    print(
        "| step | 1 of 8 | 2 of 8 | 4 of 8 | ΔH per token | bias | with H_tok of the others | ± |\n" + "|---" * 8 + "|"
    )
    generator = torch.Generator().manual_seed(0)
    for step, shares in probe.shares.items():
        noise = [f"{value:.2f}" for value in noise_rows(shares, generator)[:3]]
        everything, *found = biases(shares, generator)
        print(f"| {' | '.join([str(step), *noise, f'{everything:+.5f}', *(f'{100 * x:.1f} %' for x in found)])} |")
    print(f"\n| sums over {len(probe.shares)} steps, per | error over bar | intervals that hold |\n|---|---|---|")
    print("\n".join(sums_rows(list(probe.shares.values()), generator)))


if __name__ == "__main__":
    main()
