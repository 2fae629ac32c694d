"""Interventions at a checkpoint: steps of torch's own AdamW, importance sampling token by token, TRL's own loss."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from hydra import compose, initialize_config_dir
from simple_twin import Recorder
from test_interventions_probe import InterventionsTwin
from test_offline import SMALL, checkpoint, close, restored, restored_at, run  # noqa: F401
from torch import Tensor

from rl_training.interventions.loss import LossInputs, Remedied
from rl_training.interventions.named import intervention
from rl_training.job.analysis import analyse_checkpoints, read_plan
from rl_training.job.build import build_restored
from rl_training.job.explain import CONF
from rl_training.job.run_settings import gather_run_settings, run_settings
from rl_training.mathematics.jackknife import Replicates
from rl_training.offline.buffers import sample_update
from rl_training.offline.intervention_effects import (
    NOTHING,
    OnEvaluation,
    branches,
    changed_steps,
    effects,
    inputs_of,
)
from rl_training.offline.interventions import (
    InterventionSettings,
    intervention_tables,
    pair_of,
    rows_of,
    said_in_training,
)
from rl_training.offline.probe import Analysis, analyse
from rl_training.offline.restored import RestoredTrainer
from rl_training.offline.results import read_result
from rl_training.offline.settings import Memory, UpdateConfig
from rl_training.offline.truth import by_name
from rl_training.offline.update import batch_of, make_update, step_of
from rl_training.records.report.plane import effects_of, in_words, plane
from rl_training.records.report.summary import plus_minus

NAMES = ["bonus:0.5", "psr", "nsr", "w_reinforce:0.5", "lr:0.5", "max_grad_norm:0.05", "clip_cov:0.1"]
NOTHINGS = ["kl_cov", "clip_higher", "keep_truncated"]


@pytest.fixture(scope="module")
def analysed(restored: RestoredTrainer) -> Analysis:  # noqa: F811
    return analyse(restored, SMALL)


@pytest.fixture(scope="module")
def twin(restored: RestoredTrainer, analysed: Analysis) -> InterventionsTwin:  # noqa: F811
    recorder = Recorder()
    recorder.prepare(step_of(restored, batch_of(restored, analysed.update_buffer)))
    return InterventionsTwin(recorder.steps[0], responses=1)


@pytest.fixture(scope="module")
def on(restored: RestoredTrainer, analysed: Analysis) -> OnEvaluation:  # noqa: F811
    return OnEvaluation(restored, analysed.evaluation)


@pytest.fixture(scope="module")
def found(restored: RestoredTrainer, analysed: Analysis, on: OnEvaluation) -> dict[str, Any]:  # noqa: F811
    batch = batch_of(restored, analysed.update_buffer)
    return dict(effects(on, restored, analysed.update, batch, [intervention(name) for name in [*NAMES, *NOTHINGS]]))


class PlainSampling:
    """H per token and reward of E after a step, by importance sampling from the definitions: float64, loops."""

    def __init__(self, twin: InterventionsTwin, on: OnEvaluation) -> None:
        self.twin, self.rollout, self.rewards = twin, on.evaluation.rollout, on.rewards.tolist()
        self.before = self.scores(torch.zeros_like(twin.step.parameters))

    def scores(self, delta: Tensor) -> list[tuple[list[float], list[float]]]:
        torch.nn.utils.vector_to_parameters(self.twin.step.parameters + delta, self.twin.params.values())
        with torch.no_grad():
            scored = [self.twin.score(self.rollout, i, 1.0) for i in range(self.rollout.num_sequences)]
        torch.nn.utils.vector_to_parameters(self.twin.step.parameters, self.twin.params.values())
        return [(logps.tolist(), entropies.tolist()) for logps, entropies in scored]

    def value(self, after: list[tuple[list[float], list[float]]], rows: list[int]) -> tuple[float, float]:
        """Returns H per token and the mean reward after a step, from these rows of E."""
        entropy = length = 0.0
        for k in range(max(len(after[i][0]) for i in rows)):
            weights = {
                i: math.exp(sum(a - b for a, b in zip(after[i][0][:k], self.before[i][0][:k], strict=True)))
                for i in rows
            }
            alive = [i for i in rows if len(after[i][0]) > k]
            entropy += sum(weights[i] * after[i][1][k] for i in alive) / sum(weights.values())
            length += sum(weights[i] for i in alive) / sum(weights.values())
        whole = {i: math.exp(sum(after[i][0]) - sum(self.before[i][0])) for i in rows}
        return entropy / length, sum(whole[i] * self.rewards[i] for i in rows) / sum(whole.values())

    def difference(self, plain: Tensor, changed: Tensor, by_prompt: bool = False) -> list[tuple[float, float]]:
        """Returns (ΔH, Δreward) of the second step less those of the first; and without each prompt of E."""
        one, other = self.scores(plain), self.scores(changed)
        everything = list(range(len(self.before)))
        some = [everything, *([[i for i in everything if i != out] for out in everything] if by_prompt else [])]
        return [
            tuple(b - a for a, b in zip(self.value(one, rows), self.value(other, rows), strict=True)) for rows in some
        ]

    def first_order(self, along: Tensor) -> list[tuple[float, float]]:
        """Returns X·along and the derivative of the mean reward, of all of E and without each prompt.

        X from the definition of its weights, each prompt's baseline from all others; slopes by differences.
        """
        one, other = self.scores(-1e-2 * along), self.scores(1e-2 * along)
        slopes = [
            [[(b - a) / 2e-2 for a, b in zip(*pair, strict=True)] for pair in zip(x, y, strict=True)]
            for x, y in zip(one, other, strict=True)
        ]
        everything = list(range(len(self.before)))
        return [
            self.slope(slopes, rows) for rows in (everything, *([i for i in everything if i != o] for o in everything))
        ]

    def slope(self, slopes: list[list[list[float]]], rows: list[int]) -> tuple[float, float]:
        entropies = [self.before[i][1] for i in rows]
        change = {}
        for target in ("sequence", "length"):
            weights = reference.surrogate_weights(entropies, [0] * len(rows), target)
            change[target] = sum(
                w * slope
                for which, of_score in enumerate(weights)
                for of_row, i in zip(of_score, rows, strict=True)
                for w, slope in zip(of_row, slopes[i][which], strict=True)
            )
        length = sum(map(len, entropies))
        entropy = (change["sequence"] - sum(map(sum, entropies)) / length * change["length"]) / length
        rewards, of_rows = [self.rewards[i] for i in rows], [sum(slopes[i][0]) for i in rows]
        mean = sum(rewards) / len(rows)
        return entropy, sum((r - mean) * s for r, s in zip(rewards, of_rows, strict=True)) / len(rows)


@pytest.fixture(scope="module")
def sampling(twin: InterventionsTwin, on: OnEvaluation) -> PlainSampling:
    return PlainSampling(twin, on)


def step_of_twin(twin: InterventionsTwin, name: str) -> Tensor:
    return twin.steps_with(name, twin.gradients_with(name))[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_changed_step_is_the_one_that_torch_makes_of_the_changed_loss(
    restored: RestoredTrainer,  # noqa: F811
    analysed: Analysis,
    twin: InterventionsTwin,
    name: str,
) -> None:
    batch = batch_of(restored, analysed.update_buffer)
    ((_, delta),) = changed_steps(restored, analysed.update, batch, [intervention(name)])
    assert isinstance(delta, Tensor)
    assert close(delta - analysed.update.delta, step_of_twin(twin, name) - twin.update) < 1e-3


@pytest.mark.parametrize("name", ["psr", "lr:0.5", "bonus:0.5"])
def test_what_is_measured_is_the_difference_of_two_importance_samplings(
    found: dict[str, Any], twin: InterventionsTwin, sampling: PlainSampling, name: str
) -> None:
    """Values, and their errors by leaving out a prompt at a time."""
    expected, *without = sampling.difference(twin.update, step_of_twin(twin, name), by_prompt=True)
    measured = found[name].measured
    count = len(without)
    for number in (0, 1):
        mean = sum(values[number] for values in without) / count
        stderr = math.sqrt((count - 1) / count * sum((values[number] - mean) ** 2 for values in without))
        assert float(measured.stderr[number]) == pytest.approx(stderr, rel=2e-3)
        assert float(measured.value[number]) == pytest.approx(expected[number], rel=2e-3, abs=1e-3 * stderr)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_predicted_is_x_of_e_times_the_difference_of_the_two_steps(
    found: dict[str, Any], twin: InterventionsTwin, sampling: PlainSampling, name: str
) -> None:
    """And the derivative of what importance sampling says of reward; without each prompt of E too."""
    expected = torch.tensor(sampling.first_order(step_of_twin(twin, name) - twin.update)).double()
    predicted = found[name].predicted
    assert close(predicted.value[0], expected[0, 0]) < 5e-3
    assert close(predicted.value[1], expected[0, 1]) < 5e-3
    assert close(predicted.without, expected[1:]) < 5e-3


@pytest.mark.parametrize("name", NOTHINGS)
def test_what_changes_nothing_on_policy_is_exactly_zero(found: dict[str, Any], name: str) -> None:
    effect = found[name]
    assert effect.remark == NOTHING
    for replicates in (effect.predicted, effect.measured):
        assert not replicates.value.any()
        assert not replicates.stderr.any()
        assert not replicates.value.signbit().any()


def test_the_first_row_is_what_the_step_itself_does(found: dict[str, Any], analysed: Analysis) -> None:
    plain = found["plain"]
    assert float(plain.measured.value[0]) == pytest.approx(analysed.results["deltaH_true"], rel=1e-9)
    assert float(plain.measured.stderr[0]) == pytest.approx(analysed.results["deltaH_true_se"], rel=1e-9)
    assert float(plain.predicted.value[0]) == pytest.approx(analysed.results["deltaH1"], rel=1e-2)


def test_beside_it_stands_what_the_probe_says_in_training(
    restored: RestoredTrainer,  # noqa: F811
    analysed: Analysis,
    twin: InterventionsTwin,
) -> None:
    said = said_in_training(restored, batch_of(restored, analysed.update_buffer), NAMES)
    for name in NAMES:
        expected = twin.answers(name)
        for quantity in ("delta_h", "delta_reward"):
            stderr = said[name][f"in_loop_{quantity}_se"]
            assert stderr == pytest.approx(expected[f"{quantity}_se"], rel=1e-3)
            assert said[name][f"in_loop_{quantity}"] == pytest.approx(expected[quantity], rel=1e-3, abs=1e-3 * stderr)


# --- several U, several steps -----------------------------------------------------------------------------------------


def of_prompts(values: list[list[float]]) -> Replicates:
    """The means of two numbers over prompts."""
    x = torch.tensor(values).double()
    return Replicates(x.mean(dim=0), (x.sum(dim=0) - x) / (len(x) - 1))


def test_the_mean_over_several_u_has_the_noise_of_prompts_and_the_scatter_over_u() -> None:
    """E's part from the mean over U of each prompt, (2, 0), (4, 0), (6, 0): sd 2, se² 4/3. U's from 3 and 5: 2/2."""
    one, other = of_prompts([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]]), of_prompts([[3.0, 0.0], [5.0, 0.0], [7.0, 0.0]])
    pair = pair_of([one, other])
    assert pair.values.tolist() == [4.0, 0.0]
    assert float(pair.covariance[0, 0]) == pytest.approx(4 / 3 + 1)
    assert pair.degrees == pytest.approx((4 / 3 + 1) ** 2 / ((4 / 3) ** 2 / 2 + 1))
    assert float(pair_of([one]).covariance[0, 0]) == pytest.approx(4 / 3)
    assert pair_of([one]).degrees == 2


def test_one_step_of_a_branch_is_the_changed_step(
    restored: RestoredTrainer,  # noqa: F811
    analysed: Analysis,
    on: OnEvaluation,
) -> None:
    """The real optimizer's, from the same U; answers are drawn with the same random numbers."""
    answers = []
    for factor in (1.0, 0.5):
        with restored.policy.shifted(by_name(restored, factor * analysed.update.delta)):
            answers.append(on.answers())
    expected = on.difference(*answers)
    ((name, change),) = branches(on, restored, SMALL, [intervention("lr:0.5")], 1, SMALL.update.seed)
    assert name == "lr:0.5"
    assert isinstance(change, Replicates)
    assert change.value.tolist() == pytest.approx(expected.value.tolist(), rel=1e-3)
    assert change.stderr.tolist() == pytest.approx(expected.stderr.tolist(), rel=1e-3)
    assert abs(float(change.value[0])) > 1e-4


def test_two_processes_share_eight_folds_of_u(
    restored: RestoredTrainer,  # noqa: F811
    analysed: Analysis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that what the training probe says there is not of more folds, the more processes there are."""
    assert batch_of(restored, analysed.update_buffer).num_folds == 8
    monkeypatch.setattr(RestoredTrainer, "num_ranks", 2)
    assert batch_of(restored, analysed.update_buffer).num_folds == 4


def test_an_analysis_of_interventions_moves_nothing(restored: RestoredTrainer, analysed: Analysis) -> None:  # noqa: F811
    def state() -> list[Tensor]:
        moments = [v for s in restored.trainer.optimizer.state.values() for v in s.values()]
        rates = torch.tensor([group["lr"] for group in restored.trainer.optimizer.param_groups])
        parameters = [p.detach() for p in restored.trainer.model.parameters()]
        return [t.clone() for t in (*parameters, *moments, rates, torch.random.get_rng_state())]

    before = state()
    asked = InterventionSettings(["psr", "lr:0.7", "kl_cov"], steps=2)
    tables = intervention_tables(restored, analysed, SMALL, [3], asked)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert all(p.grad is None for p in restored.trainer.model.parameters())
    assert [row["name"] for row in tables["interventions"]] == ["plain", "psr", "lr:0.7", "kl_cov"]
    assert [row["updates"] for row in tables["interventions"]] == [2] * 4
    by_update = [row["measured_delta_h"] for row in tables["interventions_by_update"] if row["name"] == "psr"]
    assert tables["interventions"][1]["measured_delta_h"] == pytest.approx(sum(by_update) / 2)
    after = {row["name"]: row for row in tables["branches"]}
    assert (after["kl_cov"]["measured_delta_h"], after["kl_cov"]["measured_delta_h_se"]) == (0.0, 0.0)
    assert after["psr"]["measured_delta_h"] != 0.0


def test_the_run_s_first_model_is_the_reference_of_kl(run: Path) -> None:  # noqa: F811
    """No adapters: the weights that the trainer comes with. At them the distance is 0; after a step it is not."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with_first = build_restored(run_settings(checkpoint(run, 2), []), checkpoint(run, 2), keep_first=True)
    batch = batch_of(with_first, sample_update(with_first, UpdateConfig(4), 64))
    (loss, *_) = inputs_of(with_first, batch, [intervention("kl")])
    assert with_first.first is not None
    assert loss.reference_logps is not None
    there = loss.scores.mask.bool()
    assert (loss.reference_logps - loss.scores.logps)[there].abs().max() > 1e-3
    with with_first.policy.shifted({n: with_first.first[n] - p.detach() for n, p in with_first.parameters.items()}):
        again = with_first.policy.score_rollout(batch.rollout).logps
    assert torch.equal(again[: len(there)][there], loss.reference_logps[there])
    without = restored_at(run, 2)
    assert "there is none" in intervention("kl").why_none(inputs_of(without, batch, [intervention("kl")])[0])


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [[], ["++trainer.entropy_coef=0.3"], ["++trainer.top_entropy_quantile=0.3", "++trainer.entropy_coef=0.2"]],
)
def test_the_gradient_of_u_is_that_of_trl_s_own_loss(run: Path, settings: list[str]) -> None:  # noqa: F811
    restored = restored_at(run, 1, *settings)  # noqa: F811
    trainer = restored.trainer
    trainer.current_gradient_accumulation_steps = 1
    buffer = sample_update(restored, UpdateConfig(8), 64)
    update = make_update(restored, buffer, Memory(8))
    rollout = buffer.rollout
    losses = []
    for rows in torch.arange(32).split(8):
        inputs = {
            name: getattr(rollout, name)[rows]
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        }
        losses.append(trainer._compute_loss(trainer.model, inputs | {"num_items_in_batch": None}))
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(restored.parameters.values()))
    assert close(update.gradient, torch.cat([g.flatten() for g in gradients])) < 1e-5


def test_a_term_of_the_loss_that_is_not_known_at_a_checkpoint_is_refused(run: Path) -> None:  # noqa: F811
    restored = restored_at(run, 1, "++trainer.use_adaptive_entropy=true", "++trainer.entropy_coef=0.1")  # noqa: F811
    with pytest.raises(ValueError, match=r"trainer.use_adaptive_entropy=True adds a term to the loss that is not read"):
        make_update(restored, sample_update(restored, UpdateConfig(4), 64), Memory(8))


# --- what is asked for, and what is shown -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"which": ["bonus", "clipcov"]}, "did you mean clip_cov"),
        ({"which": ["bonus:0"]}, "must lie above 0, and not 0, which has no effect"),
        ({"which": ["lr", "lr"]}, "interventions: lr is named twice"),
        ({"which": "psr"}, "interventions=psr: choose all, none, or a list, interventions=[psr]"),
        ({"which": "all", "steps": -1}, "interventions.steps=-1 must be a whole number, at least 0"),
        ({"steps": 10}, "interventions.steps=10 takes steps with interventions: give interventions=all"),
    ],
)
def test_interventions_that_mean_nothing_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        InterventionSettings(**asked)


def test_the_short_word_of_the_command_line_is_written_out(run: Path) -> None:  # noqa: F811
    typed = [f"checkpoint={checkpoint(run, 1)}", "interventions=[psr,lr:0.5]", "interventions.steps=3"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plan = read_plan(compose("offline", gather_run_settings(typed)))
    assert [of.name for of in plan.interventions.named] == ["psr", "lr:0.5"]
    assert plan.interventions.steps == 3


def test_what_is_not_available_is_said_and_the_others_are_there(
    restored: RestoredTrainer,  # noqa: F811
    analysed: Analysis,
    on: OnEvaluation,
) -> None:
    batch = batch_of(restored, analysed.update_buffer)
    some = dict(effects(on, restored, analysed.update, batch, [intervention("kl"), intervention("lr:0.5")]))
    missing, there, _ = rows_of({name: [some[name]] for name in ("kl", "lr:0.5", "plain")}, update_seed=1)
    assert missing["remark"].startswith("it needs the log-probabilities of a reference model, and there is none")
    assert math.isnan(missing["measured_delta_h"])
    assert there["measured_delta_h"] != 0.0


def row(name: str, delta_h: float, half: float, reward: float = 0.0, remark: str = "") -> dict[str, Any]:
    price = -reward / delta_h if delta_h else math.nan
    both = {
        f"{kind}_{key}": value
        for kind in ("predicted", "measured")
        for key, value in (
            ("delta_h", delta_h), ("delta_h_half", half), ("delta_h_se", half / 2), ("delta_reward", reward),
            ("delta_reward_half", half), ("price", price), ("price_low", price - 1), ("price_high", price + 1),
        )
    }  # fmt: skip
    return {"name": name, "asked": f"my.py:{name}", "updates": 1, "remark": remark, **both}


def test_the_sentences_say_what_keeps_entropy_and_how_certain_the_order_of_prices_is() -> None:
    rows = [
        row("plain", -3e-3, 1e-3),
        row("unpriced", 4e-3, 1e-3) | {f"measured_price{end}": math.nan for end in ("", "_low", "_high")},
        row("dear", 2e-3, 1e-3, reward=-16e-3),
        row("cheap", 1e-3, 5e-4, reward=-2e-3),
        row("middling", 2e-3, 1e-3, reward=-7e-3),
        row("lost", 1e-3, 2e-3),
        row("unsure", 1e-3, math.nan),
        row("spends", -4e-3, 1e-3, reward=1e-3),
        row("zero", 0.0, 0.0),
        row("absent", math.nan, math.nan, remark="no reference"),
    ]
    assert in_words(rows) == [
        "Significantly more entropy than the step as it is (95 %), in order of price: "
        "cheap +1.00 ± 0.50 at a price of 2.0 (1.0 … 3.0); "
        "middling +2.0 ± 1.0 at a price of 3.5 (2.5 … 4.5); dear +2.0 ± 1.0 at a price of 8.0 (7.0 … 9.0); "
        "unpriced +4.0 ± 1.0 (price not measured: no reward in E changed). "
        "Prices whose intervals do not overlap: cheap costs less than dear; middling costs less than dear. "
        "The rest of their order is not certain.",
        "Significantly less entropy: spends -4.0 ± 1.0.",
        "No significant effect on entropy (more U would help: sweep.update_seeds): lost; unsure.",
        "Exactly no effect here: zero.",
        "Not available: absent (no reference).",
    ]
    assert in_words(rows, "RUN/checkpoint-3")[-1] == (
        "To train with the first of them from here: rl-training train branch=RUN/checkpoint-3 run_dir=NEW "
        "intervention=my.py:cheap"
    )
    assert in_words([row("cheap", 1e-3, 5e-4, -2e-3), row("middling", 2e-3, 1e-3, -7e-3)])[0].endswith(
        "at a price of 3.5 (2.5 … 4.5). The intervals of these prices all overlap: their order is not certain."
    )
    assert in_words([row("cheap", 1e-3, 5e-4, -2e-3), row("dear", 2e-3, 1e-3, -16e-3)])[0].endswith("less than dear.")
    assert "certain" not in in_words([row("cheap", 1e-3, 5e-4, -2e-3)])[0]


def test_the_plane_has_a_cross_for_each_that_does_something() -> None:
    rows = [row("plain", -3e-3, 1e-3), row("$one", 2e-3, 1e-3, -1e-3), row("zero", 0.0, 0.0), row("no", math.nan, 0.0)]
    effects = effects_of(rows, "measured")
    assert [of.name for of in effects if of.is_there] == ["$one"]
    drawn = plane("x.png", "title", "caption", effects_of(rows, "predicted"), effects)
    assert drawn.missing == []
    assert len(drawn.png) > 10_000
    assert plane("x.png", "title", "caption", [], effects[1:]).missing == ["no intervention has a known effect"]


def softer(loss: LossInputs, strength: float) -> Remedied:
    return Remedied(lr_factor=0.25)


def test_from_a_command_line_to_the_page_with_one_s_own_intervention(run: Path) -> None:  # noqa: F811
    own = f"'{Path(__file__)}:softer'"
    asked = [f"checkpoint={checkpoint(run, 1)}", f"interventions.which=[{own},bonus,kl]", "interventions.steps=1"]
    small = ["evaluation.prompts=16", "update.prompts=8", "log.level=none", "name=planes", "dashboards=false"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        (path,) = analyse_checkpoints(compose("offline", [*asked, *small, "conditioning=false"]))
    tables = read_result(path)["tables"]
    assert [row["name"] for row in tables["interventions"]] == ["plain", "softer", "bonus", "kl"]
    assert tables["branches"][0]["asked"] == f"{Path(__file__)}:softer"
    assert tables["interventions"][3]["measured_delta_h"] != 0.0  # the reference is there: the run's first model
    page = (path.parents[1] / "analyses.html").read_text()
    assert "Offline planes: interventions at step 2" in page
    assert "1 step with each intervention, from step 2 on" in page
    softer = tables["interventions"][1]
    assert plus_minus(1e3 * softer["measured_delta_h"], 1e3 * softer["measured_delta_h_half"], "+") in page
    assert (path.parents[1] / "offline_planes_interventions_2.png").is_file()
