"""verl's engine trains bitwise the same with and without probes, and measures like a plain loop: make test-verl."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.workers")

import torch
from plain_loop import CLIP, train
from same_estimates import above_limit, differences, of_records
from shared_rollouts import MICROBATCH, PROMPTS, STEPS, G, of_another_sampler

from rl_training.hosts.plain.measured_loop import measured_loop
from rl_training.models.load import load_tiny
from rl_training.policy.rollout import Rollout
from rl_training.probes import (
    CovariancePredictorProbe,
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    MeasuredStepProbe,
    SamplerProbe,
    SimpleEntropyProbe,
)
from rl_training.records.checkpoint_states import read_notes
from rl_training.records.compare.groups import differences as differences_of_settings
from rl_training.records.compare.groups import read_groups
from rl_training.records.jsonl import read_estimates, read_metrics
from rl_training.statistics.estimate import Estimate
from rl_training.step.reasons import UNKNOWN_TRUNCATION

RUNS_FILE = Path(__file__).with_name("runs.py")
# Runs that are trained with and without probes.
COMPARED = ["plain", "sampled", "checkpointing", "packed", "groups", "bf16", "two_steps", "all_at_once"]
ALONE = [*COMPARED, "dynamic", "two_epochs", "entropies", "bonus", "lora", "ended", "resumed", "skipped"]
OF_THE_LOSS = ("delta_reward/forward", "sampler/corrected_share")  # estimates that need more than a plain loop tells
TOGETHER = ["plain", "sync_each", "all_at_once"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do all runs, with one process and with two at the same time, and return their folder."""
    folder = tmp_path_factory.mktemp("verl")
    load_tiny()[0].save_pretrained(folder / "model")
    with_and_without = {"1": [f"{name}_bare" for name in ALONE[:-3]], "2": [f"{name}_bare" for name in TOGETHER]}
    launched = [
        subprocess.Popen(
            [sys.executable, str(RUNS_FILE), str(folder), world, *names, *with_and_without[world]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for world, names in (("1", ALONE), ("2", TOGETHER))
    ]  # fmt: skip
    for process in launched:
        output = process.communicate()[0]
        assert process.returncode == 0, output[-5000:]
    return folder


@pytest.fixture(scope="session")
def ranks(folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that loads each rank's results, by the run's name and number of processes."""

    def read(name: str) -> list[dict[str, Any]]:
        return [torch.load(path, weights_only=False) for path in sorted((folder / name).glob("[01].pt"))]

    return read


@pytest.mark.parametrize("name", [*(f"{name}_1" for name in ALONE[:-3]), *(f"{name}_2" for name in TOGETHER)])
def test_training_is_bitwise_the_same_with_probes(name: str, ranks: Callable[..., Any]) -> None:
    kind, world = name.rsplit("_", 1)
    with_probes, bare = ranks(name)[0]["parameters"], ranks(f"{kind}_bare_{world}")[0]["parameters"]
    assert with_probes.keys() == bare.keys()
    assert not [parameter for parameter in bare if not torch.equal(with_probes[parameter], bare[parameter])]


@pytest.mark.parametrize("name", [*(f"{name}_1" for name in COMPARED), *(f"{name}_2" for name in TOGETHER)])
def test_the_fold_gradients_add_up_to_the_gradient_of_the_optimizer(name: str, ranks: Callable[..., Any]) -> None:
    for rank in ranks(name):
        for step in rank["kept"]:
            for parameter, mean in step["mean"].items():
                off = (step["by_fold"][parameter] - mean).abs().max() / mean.abs().max().clamp(min=1e-30)
                assert off < 1e-6, (parameter, float(off))


def test_microbatches_by_token_count_have_unequal_sizes_and_whole_prompts(ranks: Callable[..., Any]) -> None:
    """The announcement describes those of the first step."""
    sizes = [step["sizes"] for step in ranks("groups_1")[0]["kept"]]
    assert any(len(set(sizes_of_step)) > 1 for sizes_of_step in sizes)
    assert all(size % G == 0 for sizes_of_step in sizes for size in sizes_of_step)
    assert ranks("groups_1")[0]["sizes"] == sizes[0]
    assert ranks("plain_2")[0]["sizes"] == [MICROBATCH] * (PROMPTS * G // 2 // MICROBATCH)


def test_prompts_of_different_processes_have_different_numbers(ranks: Callable[..., Any]) -> None:
    """If two processes used the same number, their responses would count as answers to one prompt."""
    for first, second in zip(*(rank["kept"] for rank in ranks("plain_2")), strict=True):
        assert len({*first["prompts"], *second["prompts"]}) == PROMPTS


def estimates_of_a_plain_loop(other_sampler: bool) -> list[dict[str, Any]]:
    """Return the estimates of the same steps in a plain loop with the same weights, rollouts and optimizer."""
    model, _ = load_tiny()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.1)
    probes = [
        SimpleEntropyProbe(per_sequence=True),
        MeasuredStepProbe(),
        SamplerProbe(),
        GradientNoiseScaleProbe(split_prompts=PROMPTS),
        EffectiveSampleSizeProbe(),
        CovariancePredictorProbe(),
    ]
    shape = {"responses_per_prompt": G, "microbatch_size": MICROBATCH, "microbatches": PROMPTS * G // MICROBATCH}
    measured = measured_loop(model, optimizer, probes, **shape, max_grad_norm=CLIP, dr_grpo=True)

    def forward(model: Any, part: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        scores = measured.scorer.score(part, torch.arange(MICROBATCH))
        missing = (0, part.completion_mask.shape[1] - scores.logps.shape[1])
        return tuple(torch.nn.functional.pad(values, missing) for values in (scores.logps, scores.entropies))

    sampler = of_another_sampler if other_sampler else None
    return train(model, optimizer, measured, STEPS, forward=forward, sampler=sampler)


@pytest.mark.parametrize("name", ["plain_1", "plain_2", "packed_1", "sampled_1"])
def test_estimates_equal_those_of_a_plain_loop(name: str, folder: Path) -> None:
    """At every step, to 1e-5 of the value or of its error bar, whichever is larger."""
    plain = enumerate(estimates_of_a_plain_loop(name.startswith("sampled")), start=1)
    expected = {
        (step, metric): (e.value, e.stderr)
        for step, answers in plain
        for metric, e in answers.items()
        if metric not in OF_THE_LOSS and e.code != UNKNOWN_TRUNCATION.code
    }
    written = of_records(folder / name / "logs")
    off = differences(expected, {key: written[key] for key in expected}, fields=1)
    assert len(off) > 40
    assert above_limit(off) == {}


def test_another_fold_split_changes_forward_within_its_error_and_backward_not_at_all(
    ranks: Callable[..., Any],
) -> None:
    plain, groups = (ranks(f"{name}_1")[0]["latest"] for name in ("plain", "groups"))
    assert groups["delta_h/backward"].value == pytest.approx(plain["delta_h/backward"].value, rel=1e-4)
    assert abs(groups["delta_h/forward"].value - plain["delta_h/forward"].value) < plain["delta_h/forward"].stderr


def test_prompts_split_between_microbatches_have_predictions(ranks: Callable[..., Any]) -> None:
    """They agree with those of whole prompts within the errors, but use a different first response of each prompt."""
    plain, cut = (ranks(f"{name}_1")[0]["latest"] for name in ("plain", "dynamic"))
    for name in ("delta_h/forward", "delta_h/backward"):
        error = math.hypot(plain[name].stderr, cut[name].stderr)
        assert 0.0 < abs(cut[name].value - plain[name].value) < 2.0 * error


def test_estimates_from_fresh_responses_are_missing_with_the_reason(ranks: Callable[..., Any]) -> None:
    truth = ranks("ended_1")[0]["latest"]["delta_h/true"]
    assert math.isnan(truth.value)
    assert "rollout server" in truth.reason


def test_a_second_step_on_a_rollout_is_off_policy_and_is_still_measured(ranks: Callable[..., Any]) -> None:
    latest = ranks("two_steps_1")[0]["latest"]
    assert math.isfinite(latest["delta_h/forward"].value)
    assert 0 < latest["ess/importance"].value < PROMPTS * G / 2


def test_a_second_epoch_on_the_same_responses_has_no_forward_estimate(ranks: Callable[..., Any]) -> None:
    forward = ranks("two_epochs_1")[0]["latest"]["delta_h/forward"]
    assert math.isnan(forward.value)
    assert forward.code == "reused"


def test_interventions_are_predicted_on_the_loss_of_verl(ranks: Callable[..., Any]) -> None:
    """Half the learning rate makes half the step. `nsr` is defined because Dr-GRPO's settings are read."""
    latest = ranks("plain_1")[0]["latest"]
    assert latest["intervention/lr:0.5/delta_h"].value == pytest.approx(
        -0.5 * latest["delta_h/forward"].value, rel=1e-3
    )
    assert math.isfinite(latest["intervention/bonus:0.5/delta_reward"].value)
    assert math.isfinite(latest["intervention/nsr/delta_h"].value)


def test_entropies_that_verl_does_not_compute_are_among_the_costs(ranks: Callable[..., Any]) -> None:
    timed, own = (ranks(f"{name}_1")[0]["is_timed"] for name in ("plain", "entropies"))
    assert timed == [True] * (STEPS * PROMPTS * G // MICROBATCH)
    assert own == []


def test_estimates_reach_verls_metrics(ranks: Callable[..., Any], folder: Path) -> None:
    for rank in ranks("plain_2"):
        values = rank["metrics"][-1]["delta_h/forward"]
        assert values == [rank["latest"]["delta_h/forward"].value] * 2  # one entry from each rank, like verl's own


def test_records_have_a_line_for_each_optimizer_step(folder: Path) -> None:
    rows = read_metrics(folder / "two_steps_1" / "logs")
    assert [row["step"] for row in rows] == list(range(1, 2 * STEPS + 1))
    assert [row["training/global_step"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm", "reward", "entropy"))


def test_a_resumed_training_continues_as_if_never_stopped(ranks: Callable[..., Any], folder: Path) -> None:
    """The number of steps is under "verl", as in checkpoints of earlier versions, which are to go on too."""
    assert "verl" in read_notes(folder / "ended_1" / "checkpoint")["probes"].split(",")
    ended, resumed = ranks("ended_1")[0], ranks("resumed_1")[0]
    assert not [n for n, p in ended["parameters"].items() if not torch.equal(p, resumed["parameters"][n])]
    for name, estimate in ended["latest"].items():
        if not name.startswith("recorder"):
            assert same(estimate, resumed["latest"][name]), name


def test_a_second_training_keeps_the_first_ones_records_and_differs_by_its_settings(folder: Path) -> None:
    """A training that resumes writes on into its own."""
    first, second = folder / "entropies_1", folder / "entropies_1-2"
    for run in (first, second, folder / "ended_1"):
        assert [row["step"] for row in read_metrics(run / "logs")] == [*range(1, STEPS + 1)]
    assert not [*folder.glob("ended_1-*"), *(folder / "resumed_1").glob("logs")]
    assert differences_of_settings(read_groups([first, second])) == {"verl.actor.entropy_coeff": ["0.0", "0.01"]}


def same(first: Estimate, other: Estimate) -> bool:
    return first.reason == other.reason and all(
        a == b or (math.isnan(a) and math.isnan(b))
        for a, b in ((first.value, other.value), (first.stderr, other.stderr))
    )


def test_a_step_that_verl_skips_has_a_line_without_estimates_and_is_warned_of(
    ranks: Callable[..., Any], folder: Path
) -> None:
    """The second of three rollouts has an infinite advantage. As in a plain loop, the next step has no `backward`."""
    result, rows = ranks("skipped_1")[0], read_metrics(folder / "skipped_1" / "logs")
    steps = [(row["step"], row["training/global_step"], row.get("skipped")) for row in rows]
    assert steps == [(1, 1, None), (2, 2, 1), (3, 3, None)]
    assert rows[1].keys() == {"step", "step_time", "training/global_step", "skipped"}
    assert {row["step"] for row in read_estimates(folder / "skipped_1" / "logs")} == {1, 3}
    (said,) = [line for line in result["said"] if "not finite" in line]
    assert said.startswith("step 2: ")
    assert result["latest"]["delta_h/backward"].code == "step_not_measured"
    assert math.isfinite(result["latest"]["delta_h/forward"].value)


def test_a_step_that_no_probe_measures_has_a_line_too(folder: Path) -> None:
    """`every` is 2."""
    assert [row["step"] for row in read_metrics(folder / "lora_1" / "logs")] == [1, 2, 3]
    assert {row["step"] for row in read_estimates(folder / "lora_1" / "logs")} == {1, 3}
