"""Which estimate of the entropy gradient X is the least noisy, and what the naive one misses.

    OMP_NUM_THREADS=1 python benchmarks/estimators.py [--batches 13] [--warm-steps 10]

At one state of the default task (see coverage.py), X is estimated from every microbatch of 4 prompts x 8 responses in
several ways; the microbatches of all batches are independent. Printed are

    noise     root of the trace of the covariance, relative to `rb` with all responses
    along δθ  mean of X · δθ in nats per sequence, with its standard error, δθ the step of the first batch, which is not
              measured otherwise; and the scatter of X · δθ over microbatches, relative to `rb` with all responses
    − rb      the difference to `rb` with all responses on the same microbatches, with its standard error

`rb` is what probes use (mathematics/entropy.py), with exact entropies; `score` is the classic −E[(S − S̄) ∂S]. Both are
unbiased. `naive` is the gradient of the mean measured entropy.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence

import rl_training.job.silence  # noqa: F401

import torch
from coverage import StayHere
from default_task import default_trainer
from torch import Tensor
from tqdm import tqdm

from rl_training import Estimate, Probe
from rl_training.engine.entropy_gradients import EntropySettings, fold_gradients, importance_ratios
from rl_training.engine.probe import Need
from rl_training.engine.step import Step
from rl_training.mathematics.vectors import Layout

CHOICES = {
    "rb, 8 of 8": EntropySettings(8),
    "rb, 4 of 8": EntropySettings(4),
    "rb, 2 of 8": EntropySettings(2),
    "rb, 1 of 8": EntropySettings(1),
}
SCORE, NAIVE = "score, 8 of 8", "naive, 8 of 8"
REFERENCE = "rb, 8 of 8"


class Estimators(Probe):
    """Keeps X of every microbatch, estimated in each way, and the first measured step."""

    name = "estimators"
    needs = Need.FOLD_GRADIENTS

    def __init__(self, warm_steps: int, bar: tqdm) -> None:
        super().__init__()
        self._warm_steps, self._bar = warm_steps, bar
        self.gradients: dict[str, list[Tensor]] = {
            name: [] for name in (*CHOICES, SCORE, NAIVE)
        }  # of each microbatch, (P,)
        self.update: Tensor | None = None

    def measures_at(self, step: int) -> bool:
        return step > self._warm_steps

    def prepare(self, step: Step) -> None:
        parameters = list(step.gradients.parameters.values())
        if self.update is None:
            self._old = [p.detach().clone() for p in parameters]
            return
        layout, ratios = Layout(step.gradients.parameters), importance_ratios(step.batch)
        assert ratios is not None
        for name, settings in CHOICES.items():
            # At level 0 what is left of ∂H_seq − H_tok ∂E[T] is the gradient of the sequence entropy.
            folds = fold_gradients(step.batch, step.policy, parameters, layout, ratios, 0.0, settings)
            self.gradients[name] += [torch.cat(fold.entropy[0]) for fold in folds]
        for fold in range(step.batch.num_folds):
            rows = (step.batch.fold == fold).nonzero().squeeze(1)
            scores = step.policy.score(step.batch.rollout, rows)
            total = (scores.logps * scores.mask).sum(dim=1)  # S of each response
            by_prompt = total.detach().view(-1, step.batch.responses_per_prompt)
            group = by_prompt.shape[1]  # S − loo(S) = (S − S̄) G / (G − 1)
            above = (by_prompt - by_prompt.mean(dim=1, keepdim=True)).flatten() * group / (group - 1)
            naive = (scores.entropies * scores.mask).sum() / len(rows)
            for name, mean in ((SCORE, -(above * total).mean()), (NAIVE, naive)):
                gradient = torch.autograd.grad(mean, parameters, retain_graph=name == SCORE)
                self.gradients[name].append(_flat(gradient))

    def after_step(self, step: Step) -> None:
        if self.update is None:
            parameters = step.gradients.parameters.values()
            self.update = _flat([new.detach() - old for new, old in zip(parameters, self._old, strict=True)])

    def results(self) -> dict[str, Estimate]:
        self._bar.update()
        return {"estimators/microbatches": Estimate(float(len(self.gradients[NAIVE])))}


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=13, help="the first one gives the step δθ only")
    parser.add_argument("--warm-steps", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=options.batches, unit="batch") as bar:
        probe = Estimators(options.warm_steps, bar)
        trainer = default_trainer(scratch, [probe], options.warm_steps + options.batches)
        trainer.add_callback(StayHere(options.warm_steps))
        trainer.train()
    assert probe.update is not None
    gradients = {name: torch.stack(of_name) for name, of_name in probe.gradients.items()}
    noise = {name: math.sqrt(float(g.var(dim=0).sum())) for name, g in gradients.items()}
    along = {name: (g @ probe.update).double() for name, g in gradients.items()}
    count = len(along[REFERENCE])
    print(f"\n{count} microbatches")
    print("\n| estimate | noise | along δθ | scatter along δθ | − rb |\n|---|---|---|---|---|")
    for name, values in along.items():
        difference = values - along[REFERENCE]
        cells = [
            f"`{name}`",
            f"{noise[name] / noise[REFERENCE]:.2f}",
            f"{values.mean():+.4f} ± {values.std() / math.sqrt(count):.4f}",
            f"{values.std() / along[REFERENCE].std():.2f}",
            "" if name == REFERENCE else f"{difference.mean():+.4f} ± {difference.std() / math.sqrt(count):.4f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
