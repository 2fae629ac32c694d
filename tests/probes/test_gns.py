"""The gradient noise scale for random gradients with known mean and covariance, through the real hooks and probe."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest
import reference
import torch
from example_steps import ALONE, step_of
from torch import Tensor, nn

from rl_training import Estimate
from rl_training.engine.context import StepContext
from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.optim.adamw import WARM_STEPS, AdamWState
from rl_training.optim.updates import sqrt_preconditioner
from rl_training.parallel.sharding import Shard
from rl_training.parallel.state_tensors import from_tensors, to_tensors
from rl_training.policy.rollout import Rollout
from rl_training.policy.scores import Scores
from rl_training.probes import GradientNoiseScaleProbe
from rl_training.probes.gns import BOUNDS, NoiseHistory
from rl_training.statistics.noise_scale import (
    LOST,
    NO_UPPER_END,
    Averages,
    average,
    noise_moments,
    noise_scale_interval,
    signal_to_noise_interval,
    split_trace,
)
from rl_training.step.data import Gradients
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup, ranges_of

G = 2  # responses per prompt; here only a factor
SHAPES = {"attn": (2, 3), "mlp": (5,), "norm": (3,)}
KIND_OF = {"attention": slice(0, 6), "mlp": slice(6, 11), "norm": slice(11, 14)}
DIM = 14
NUM_STEPS = 100
RAW = ("gns/trace_step", "gns/grad_sq_norm_step")
EVEN = 0.9999  # decay of an average that weights hundreds of steps almost equally


class LinearLoss(nn.Module):
    """A model whose loss is the mean inner product of its parameters with some vectors: its gradient is their mean."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the mean over the prompts of a block. `vectors` has shape (b, DIM)."""
        return (vectors @ torch.cat([p.flatten() for p in self.parameters()])).mean()


class Truth:
    """Prompts' gradients: Gaussian with mean G and covariance L Lᵀ. Noise equals signal at about 24 prompts."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.mean = torch.randn(DIM, generator=generator, dtype=torch.float64).sign() * 0.8 / math.sqrt(DIM)
        self.factor = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64).tril() / math.sqrt(DIM / 2)

    def draw(self, *shape: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)
        return self.mean + noise @ self.factor.T

    def moments(self, metric: Tensor | float = 1.0, columns: slice = slice(None)) -> tuple[float, float]:
        """Return (tr Σ, |G|²) of some columns, in a diagonal metric."""
        variance = (self.factor.square().sum(dim=1) * metric)[columns]
        return float(variance.sum()), float((self.mean.square() * metric)[columns].sum())


class NotToBeAsked:
    """A policy that must not be used, because a probe of norms needs none."""

    def __getattr__(self, name: str) -> None:
        pytest.fail(f"the noise scale asked the policy for {name} without split_prompts")


class Loop:
    """A training loop around the probe: loss divided by K, backwards with hooks, the step, the probe's estimates."""

    def __init__(
        self,
        probe: GradientNoiseScaleProbe,
        states: dict[str, AdamWState] | None = None,
        state: NoiseHistory | None = None,
    ) -> None:
        self.probe = probe
        self.state = state or probe.init()
        self.model = LinearLoss()
        self.shard = Shard(self.model, torch.optim.SGD(self.model.parameters()), None)
        self.layout = self.shard.layout
        self.reduction = FoldReduction(self.shard)
        self.recorder = FoldRecorder(self.reduction)
        self.states = {
            name: dataclasses.replace(state, exp_avg=state.exp_avg.flatten(), exp_avg_sq=state.exp_avg_sq.flatten())
            for name, state in (states or {}).items()
        }
        self.steps = 0

    def step(self, vectors: Sequence[Tensor] | Tensor) -> dict[str, Estimate]:
        """Take a step on K blocks (b, DIM), each a microbatch of b prompts and a fold, and return the estimates."""
        sizes = [len(block) for block in vectors]
        self.steps += 1
        rows = ranges_of([number * G for number in sizes])
        folds = [FoldGroup(range(k, k + 1), (0,), (part,)) for k, part in enumerate(rows)]
        sqrt_metric = sqrt_preconditioner(self.layout, self.shard.weights(), self.states)
        self.recorder.start_step(folds, stores_vectors=False, sqrt_metric=sqrt_metric)
        for k, block in enumerate(vectors):
            loss = self.model(block) * len(block) / sum(sizes)
            self.recorder.arm(rows[k].start)
            loss.backward()
            self.recorder.reduction.finish()
        reading = self.probe.measure(self.view(rows, folds), self.state)
        self.state = reading.state
        self.model.zero_grad()
        return reading.estimates

    def view(self, rows: Sequence[range], folds: Sequence[FoldGroup]) -> StepContext:
        size = rows[-1].stop
        ones, zeros = torch.ones(size, 1, dtype=torch.long), torch.zeros(size, 1, dtype=torch.float64)
        ctx = step_of(
            self.steps,
            Rollout(ones, ones, ones, ones, zeros[:, 0], None, torch.arange(size) // G, None, on_policy=True),
            Scores(zeros, zeros, ones),
            zeros,
            len(rows),
            self.shard.trained,
            {name: p.grad for name, p in self.shard.trained.items()},
            NotToBeAsked(),
            states=self.states,
        )
        fold_sizes = torch.tensor([len(part) for part in rows], dtype=torch.float64)
        self.recorder.complete(fold_sizes, self.shard.gradients(), ALONE)
        gradients = Gradients(
            self.shard.gradients(),
            self.layout,
            by_fold=None,
            sq_norms=self.recorder.sq_norms,
        )
        batch = dataclasses.replace(ctx.step.batch, microbatch_rows=rows, fold_groups=folds, fold_sizes=fold_sizes)
        return dataclasses.replace(ctx, step=dataclasses.replace(ctx.step, batch=batch, gradients=gradients))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def adamw_states(*, step: int = WARM_STEPS, dead: int = 1) -> dict[str, AdamWState]:
    """Return states whose second moments span a factor of 10⁸; the first `dead` of each parameter are 0.

    The variances of `Truth` span the same range, so its noise scale differs in Adam's metric.
    """
    states = {}
    of_all = 10.0 ** torch.linspace(-8, 0, DIM, dtype=torch.float64)
    parts = of_all.split([math.prod(shape) for shape in SHAPES.values()])
    for (name, shape), part in zip(SHAPES.items(), parts, strict=True):
        exp_avg_sq = part.clone().view(shape)
        exp_avg_sq.view(-1)[:dead] = 0
        states[name] = AdamWState(torch.zeros(shape), exp_avg_sq, step, 1e-3, (0.9, 0.99), 1e-8, 0.0)
    return states


def preconditioner(states: dict[str, AdamWState]) -> Tensor:
    """Return P, (DIM,), by definition, entry by entry; 0 where v is 0."""
    return torch.tensor(
        [
            1 / (math.sqrt(v / (1 - s.betas[1] ** s.step)) + s.eps) if v > 0 else 0.0
            for s in states.values()
            for v in s.exp_avg_sq.flatten().tolist()
        ],
        dtype=torch.float64,
    )


def assert_unbiased(values: list[float], truth: float) -> None:
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert abs(statistics.mean(values) - truth) < 3 * error
    assert error < 0.25 * truth  # otherwise the test would prove nothing


def assert_near(estimate: Estimate, truth: float) -> None:
    assert abs(estimate.value - truth) < 3 * estimate.stderr
    assert estimate.stderr < 0.3 * truth


# --- known truth ------------------------------------------------------------------------------------------------------


def test_blocks_of_unequal_sizes_leave_both_moments_unbiased() -> None:
    """Averaged over all signs of four gradients ±1, their variance is 1 and their mean 0, for any split."""
    loop, answers = Loop(GradientNoiseScaleProbe()), []
    for signs in itertools.product((-1.0, 1.0), repeat=4):
        vectors = torch.zeros(4, DIM, dtype=torch.float64)
        vectors[:, 0] = torch.tensor(signs)
        answers.append(loop.step([vectors[:1], vectors[1:]]))
    for name, truth in zip(RAW, (1.0, 0.0), strict=True):
        assert statistics.mean(answer[name].value for answer in answers) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize(("accumulation", "block"), [(2, 32), (16, 1)])
def test_every_moment_is_unbiased_for_any_split_into_blocks(accumulation: int, block: int) -> None:
    truth, generator, states = Truth(), seeded(100 * accumulation + block), adamw_states()
    loop = Loop(GradientNoiseScaleProbe(decay=EVEN), states=states)
    answers = [loop.step(truth.draw(accumulation, block, generator=generator)) for _ in range(NUM_STEPS)]
    trace, grad_sq_norm = truth.moments()
    for name, value in zip(RAW, (trace, grad_sq_norm), strict=True):
        assert_unbiased([answer[name].value for answer in answers], value)
    last = answers[-1]
    assert_near(last["gns/noise_scale_prompts"], trace / grad_sq_norm)
    assert last["gns/noise_scale_sequences"].value == pytest.approx(G * last["gns/noise_scale_prompts"].value)
    for kind, columns in KIND_OF.items():
        part = truth.moments(columns=columns)
        assert_near(last[f"gns/kind/{kind}"], part[0] / part[1])
    assert not any(name.endswith(("embedding", "other")) for name in last)  # this model has none
    weighted = truth.moments(preconditioner(states))
    assert_near(last["gns/adam_noise_scale_prompts"], weighted[0] / weighted[1])
    assert weighted[0] / weighted[1] < 0.6 * trace / grad_sq_norm  # so it is not the plain noise scale


def test_intervals_cover_the_truth_at_their_nominal_rate() -> None:
    """400 runs of 40 steps. All steps except the last are drawn at once and given to the probe as its state."""
    truth, generator = Truth(), seeded(2)
    trace, grad_sq_norm = truth.moments()
    expected = {
        "gns/trace": trace,
        "gns/grad_sq_norm": grad_sq_norm,
        "gns/signal_to_noise": grad_sq_norm / trace,
        "gns/noise_scale_prompts": trace / grad_sq_norm,
        "gns/batch_ratio": 32 * grad_sq_norm / trace,
    }
    between = dict.fromkeys(("gns/noise_scale_prompts", "gns/batch_ratio"), 0)
    hits = dict.fromkeys(expected, 0)
    for _ in range(400):
        blocks = truth.draw(39, 4, 8, generator=generator).mean(dim=2)
        squares = blocks.square().sum(dim=2).mean(dim=1), blocks.mean(dim=1).square().sum(dim=1)
        history = torch.full((39, 8, 2), torch.nan, dtype=torch.float64)
        history[:, 0] = noise_moments(*squares, block_size=8, batch_size=32)
        state = NoiseHistory(history, torch.arange(-38, 1))
        last = Loop(GradientNoiseScaleProbe(), state=state).step(truth.draw(4, 8, generator=generator))
        for name, value in expected.items():
            assert last[name].num_samples == 18  # 40 steps with unequal weights w, so the variance has weights w²
            hits[name] += abs(last[name].value - value) < last[name].half_width()
        for name in between:
            between[name] += last[f"{name}_low"].value < expected[name] < last[f"{name}_high"].value
    assert all(0.92 < count / 400 < 0.98 for count in (*hits.values(), *between.values())), (hits, between)


def test_intervals_cover_an_infinite_noise_scale_at_their_nominal_rate() -> None:
    """Without signal, |G|² = 0, half of the runs still have a finite value, and nearly all an unbounded interval."""
    truth, generator = Truth(), seeded(13)
    finite = unbounded = 0
    ages = torch.arange(40).flip(0)
    for _ in range(400):
        blocks = (truth.draw(40, 4, 8, generator=generator) - truth.mean).mean(dim=2)
        squares = blocks.square().sum(dim=2).mean(dim=1), blocks.mean(dim=1).square().sum(dim=1)
        averages = average(noise_moments(*squares, block_size=8, batch_size=32), 0.95, ages)
        finite += averages.signal_to_noise > 0
        unbounded += math.isinf(noise_scale_interval(signal_to_noise_interval(averages))[1])
    assert 0.4 < finite / 400 < 0.6
    assert unbounded / 400 > 0.96  # all except the 2.5 % whose interval of the signal lies above 0


@pytest.mark.parametrize("signal", [3.0, 0.2, -0.5])
def test_the_fieller_interval_holds_every_ratio_that_the_errors_do_not_exclude(signal: float) -> None:
    """Compared with trying many ratios, for two averages with correlated errors."""
    covariance = torch.tensor([[0.04, 0.05], [0.05, 0.25]], dtype=torch.float64)
    averages = Averages(torch.tensor([2.0, signal], dtype=torch.float64), covariance, math.nan, 40.0, degrees=5.0)
    quantile = 2.570581835636314  # of Student's t with 5 degrees of freedom
    tried = torch.linspace(-4, 4, 800_001, dtype=torch.float64)
    error = (covariance[1, 1] - 2 * tried * covariance[0, 1] + tried.square() * covariance[0, 0]).sqrt()
    inside = tried[(signal - 2 * tried).abs() <= quantile * error]
    low, high = signal_to_noise_interval(averages)
    assert (low, high) == (pytest.approx(float(inside[0]), abs=2e-5), pytest.approx(float(inside[-1]), abs=2e-5))
    assert low < signal / 2 < high


def test_the_noise_scale_interval_is_the_reciprocal_of_the_positive_signal_interval() -> None:
    assert noise_scale_interval((0.01, 0.05)) == (20.0, 100.0)
    assert noise_scale_interval((-0.01, 0.05)) == (20.0, math.inf)
    assert noise_scale_interval((-0.05, -0.01)) == (math.inf, math.inf)


def test_without_a_known_trace_the_interval_is_unbounded() -> None:
    averages = Averages(torch.tensor([1.0, 1.0]), torch.eye(2), math.nan, 40.0, degrees=5.0)
    assert signal_to_noise_interval(averages) == (-math.inf, math.inf)


# --- Adam's metric ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [WARM_STEPS, 10 * WARM_STEPS])
@pytest.mark.parametrize("dead", [0, 2])
def test_the_adam_noise_scale_of_one_step_uses_preconditioned_square_norms(steps: int, dead: int) -> None:
    states = adamw_states(step=steps, dead=dead)
    vectors = Truth().draw(4, 16, generator=seeded(4)) + 1.0  # so that |G|²^ is certainly positive
    answers = Loop(GradientNoiseScaleProbe(), states=states).step(vectors)
    root = preconditioner(states).sqrt()
    block = sum(float((root * g).square().sum()) for g in vectors.mean(dim=1)) / 4
    batch = float((root * vectors.mean(dim=(0, 1))).square().sum())
    expected = (block - batch) / (1 / 16 - 1 / 64) / ((64 * batch - 16 * block) / (64 - 16))
    assert answers["gns/adam_noise_scale_prompts"].value == pytest.approx(expected, rel=1e-10)


def test_adams_metric_is_nan_before_warm_up_and_averages_only_later_steps() -> None:
    truth, generator, probe = Truth(), seeded(5), GradientNoiseScaleProbe()
    cold, warm = adamw_states(step=WARM_STEPS - 1), adamw_states()
    vectors = [truth.draw(4, 16, generator=generator) + 1.0 for _ in range(2)]
    first = Loop(probe, states=cold).step(vectors[0])
    assert math.isnan(first["gns/adam_noise_scale_prompts"].value)
    assert first["gns/adam_noise_scale_prompts"].code == "not_warm"
    second = Loop(probe, states=warm).step(vectors[1])["gns/adam_noise_scale_prompts"]
    alone = Loop(GradientNoiseScaleProbe(), states=warm).step(vectors[1])["gns/adam_noise_scale_prompts"]
    assert (second.value, second.num_samples) == (alone.value, 1)


def test_without_adam_the_adam_metric_is_nan() -> None:
    answers = Loop(GradientNoiseScaleProbe()).step(Truth().draw(4, 16, generator=seeded(5)) + 1.0)
    assert math.isnan(answers["gns/adam_noise_scale_prompts"].value)
    assert math.isfinite(answers["gns/noise_scale_prompts"].value)


# --- the averages -----------------------------------------------------------------------------------------------------


def test_the_report_is_the_weighted_mean_over_steps_with_its_jackknife_error() -> None:
    truth, generator, decay = Truth(), seeded(6), 0.8
    loop = Loop(GradientNoiseScaleProbe(decay=decay))
    answers = [loop.step(truth.draw(4, 8, generator=generator)) for _ in range(30)]
    weights = [decay**age for age in reversed(range(30))]
    terms = [[w * a[RAW[0]].value, w * a[RAW[1]].value, w] for w, a in zip(weights, answers, strict=True)]
    statistic = {
        "gns/trace": lambda s: s[0] / s[2],
        "gns/grad_sq_norm": lambda s: s[1] / s[2],
        "gns/signal_to_noise": lambda s: s[1] / s[0],
        "gns/batch_ratio": lambda s: 32 * s[1] / s[0],
    }
    for name, of in statistic.items():
        estimate = answers[-1][name]
        assert estimate.value == pytest.approx(of([sum(column) for column in zip(*terms, strict=True)]), rel=1e-10)
        assert estimate.stderr == pytest.approx(reference.jackknife_stderr(of, terms), rel=1e-9)
        assert estimate.num_samples == int(sum(w**2 for w in weights) ** 2 / sum(w**4 for w in weights))
    ratio = answers[-1]["gns/batch_ratio"]
    for name, unit in (("prompts", 1), ("sequences", G)):
        scale, low, high = (answers[-1][f"gns/noise_scale_{name}{end}"].value for end in BOUNDS)
        assert scale == pytest.approx(unit * 32 / ratio.value, rel=1e-12)
        assert low == pytest.approx(unit * 32 / answers[-1]["gns/batch_ratio_high"].value, rel=1e-12)
        assert high == pytest.approx(unit * 32 / answers[-1]["gns/batch_ratio_low"].value, rel=1e-12)
        relative = answers[-1][f"gns/noise_scale_{name}"].stderr / scale
        assert relative == pytest.approx(ratio.stderr / ratio.value, rel=1e-12)


def test_ages_count_optimizer_steps_measured_or_not() -> None:
    truth, generator, decay = Truth(), seeded(11), 0.8
    loop, raw = Loop(GradientNoiseScaleProbe(decay=decay)), []
    numbers = [1, 2, 6, 7, 20, 23]
    for number in numbers:
        loop.steps = number - 1
        raw.append(loop.step(truth.draw(4, 8, generator=generator)))
    weights = [decay ** (numbers[-1] - number) for number in numbers]
    for averaged, name in zip(("gns/trace", "gns/grad_sq_norm"), RAW, strict=True):
        mean = sum(w * a[name].value for w, a in zip(weights, raw, strict=True)) / sum(weights)
        assert raw[-1][averaged].value == pytest.approx(mean, rel=1e-10)


def test_the_state_stays_small_and_a_resumed_probe_gives_the_same_estimates() -> None:
    truth, generator, decay = Truth(), seeded(7), 0.8
    loop = Loop(GradientNoiseScaleProbe(decay=decay), states=adamw_states())
    for _ in range(60):
        loop.step(truth.draw(2, 4, generator=generator))
    saved = to_tensors(loop.state)
    assert sum(tensor.numel() for tensor in saved.values()) == 42 * (8 * 2 + 1)  # .8^42 < 1e-4
    vectors = truth.draw(2, 4, generator=generator)
    resumed = GradientNoiseScaleProbe(decay=decay)
    going_on = Loop(resumed, adamw_states(), from_tensors(resumed.init(), saved))
    going_on.steps = loop.steps
    assert repr(going_on.step(vectors)) == repr(loop.step(vectors))


def test_few_steps_give_values_without_error_bars() -> None:
    truth, generator, loop = Truth(), seeded(8), Loop(GradientNoiseScaleProbe())
    answers = [loop.step(truth.draw(4, 16, generator=generator) + 1.0) for _ in range(9)]
    early, late = answers[6]["gns/noise_scale_prompts"], answers[8]["gns/noise_scale_prompts"]
    assert math.isnan(early.stderr)
    assert early.code == "few_steps"
    assert late.stderr > 0
    assert not late.reason


# --- nan with a reason ------------------------------------------------------------------------------------------------


def test_one_block_gives_no_estimate_but_a_reason() -> None:
    answers = Loop(GradientNoiseScaleProbe()).step(Truth().draw(1, 16, generator=seeded(9)))
    assert all(math.isnan(e.value) and e.code == "one_fold" for e in answers.values())


def test_a_gradient_lost_in_its_noise_has_no_noise_scale() -> None:
    """Two blocks with opposite gradients: |G|²^ = −|g_b|² < 0, and reported like that."""
    vectors = torch.ones(2, 4, DIM, dtype=torch.float64)
    vectors[1] *= -1
    answers = Loop(GradientNoiseScaleProbe()).step(vectors)
    assert answers["gns/grad_sq_norm"].value == pytest.approx(-DIM)
    for name in ("gns/noise_scale_prompts", "gns/noise_scale_sequences"):
        assert math.isnan(answers[name].value)
        assert answers[name].code == "lost_in_noise"
    assert answers["gns/batch_ratio"].value < 0  # not clamped, and with a reason
    for name in ("gns/batch_ratio", "gns/signal_to_noise"):
        assert LOST in answers[name].reason
    # tr Σ = 4 · 2 DIM from two blocks of 4 with entries ±1; 8 prompts in the batch
    assert answers["gns/signal_to_noise"].value == pytest.approx(-1 / 8)
    assert answers["gns/batch_ratio"].value == pytest.approx(-1.0)


def test_an_unbounded_scale_has_a_value_and_a_lower_end_but_no_error_bar() -> None:
    truth, generator, loop = Truth(), seeded(14), Loop(GradientNoiseScaleProbe())
    unbounded = []
    for _ in range(60):
        answers = loop.step((truth.draw(2, 2, generator=generator) - truth.mean).contiguous())
        if math.isinf(answers["gns/noise_scale_prompts_high"].value):
            unbounded.append((answers["gns/noise_scale_prompts"], answers["gns/noise_scale_prompts_low"].value))
            assert answers["gns/batch_ratio_low"].value <= 0
    assert len(unbounded) > 20
    assert all(math.isnan(scale.stderr) and low > 0 for scale, low in unbounded)
    assert any(scale.reason == NO_UPPER_END and low < scale.value for scale, low in unbounded)


def test_a_step_without_any_gradient_has_zero_moments_and_no_noise_scale() -> None:
    answers = Loop(GradientNoiseScaleProbe()).step(torch.zeros(2, 4, DIM, dtype=torch.float64))
    assert [answers[name].value for name in RAW] == [0.0, 0.0]
    assert math.isnan(answers["gns/noise_scale_prompts"].value)


def test_a_non_finite_step_is_nan_and_leaves_the_average_unchanged() -> None:
    truth, generator, loop = Truth(), seeded(10), Loop(GradientNoiseScaleProbe())
    before = loop.step(truth.draw(4, 16, generator=generator) + 1.0)
    broken = loop.step(torch.full((4, 16, DIM), math.inf, dtype=torch.float64))
    assert all(math.isnan(broken[name].value) and broken[name].code == "not_finite_gradient" for name in RAW)
    assert broken["gns/noise_scale_prompts"].value == pytest.approx(before["gns/noise_scale_prompts"].value, rel=1e-12)


# --- the hooks --------------------------------------------------------------------------------------------------------


def test_a_parameter_not_reached_by_a_microbatch_has_zero_square_norm_there() -> None:
    """For an expert without tokens autograd calls no hook."""
    parameters = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("expert0", "expert1")})
    shard = Shard(parameters, torch.optim.SGD(parameters.values()), None)
    recorder = FoldRecorder(FoldReduction(shard))
    folds = [FoldGroup(range(k, k + 1), (0,), (range(k, k + 1),)) for k in range(2)]
    recorder.start_step(folds, stores_vectors=False, sqrt_metric=shard.layout.zeros())
    for k, p in enumerate(parameters.values()):
        recorder.arm(k)
        (3.0 * p.sum() / 2).backward()
        recorder.reduction.finish()
    recorder.complete(torch.ones(2, dtype=torch.float64), shard.gradients(), ALONE)
    assert recorder.sq_norms[..., 0].flatten().tolist() == pytest.approx([18.0, 0.0, 0.0, 18.0, 4.5, 4.5], rel=1e-6)


# --- the split of the trace -------------------------------------------------------------------------------------------


def prompt_moments(table: reference.Table, rewards: list[float], group: int) -> tuple[float, Tensor, float]:
    """Return E[r_1·r_2], E[g] and E|g|² of a prompt over all groups of responses, with r_i = (R_i − mean R) ∂S_i."""
    scores = torch.zeros(len(reference.RESPONSES), len(reference.PREFIXES), 3, dtype=torch.float64)
    for n, response in enumerate(reference.RESPONSES):
        for row, token in zip(reference.prefix_numbers(response), response, strict=True):
            scores[n, row] -= torch.tensor(reference.log_softmax(table[row]), dtype=torch.float64).exp()
            scores[n, row, token] += 1
    scores = scores.flatten(1)
    p = torch.tensor([reference.sequence_logp(table, r) for r in reference.RESPONSES], dtype=torch.float64).exp()
    groups = torch.cartesian_prod(*[torch.arange(len(p))] * group)  # (outcomes, G)
    chance = p[groups].prod(dim=1)
    assert float(chance.sum()) == pytest.approx(1, abs=1e-12)
    reward = torch.tensor(rewards, dtype=torch.float64)[groups]
    r = (reward - reward.mean(dim=1, keepdim=True)).unsqueeze(2) * scores[groups]
    g = r.mean(dim=1)
    return float(chance @ (r[:, 0] * r[:, 1]).sum(dim=1)), chance @ g, float(chance @ g.square().sum(dim=1))


@pytest.mark.parametrize("group", [2, 3])
def test_the_split_of_the_trace_is_exact_over_all_groups_of_responses(group: int) -> None:
    """Four prompts, each with its own policy and rewards. tr Σ and its parts are computed by definition."""
    rng = random.Random(group)
    prompts = []
    for _ in range(4):
        table = [[rng.gauss(0, 1) for _ in range(3)] for _ in reference.PREFIXES]
        prompts.append(prompt_moments(table, [rng.random() for _ in reference.RESPONSES], group))
    products, means, squares = zip(*prompts, strict=True)
    for product, mean in zip(products, means, strict=True):
        between, _ = split_trace(torch.tensor(product, dtype=torch.float64), torch.zeros(2).double(), group)
        assert float(between) == pytest.approx(float(mean.square().sum()), rel=1e-9)  # |E[g | prompt]|²
    grad_sq_norm = float((sum(means) / 4).square().sum())
    mean_sq_norm = sum(float(mean.square().sum()) for mean in means) / 4
    moments = torch.tensor([sum(squares) / 4 - grad_sq_norm, grad_sq_norm], dtype=torch.float64)
    parts = split_trace(torch.tensor(sum(products) / 4, dtype=torch.float64), moments, group)
    assert parts.tolist() == pytest.approx([mean_sq_norm - grad_sq_norm, sum(squares) / 4 - mean_sq_norm], rel=1e-9)
