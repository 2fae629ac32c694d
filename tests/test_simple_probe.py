"""The simple δH probe on a real trainer, against a slow plain twin, and its promises about what it cannot measure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from peft import LoraConfig
from torch import Tensor

from rl_training import Estimate, Probe
from rl_training.mathematics.draws import keys_of, uniforms_of
from rl_training.probes import EffectiveSampleSizeProbe, GradientNoiseScaleProbe, SimpleEntropyProbe
from rl_training.step.error_shares import SHARES
from rl_training.tasks.models import load_tiny

K, G, L_MAX = 8, 4, 24
EIGHT_FOLDS = {"per_device_train_batch_size": G, "gradient_accumulation_steps": K}  # of one prompt
# Microbatches of three prompts, each cut into folds of one prompt and of two.
UNEQUAL_FOLDS = {"per_device_train_batch_size": 3 * G, "gradient_accumulation_steps": K // 2}
# A large epsilon makes the first Adam step smooth; otherwise it is a sign, and fp32 noise decides the sign of a zero.
SMOOTH = {"adam_epsilon": 1e-5, "max_grad_norm": 0.05}


@dataclass
class Snapshot:
    """All that a step starts from, in float64."""

    step: int
    parameters: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor, int]]
    hyperparameters: dict[str, dict[str, Any]]
    max_grad_norm: float
    rollout: Any
    fold: Tensor
    update: dict[str, Tensor] | None = None  # θ_after − θ_before


class Recorder(Probe):
    """Copies the state before each step, and what the step really did."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Snapshot] = []

    def on_pre_optimizer_step(self, ctx: Any) -> None:
        states = ctx.optimizer.states
        self.steps.append(
            Snapshot(
                step=ctx.step,
                parameters={n: p.detach().double().clone() for n, p in ctx.parameters.items()},
                moments={n: (s.exp_avg.double(), s.exp_avg_sq.double(), s.step) for n, s in states.items()},
                hyperparameters={
                    n: {"lr": s.lr, "betas": s.betas, "eps": s.eps, "weight_decay": s.weight_decay}
                    for n, s in states.items()
                },
                max_grad_norm=ctx.optimizer.max_grad_norm,
                rollout=ctx.rollout,
                fold=ctx.fold,
            )
        )
        self.steps[-1] = copy.deepcopy(self.steps[-1])

    def on_optimizer_step(self, ctx: Any) -> None:
        before = self.steps[-1].parameters
        self.steps[-1].update = {n: p.detach().double() - before[n] for n, p in ctx.parameters.items()}

    def measure(self, ctx: Any) -> dict[str, Estimate]:
        return {"recorder/step": Estimate(float(ctx.step))}


class Answers(SimpleEntropyProbe):
    """The probe, with its answers kept."""

    def __init__(self, error_decay: float = 0.0, draw: str = "norm", **options: Any) -> None:
        super().__init__(error_decay=error_decay, draw=draw, **options)
        self.all: list[dict[str, Estimate]] = []

    def measure(self, ctx: Any) -> dict[str, Estimate]:
        self.all.append(super().measure(ctx))
        return self.all[-1]


class Twin:
    """One step, again from the definitions: full logits, autograd a fold at a time, torch's own AdamW for each δθ."""

    def __init__(
        self,
        step: Snapshot,
        responses: int,
        estimator: str,
        temperature: float = 1.0,
        max_length: int = L_MAX,
        prompt_share: float = 1.0,
        draw: str = "norm",
    ) -> None:
        self.step, self.max_length = step, max_length
        self.ratios = [1.0] * len(step.rollout.advantages)
        self.model = load_tiny()[0].double()
        self.params = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in step.parameters.items():
                self.params[name].copy_(value)
        rollout = step.rollout
        self.lengths = rollout.completion_mask.sum(dim=1).tolist()
        scores = [self.score(rollout, i, temperature) for i in range(len(self.lengths))]
        self.logps, self.entropies = ([score[which] for score in scores] for which in (0, 1))
        ragged = [[row.tolist() for row in values] for values in (self.logps, self.entropies)]
        prompts = rollout.prompt_index.tolist()
        self.entropy_of = [sum(row) for row in ragged[1]]
        self.weights = {
            target: reference.surrogate_weights(*ragged, prompts, estimator, target)
            for target in ("sequence", "length")
        }
        self.folds = [(step.fold == k).nonzero().flatten().tolist() for k in range(int(step.fold.max()) + 1)]
        self.choose(responses, prompt_share, draw)
        self.x = {target: [self.entropy_gradient(fold, target) for fold in self.folds] for target in self.weights}
        self.gradients = [self.training_gradient(fold) for fold in self.folds]
        self.gradient_of_all = self.mean(dict(enumerate(self.gradients)))
        self.update = self.adamw(self.gradient_of_all)
        without = [self.mean({j: g for j, g in enumerate(self.gradients) if j != k}) for k in range(len(self.folds))]
        self.update_without = [self.adamw(gradient) for gradient in without]
        self.update_unclipped = [self.adamw(gradient, max_grad_norm=math.inf) for gradient in without]
        self.parts_without = [self.parts(self.clipped(gradient)) for gradient in without]

    def weigh(self, ratios: list[float]) -> None:
        """Weights each response by its importance ratio."""
        self.ratios = ratios
        self.choose(responses=1)
        self.x = {target: [self.entropy_gradient(fold, target) for fold in self.folds] for target in self.weights}

    def choose(self, responses: int, prompt_share: float = 1.0, draw: str = "norm") -> None:
        """Sets which responses X is computed from, and for how many each of them stands."""
        prompts = self.step.rollout.prompt_index.tolist()
        strata = prompts if prompt_share == 1.0 else self.step.fold.tolist()
        self.multiplicity: dict[int, float] = {}  # of the responses that are drawn
        for stratum in sorted(set(strata)):
            members = [i for i, s in enumerate(strata) if s == stratum]
            wanted = len(members) / prompts.count(prompts[0]) * responses * prompt_share
            self.multiplicity |= self.draw(members, min(max(round(wanted), 1), len(members)))
        if draw == "first":
            first = [i for i, p in enumerate(prompts) if prompts[:i].count(p) < responses]
            self.multiplicity = dict.fromkeys(first, prompts.count(prompts[0]) / responses)
        self.chosen = sorted(self.multiplicity)

    def draw(self, members: list[int], count: int) -> dict[int, float]:
        """Returns for how many each drawn response stands: probabilities by the norms, and a walk along them."""
        w_entropy, w_length = self.weights["sequence"][0], self.weights["length"][0]
        level = dot_product(self.ratios, self.entropy_of) / dot_product(self.ratios, self.lengths)
        norm = {}
        for i in members:
            w = [a - level * b for a, b in zip(w_entropy[i], w_length[i], strict=True)]
            norm[i] = self.ratios[i] * math.sqrt(sum(a * a for a in [*w, *self.weights["sequence"][1][i]]))
        certain: list[int] = []
        while True:  # whose share is above 1 is drawn for certain
            others = [i for i in members if i not in certain]
            total = sum(norm[i] for i in others)
            share = {
                i: (count - len(certain)) * (0.8 * (norm[i] / total if total else 1 / len(others)) + 0.2 / len(others))
                for i in others
            }
            above = [i for i in others if share[i] > 1]
            certain += above
            if not above:
                break
        probability = [1.0 if i in certain else share[i] for i in members]
        rollout = self.step.rollout
        key = keys_of(rollout.prompt_ids[members], rollout.prompt_mask[members]).sum(dim=0, keepdim=True)
        point = float(uniforms_of(key, seed=0, step=self.step.step))
        drawn, start = {}, 0.0
        for i, length in zip(members, probability, strict=True):
            if any(start <= point + j < start + length for j in range(count)):
                drawn[i] = 1 / length
            start += length
        return drawn

    def score(self, rollout: Any, i: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the policy's tokens in one response: unpadded, in a graph of its own."""
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i].bool()]
        there = rollout.token_mask[i].bool()
        response, sampled = rollout.completion_ids[i][there], rollout.completion_mask[i][there].bool()
        logits = self.model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        table = (logits / temperature).log_softmax(dim=-1)
        return table.gather(1, response[:, None]).squeeze(1)[sampled], -(table.exp() * table).sum(dim=1)[sampled]

    def update_without_chosen(self) -> list[dict[str, Tensor]]:
        """For each fold k, the step in which the fold's other responses stand for its chosen ones as well."""
        updates = []
        for k, fold in enumerate(self.folds):
            others = self.training_gradient([i for i in fold if i not in self.chosen])
            updates.append(self.adamw(self.mean({**dict(enumerate(self.gradients)), k: others})))
        return updates

    def mean(self, of_folds: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """The mean over the sequences of some folds, from the means over each."""
        count = sum(len(self.folds[k]) for k in of_folds)
        return {n: sum(len(self.folds[k]) * g[n] for k, g in of_folds.items()) / count for n in self.params}

    def contributions(self) -> list[float]:
        """By sequence: the entropy gradient per token of the folds of the other parity, times its part of the step."""
        level, length = sum(self.entropy_of) / sum(self.lengths), sum(self.lengths) / len(self.lengths)
        x_of_half = []
        for parity in (0, 1):
            x = [self.mean({k: self.x[of][k] for k in range(parity, len(self.folds), 2)}) for of in self.weights]
            x_of_half.append({n: (x[0][n] - level * x[1][n]) / length for n in self.params})
        clipped = self.clipped(self.gradient_of_all)
        factor = {n: part / clipped[n] for n, part in self.parts(clipped)["gradient"].items()}
        clip = next(float(clipped[n].norm() / g.norm()) for n, g in self.gradient_of_all.items())
        total = []
        for i, fold in enumerate(self.step.fold.tolist()):
            own = self.training_gradient([i])
            x = x_of_half[1 - fold % 2]
            step = {n: (factor[n] * clip * g).nan_to_num() for n, g in own.items()}  # 0 / 0: an unused embedding
            total.append(dot(x, step) / len(self.lengths))
        return total

    def clipped(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        return {n: g * min(1.0, self.step.max_grad_norm / (norm + 1e-6)) for n, g in gradient.items()}

    def parts(self, gradient: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The three terms of θ ← θ − lr λ θ − lr (β1 m + (1−β1) g) / (1−β1^t) / (√v̂ + ε)."""
        parts: dict[str, dict[str, Tensor]] = {"momentum": {}, "gradient": {}, "decay": {}}
        for name, g in gradient.items():
            exp_avg, exp_avg_sq, step = self.step.moments[name]
            options = self.step.hyperparameters[name]
            beta1, beta2 = options["betas"]
            v = (beta2 * exp_avg_sq + (1 - beta2) * g**2) / (1 - beta2 ** (step + 1))
            scale = -options["lr"] / (1 - beta1 ** (step + 1)) / (v.sqrt() + options["eps"])
            parts["momentum"][name] = scale * beta1 * exp_avg
            parts["gradient"][name] = scale * (1 - beta1) * g
            parts["decay"][name] = -options["lr"] * options["weight_decay"] * self.params[name].detach()
        return parts

    def entropy_gradient(self, fold: list[int], target: str) -> dict[str, Tensor]:
        w, u = self.weights[target]
        tensor = functools.partial(torch.tensor, dtype=torch.float64)
        total = sum(
            self.multiplicity[i] * self.ratios[i] * (tensor(w[i]) @ self.logps[i] + tensor(u[i]) @ self.entropies[i])
            for i in fold
            if i in self.multiplicity
        )
        return self.gradient(total / len(fold))

    def training_gradient(self, fold: list[int]) -> dict[str, Tensor]:
        return self.gradient(sum(self.training_loss(i) for i in fold) / (len(fold) * self.max_length))

    def training_loss(self, i: int) -> Tensor:
        """The clipped loss of one response, summed over its tokens; ratios are 1 at the first step on it."""
        advantage, logps = float(self.step.rollout.advantages[i]), self.logps[i]
        kept = self.step.rollout.sampling_logps
        at_sampling = logps.detach() if kept is None else kept[i, : len(logps)].double()
        ratio = (logps - at_sampling).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()

    def gradient(self, value: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad(value, list(self.params.values()), retain_graph=True)
        return dict(zip(self.params, grads, strict=True))

    def adamw(self, gradient: dict[str, Tensor], max_grad_norm: float | None = None) -> dict[str, Tensor]:
        return self.adamw_from(self.step.moments, gradient, max_grad_norm)[0]

    def adamw_from(
        self, moments: dict[str, tuple[Tensor, Tensor, int]], gradient: dict[str, Tensor], max_norm: float | None = None
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor, int]]]:
        """The step that torch's AdamW makes from these moments, and its moments afterwards."""
        clones = {n: torch.nn.Parameter(p.detach().clone()) for n, p in self.params.items()}
        groups = [{"params": [clones[n]], **self.step.hyperparameters[n]} for n in clones]
        optimizer = torch.optim.AdamW(groups)
        for name, clone in clones.items():
            clone.grad = gradient[name].clone()
            exp_avg, exp_avg_sq, step = moments[name]
            if step:
                optimizer.state[clone] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": exp_avg.clone(),
                    "exp_avg_sq": exp_avg_sq.clone(),
                }
        torch.nn.utils.clip_grad_norm_(clones.values(), max_norm or self.step.max_grad_norm)
        optimizer.step()
        state = {n: optimizer.state[clone] for n, clone in clones.items()}
        after = {n: (s["exp_avg"], s["exp_avg_sq"], int(s["step"])) for n, s in state.items()}
        return {n: clone.detach() - self.params[n].detach() for n, clone in clones.items()}, after

    def rows(self, updates: list[dict[str, Tensor]]) -> list[list[float]]:
        """[entropy, length, sequences, X_seq·δ, X_len·δ] of each fold, products weighted by the fold's size."""
        return [
            [
                sum(self.ratios[i] * self.entropy_of[i] for i in fold),
                sum(self.ratios[i] * self.lengths[i] for i in fold),
                sum(self.ratios[i] for i in fold),
                len(fold) * dot(self.x["sequence"][k], updates[k]),
                len(fold) * dot(self.x["length"][k], updates[k]),
            ]
            for k, fold in enumerate(self.folds)
        ]

    def stderr(
        self, without: list[dict[str, Tensor]], statistic: Any, previous: dict[str, Tensor] | None = None
    ) -> float:
        """Delete-one-fold jackknife, δθ_(−k,−l) ≈ δθ_(−k) + δθ_(−l) − δθ, at the entropy per token of all folds.

        without   by fold k: the step δθ_(−k) that X_k is multiplied with
        previous  the update of the step before: then it is that of ½(forward + backward)
        """
        values, level = [], dot_product(self.ratios, self.entropy_of) / dot_product(self.ratios, self.lengths)
        for out in range(K):
            updates = [{n: u[n] + self.update_without[out][n] - self.update[n] for n in self.update} for u in without]
            if previous is not None:
                updates = [{n: 0.5 * (u[n] + previous[n]) for n in u} for u in updates]
            kept = [row for k, row in enumerate(self.rows(updates)) if k != out]
            values.append(statistic([sum(column) for column in zip(*kept, strict=True)], level))
        mean = sum(values) / K
        return math.sqrt((K - 1) / K * sum((v - mean) ** 2 for v in values))


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(sum((a[n] * b[n]).sum() for n in a))


def dot_product(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def per_token(sums: list[float], level: float | None = None) -> float:
    entropy, length, _, d_entropy, d_length = sums
    return (d_entropy - (entropy / length if level is None else level) * d_length) / length


def per_sequence(sums: list[float], level: float | None = None) -> float:
    return sums[3] / sums[2]


@pytest.mark.parametrize(
    ("estimator", "responses", "prompt_share", "temperature", "max_length", "folds", "masked"),
    [
        ("rb", 1, 1.0, 1.0, L_MAX, UNEQUAL_FOLDS, True),  # a part of the responses is truncated, and not learned from
        ("rb", 4, 1.0, 0.7, 5, EIGHT_FOLDS, False),  # within 5 tokens hardly a response ends
        ("score", 2, 0.5, 1.3, L_MAX, EIGHT_FOLDS, False),
    ],
)
def test_every_estimate_equals_the_plain_twin(
    make_trainer, estimator, responses, prompt_share, temperature, max_length, folds, masked
) -> None:
    recorder = Recorder()
    probe = Answers(
        estimator=estimator,
        responses_per_prompt=responses,
        prompt_share=prompt_share,
        per_sequence=True,
        split_error=True,
        num_folds=K,
    )
    make_trainer(
        probes=[probe, recorder],
        dtype=torch.float64,
        temperature=temperature,
        max_completion_length=max_length,
        reward=lambda completions, **kwargs: [float(sum(map(ord, c)) % 3) for c in completions],
        max_steps=3,
        mask_truncated_completions=masked,
        **folds,
        **SMOOTH,
    ).train()
    twins = [Twin(step, responses, estimator, temperature, max_length, prompt_share) for step in recorder.steps[:2]]
    for step in recorder.steps[:2] if masked else ():
        of_full_length = step.rollout.completion_mask.sum(dim=1) == max_length
        left_out = of_full_length & (step.rollout.completion_ids[:, -1] != load_tiny()[1].eos_token_id)
        assert 0.1 < float(left_out.float().mean()) < 0.9
        assert (step.rollout.advantages[left_out] == 0).all()
    # TRL's fused head computes in fp32; with few responses to learn from, much cancels.
    same = {"rel": 1e-3, "abs": 2e-6 if masked else 1e-9}
    for twin, answer in zip(twins, probe.all[:2], strict=True):
        for suffix, statistic in (("", per_token), ("_sequence", per_sequence)):
            forward, reuse = (
                statistic([sum(c) for c in zip(*twin.rows(updates), strict=True)])
                for updates in (twin.update_without, [twin.update] * K)
            )
            assert answer[f"delta_h/forward{suffix}"].value == pytest.approx(forward, **same)
            assert answer[f"delta_h/reuse{suffix}"].value == pytest.approx(reuse, **same)
            stderr = twin.stderr(twin.update_without, statistic)
            assert answer[f"delta_h/forward{suffix}"].stderr == pytest.approx(stderr, **same)
            level = functools.partial(statistic, **({} if suffix else {"level": answer["entropy/token"].value}))
            of_x = reference.jackknife_stderr(level, twin.rows([twin.update] * K))  # the step as it is
            shares = [answer[f"delta_h/{share}{suffix}"].value for share in SHARES]
            assert shares[0] == pytest.approx((of_x / stderr) ** 2, **same)
            assert sum(shares) == pytest.approx(1.0, rel=1e-12)
        assert answer["entropy/token"].value == pytest.approx(sum(twin.entropy_of) / sum(twin.lengths), **same)
        assert answer["entropy/sequence"].value == pytest.approx(sum(twin.entropy_of) / len(twin.lengths), **same)
    first, second, third = probe.all
    rows = twins[1].rows([twins[0].update] * K)
    backward = per_token([sum(c) for c in zip(*rows, strict=True)])
    assert second["delta_h/backward"].value == pytest.approx(backward, **same)
    at_level = functools.partial(per_token, level=second["entropy/token"].value)
    assert second["delta_h/backward"].stderr == pytest.approx(reference.jackknife_stderr(at_level, rows), **same)
    trapezoid = 0.5 * (first["delta_h/forward"].value + backward)
    assert second["delta_h/trapezoid"].value == pytest.approx(trapezoid, **same)
    assert second["delta_h/cumulative_predicted"].value == pytest.approx(trapezoid, **same)
    measured = second["entropy/token"].value - first["entropy/token"].value
    assert second["delta_h/cumulative_measured"].value == pytest.approx(measured, rel=1e-12)
    # Up to the third batch: ½F from the first, ½(F + B) from the second and ½B from the third, each with its own noise.
    half_step = twins[1].stderr(twins[1].update_without, per_token, previous=twins[0].update)
    ends = 0.5 * first["delta_h/forward"].stderr, 0.5 * third["delta_h/backward"].stderr
    assert third["delta_h/cumulative_predicted"].stderr == pytest.approx(math.hypot(half_step, *ends), **same)


def test_causes_and_own_prompts_equal_the_plain_twin(make_trainer) -> None:
    recorder, probe = (
        Recorder(),
        Answers(own_prompts=True, per_sequence=True, top_responses=3, num_folds=K, draw="first"),
    )
    make_trainer(probes=[probe, recorder], dtype=torch.float64, **UNEQUAL_FOLDS, **SMOOTH).train()
    same = {"rel": 2e-4, "abs": 1e-9}
    for step, answer in zip(recorder.steps, probe.all, strict=True):
        twin = Twin(step, responses=1, estimator="rb", draw="first")

        def change(updates: list[dict[str, Tensor]], statistic: Any, twin: Twin = twin) -> float:
            return statistic([sum(c) for c in zip(*twin.rows(updates), strict=True)])

        without_chosen = twin.update_without_chosen()
        for suffix, statistic in (("", per_token), ("_sequence", per_sequence)):
            value = {
                "own_prompts": change(without_chosen, statistic),
                "forward_unclipped": change(twin.update_unclipped, statistic),
                **{f"part/{c}": change([p[c] for p in twin.parts_without], statistic) for c in twin.parts_without[0]},
                **{f"layer/{n}": change(only(twin.update_without, f"layers.{n}."), statistic) for n in (0, 1)},
                "layer/embedding": change(only(twin.update_without, "embed_tokens"), statistic),
                "kind/mlp": change(only(twin.update_without, "mlp"), statistic),
            }
            for name, expected in value.items():
                assert answer[f"delta_h/{name}{suffix}"].value == pytest.approx(expected, **same), name
            for name, without in (
                ("own_prompts", without_chosen),
                ("forward_unclipped", twin.update_unclipped),
            ):
                stderr = twin.stderr(without, statistic)
                assert answer[f"delta_h/{name}{suffix}"].stderr == pytest.approx(stderr, rel=1e-3), name
        lowest = sorted(twin.contributions())[:3]
        got = [answer[f"delta_h/response/{rank}"].value for rank in (1, 2, 3)]
        assert got == pytest.approx(lowest, rel=0.02)  # a central difference


def test_measuring_per_sequence_adds_a_twin_to_each_change_and_leaves_the_change_per_token_as_it_is(
    make_trainer,
) -> None:
    answers = []
    for per_sequence in (False, True):
        probe = Answers(per_sequence=per_sequence, own_prompts=True, split_error=True)
        make_trainer(probes=[probe], **EIGHT_FOLDS, **SMOOTH).train()
        answers.append(probe.all[1])
    alone, both = answers
    added = {f"{name}_sequence" for name in alone if name.startswith("delta_h/")} - alone.keys()
    assert both.keys() - alone.keys() == {name for name in added if "cumulative_measured" not in name}
    for name, estimate in alone.items():
        assert both[name].value == pytest.approx(estimate.value, rel=1e-5, abs=1e-9, nan_ok=True), name
        assert both[name].stderr == pytest.approx(estimate.stderr, rel=1e-5, abs=1e-9, nan_ok=True), name


def only(updates: list[dict[str, Tensor]], word: str) -> list[dict[str, Tensor]]:
    """The updates of the parameters with this word in their names; the others stand still."""
    return [{n: u if word in n else torch.zeros_like(u) for n, u in update.items()} for update in updates]


def test_each_split_of_forward_adds_up_to_forward(make_trainer) -> None:
    probe = Answers(per_sequence=True)
    make_trainer(probes=[probe], max_grad_norm=0.05).train()
    for answer in probe.all:
        for suffix in ("", "_sequence"):
            for split in ("part", "layer", "kind"):
                names = [
                    n for n in answer if n.startswith(f"delta_h/{split}/") and n.endswith("_sequence") == bool(suffix)
                ]
                total = sum(answer[name].value for name in names)
                assert total == pytest.approx(answer[f"delta_h/forward{suffix}"].value, rel=1e-6), split


def test_clipping_is_what_separates_forward_from_forward_unclipped(make_trainer) -> None:
    for max_grad_norm, same in ((1e6, True), (0.01, False)):
        probe = Answers()
        # Adam's very first step would not notice a factor; a large epsilon lets it.
        make_trainer(probes=[probe], max_grad_norm=max_grad_norm, adam_epsilon=1e-3, max_steps=1).train()
        values = [probe.all[0][f"delta_h/{name}"].value for name in ("forward", "forward_unclipped")]
        assert (values[0] == values[1]) == same


def test_folds_of_several_microbatches_and_slices_of_one_measure_the_same_step(make_trainer) -> None:
    """The same batch of 8 prompts in 8 folds: as 8 microbatches, as halves of 4, and, in 4 folds, as pairs of 8."""
    forward = {}
    for microbatches, num_folds in ((8, None), (4, 8), (8, 4), (4, None)):
        probe = Answers(num_folds=num_folds)
        make_trainer(
            probes=[probe],
            per_device_train_batch_size=32 // microbatches,
            gradient_accumulation_steps=microbatches,
            max_steps=1,
            **SMOOTH,
        ).train()
        forward[microbatches, num_folds] = probe.all[0]["delta_h/forward"]
    assert forward[4, 8].value == pytest.approx(forward[8, None].value, rel=1e-3)
    assert forward[4, 8].stderr == pytest.approx(forward[8, None].stderr, rel=1e-3)
    assert forward[8, 4].value == pytest.approx(forward[4, None].value, rel=1e-3)
    assert forward[8, 4].num_samples == 4


def test_a_lora_update_is_the_change_of_its_matrices_and_splits_by_layer(make_trainer) -> None:
    recorder, probe = Recorder(), Answers(per_sequence=True)
    adapter = LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False)
    make_trainer(probes=[probe, recorder], peft_config=adapter, dtype=torch.float64, max_steps=2).train()
    real = torch.cat([u.reshape(-1) for u in recorder.steps[-1].update.values()])
    torch.testing.assert_close(probe.state_dict()["update"].double(), real, rtol=1e-4, atol=1e-9)
    forward = probe.all[1]["delta_h/forward"].value
    assert forward != 0
    assert sum(probe.all[1][f"delta_h/layer/{n}"].value for n in (0, 1)) == pytest.approx(forward, rel=1e-6)
    assert {n for n in probe.all[1] if n.startswith("delta_h/kind/")} == {
        f"delta_h/kind/{kind}{suffix}" for kind in ("attention", "mlp") for suffix in ("", "_sequence")
    }


def test_a_number_of_folds_that_would_split_prompts_is_refused_with_one_that_would_not(make_trainer) -> None:
    with pytest.raises(ValueError, match="use num_folds=8"):
        make_trainer(probes=[SimpleEntropyProbe(num_folds=16)])  # 4 microbatches of 2 prompts


@pytest.mark.parametrize("make_optimizer", [
    lambda parameters: None,  # the trainer's own
    lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1, eps=1e-5),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, dampening=0.5),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    lambda parameters: torch.optim.AdamW(
        [{"params": [p], "lr": 1e-4 * (i + 1), "weight_decay": 0.1 * (i % 2)} for i, p in enumerate(parameters)]
    ),
])  # fmt: skip
def test_the_step_of_each_known_optimizer_is_the_change_of_the_parameters(make_trainer, make_optimizer) -> None:
    class Watch(Probe):
        name = "watch"

        def on_pre_optimizer_step(self, ctx: Any) -> None:
            self.before = {n: p.detach().clone() for n, p in ctx.parameters.items()}

        def on_optimizer_step(self, ctx: Any) -> None:
            self.change = torch.cat([(p.detach() - self.before[n]).flatten() for n, p in ctx.parameters.items()])

        def measure(self, ctx: Any) -> dict[str, Estimate]:
            return {"watch/step": Estimate(float(ctx.step))}

    policy, probe, watch = load_tiny()[0].double(), SimpleEntropyProbe(), Watch()
    optimizer = make_optimizer(list(policy.parameters()))
    settings = {"max_grad_norm": 0.05}  # which clips
    make_trainer(
        probes=[probe, watch], model=policy, optimizers=(optimizer, None), dtype=torch.float64, **settings
    ).train()
    torch.testing.assert_close(probe.state_dict()["update"], watch.change, rtol=1e-6, atol=1e-12)


def test_without_an_adamw_formula_forward_is_nan_and_backward_uses_the_parameter_difference(make_trainer) -> None:
    class Sgd(torch.optim.SGD):
        """A step that nobody has a formula for."""

    probe = Answers(responses_per_prompt=2)
    policy = load_tiny()[0]
    optimizer = Sgd(policy.parameters(), lr=1.0)
    trainer = make_trainer(probes=[probe], model=policy, optimizers=(optimizer, None), **EIGHT_FOLDS)
    trainer.train()
    second = probe.all[1]
    for name in ("forward", "reuse", "trapezoid"):
        assert math.isnan(second[f"delta_h/{name}"].value)
        assert "Sgd" in second[f"delta_h/{name}"].reason
    assert math.isfinite(second["delta_h/backward"].value)
    assert second["delta_h/backward"].value != 0


def test_off_policy_steps_are_weighted_by_the_importance_ratio(make_trainer) -> None:
    """Step 2 learns from the second half of the rollout that step 1 started with."""
    recorder, probe = Recorder(), Answers(per_sequence=True)
    make_trainer(probes=[probe, recorder], dtype=torch.float64, max_steps=2, steps_per_generation=8, **SMOOTH).train()
    step, answer = recorder.steps[1], probe.all[1]
    twin = Twin(step, responses=1, estimator="rb")
    ratios = [
        math.exp(float((twin.logps[i].detach() - step.rollout.sampling_logps[i, : twin.lengths[i]]).sum()))
        for i in range(len(twin.lengths))
    ]
    assert max(ratios) > 1.01
    entropy, length = dot_product(ratios, twin.entropy_of), dot_product(ratios, twin.lengths)
    assert answer["entropy/token"].value == pytest.approx(entropy / length, rel=1e-4)
    assert answer["entropy/sequence"].value == pytest.approx(entropy / sum(ratios), rel=1e-4)
    twin.weigh(ratios)
    rows = twin.rows([step.update] * 4)  # the loss has per-token ratios and clipping: the real step is the reference
    reuse = sum(row[3] for row in rows) / sum(ratios)
    assert answer["delta_h/reuse_sequence"].value == pytest.approx(reuse, rel=1e-3)
    assert math.isfinite(answer["delta_h/forward"].value)
    assert math.isfinite(answer["delta_h/backward"].value)


def test_off_policy_steps_with_a_small_effective_sample_size_are_nan_with_the_reason(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], max_steps=2, steps_per_generation=8, learning_rate=3e-2).train()
    assert all(math.isnan(e.value) and "effective sample size" in e.reason for e in probe.all[1].values())


@pytest.mark.parametrize(("known", "measured"), [(16, True), (15, False)])
def test_importance_weights_are_used_down_to_an_effective_sample_size_of_half_the_batch(
    make_trainer, known, measured
) -> None:
    class Reweighted(Answers):
        def on_pre_optimizer_step(self, ctx: Any) -> None:
            sampling_logps = ctx.scores.logps.double().clone()
            sampling_logps[known:, 0] += 80.0  # of 32 sequences, so many keep a weight
            rollout = dataclasses.replace(ctx.rollout, sampling_logps=sampling_logps, on_policy=False)
            super().on_pre_optimizer_step(dataclasses.replace(ctx, rollout=rollout))

    probe = Reweighted()
    make_trainer(probes=[probe], max_steps=1).train()
    assert math.isfinite(probe.all[0]["delta_h/reuse"].value) == measured
    assert ("0.47 of the sequences, below 0.5" in probe.all[0]["delta_h/reuse"].reason) != measured


def nan_in_padding(scores: Any) -> Any:
    nan = torch.zeros_like(scores.logps).masked_fill(scores.mask == 0, math.nan)
    return dataclasses.replace(scores, logps=scores.logps + nan, entropies=scores.entropies + nan)


class NanInPadding:
    """A policy whose scores are nan in padded positions."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def score(self, rollout: Any, rows: Tensor) -> Any:
        return nan_in_padding(self._policy.score(rollout, rows))

    def score_rollout(self, rollout: Any) -> Any:
        return nan_in_padding(self._policy.score_rollout(rollout))


def test_what_stands_in_padded_positions_does_not_matter(make_trainer) -> None:
    """Two of each probe in one training, one of them shown nan there: all that they say is the same."""

    def shown(ctx: Any) -> Any:
        return dataclasses.replace(ctx, scores=nan_in_padding(ctx.scores), policy=NanInPadding(ctx.policy))

    said: dict[str, list[Any]] = {}

    def pair(probe_class: Any, **options: Any) -> list[Probe]:
        class Keeping(probe_class):
            def measure(self, ctx: Any) -> dict[str, Estimate]:
                said.setdefault(self.name, []).append(answers := super().measure(ctx))
                return answers

        class Shown(Keeping):
            name = f"{probe_class.name}_shown"

            def on_pre_optimizer_step(self, ctx: Any) -> None:
                super().on_pre_optimizer_step(shown(ctx))

            def on_optimizer_step(self, ctx: Any) -> None:
                super().on_optimizer_step(shown(ctx))

            def measure(self, ctx: Any) -> dict[str, Estimate]:
                return super().measure(shown(ctx))

        return [Keeping(**options), Shown(**options)]

    every_option = {"own_prompts": True, "per_sequence": True, "top_responses": 2, "validate_every": 1}
    probes = [
        *pair(SimpleEntropyProbe, **every_option, validate_sequences=12),
        *pair(GradientNoiseScaleProbe, split_prompts=1),
        *pair(EffectiveSampleSizeProbe),
    ]
    make_trainer(probes=probes, steps_per_generation=8).train()  # the second step is off-policy
    assert said["simple"][0]["delta_h/true"].value != 0
    for name in ("simple", "gns", "ess"):
        assert repr(said[name]) == repr(said[f"{name}_shown"])


def test_one_microbatch_has_no_forward_and_says_how_to_get_one(make_trainer) -> None:
    probe = Answers()
    make_trainer(probes=[probe], per_device_train_batch_size=32, gradient_accumulation_steps=1).train()
    assert "smaller microbatches" in probe.all[0]["delta_h/forward"].reason
    assert math.isfinite(probe.all[0]["delta_h/reuse"].value)


def test_fewer_than_eight_folds_give_a_value_without_error_bar_and_cost_as_many_bytes(make_trainer) -> None:
    probe = Answers(num_folds=2)
    trainer = make_trainer(probes=[probe])
    trainer.train()
    forward = probe.all[0]["delta_h/forward"]
    assert math.isfinite(forward.value)
    assert math.isnan(forward.stderr)
    assert "needs 8 folds" in forward.reason
    parameters = sum(p.numel() for p in trainer.model.parameters())
    (peak, *_) = [
        line["probe_cost/peak_bytes"] for line in trainer.state.log_history if "probe_cost/peak_bytes" in line
    ]
    assert peak == 4 * parameters * (2 * 2 + 2)  # 2 folds


def test_measuring_every_second_step_leaves_out_what_needs_neighbours(make_trainer) -> None:
    probe = Answers(every=2)
    make_trainer(probes=[probe], max_steps=3).train()
    assert len(probe.all) == 2
    assert math.isfinite(probe.all[1]["delta_h/forward"].value)
    for name in ("backward", "trapezoid", "cumulative_predicted"):
        assert math.isnan(probe.all[1][f"delta_h/{name}"].value)
    assert "step 2 was not measured" in probe.all[1]["delta_h/backward"].reason


def test_all_zero_advantages_leave_momentum_and_decay_only(make_trainer) -> None:
    probe = Answers()
    trainer = make_trainer(
        probes=[probe], reward=lambda completions, **kwargs: [1.0] * len(completions), weight_decay=0.0
    )
    trainer.train()
    assert all(answer["delta_h/forward"].value == 0.0 for answer in probe.all)
    assert all(answer["delta_h/reuse"].value == 0.0 for answer in probe.all)


def test_an_estimate_does_not_depend_on_the_padding_of_the_batch(make_trainer) -> None:
    answers = []
    for multiple in (None, 16):
        probe = Answers()
        make_trainer(probes=[probe], pad_to_multiple_of=multiple, max_steps=1, **SMOOTH).train()
        answers.append(probe.all[0]["delta_h/forward"].value)
    assert answers[0] == pytest.approx(answers[1], rel=1e-4)


@pytest.mark.parametrize(("options", "message"), [({"estimator": "naive"}, "'rb' or 'score'"),
                                                  ({"responses_per_prompt": 0}, "at least 1"),
                                                  ({"draw": "last"}, "'norm' or 'first'"),
                                                  ({"prompt_share": 0.0}, "must lie in"),
                                                  ({"error_decay": 1.0}, "must lie in"),
                                                  ({"every": 0}, "at least 1")])  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        SimpleEntropyProbe(**options)
