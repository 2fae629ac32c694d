"""What a report says to change: in the words of each trainer, with settings that can be pasted as they stand."""

from __future__ import annotations

import ast
import json
import math
import shlex
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from logged_runs import log_run, noisy

from rl_training import Estimate
from rl_training.interventions.named import interventions_to_train
from rl_training.records.report.as_json import first_lines
from rl_training.records.report.set_up import SetUp
from rl_training.records.report.wording.base import Wording
from rl_training.records.report.wording.job import JobWording
from rl_training.records.report.wording.trl import DrGrpoWording, TrlWording
from rl_training.records.report.wording.verl import VerlWording
from rl_training.records.table.effects import Effect
from rl_training.records.table.reading import read_run

KNOWN, ZERO = Estimate(0.01, 0.001, 8), Estimate(0.0, 0.1, 8)
TRAINED = {"class": "DrGRPOTrainer", "learning_rate": 1e-6}
FALLS = {"entropy": noisy(lambda step: 0.5, 0.01, 2), "reward": noisy(lambda step: 0.8 if step < 25 else 0.2, 0.03, 1)}


def effect(name: str, halves_at: float = math.nan) -> Effect:
    strength = Estimate.missing("unknown") if math.isnan(halves_at) else Estimate(halves_at, num_samples=8, reason="x")
    return Effect(name, KNOWN, ZERO, ZERO, KNOWN, KNOWN, strength, 5)


def typed(settings: tuple[str, ...]) -> dict[str, Any]:
    """Return what Hydra reads if these settings are pasted into a shell, by key."""
    overrides = [OverridesParser.create().parse_override(word) for text in settings for word in shlex.split(text)]
    assert not any(override.is_sweep_override() for override in overrides)
    return {override.key_or_group: override.value() for override in overrides}


def test_verl_is_advised_with_its_own_overrides() -> None:
    verl = VerlWording(SetUp("verl", {"optimizer": {"lr": 1e-6}}))
    actor = "actor_rollout_ref.actor"
    assert typed(verl.intervention(effect("bonus", 0.02)).settings) == {f"{actor}.entropy_coeff": 0.02}
    assert typed(verl.intervention(effect("lr:0.5")).settings) == {f"{actor}.optim.lr": 5e-7}
    kl = {f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": 0.02}
    assert typed(verl.intervention(effect("kl:0.02")).settings) == kl
    assert typed(verl.probes("measured").settings) == {"probe": ["simple", "measured"]}
    assert typed(verl.bounded_step().settings) == {f"{actor}.optim.lr": 3.3e-7}
    assert verl.intervention(effect("w_reinforce:0.1")).settings == ()


def test_more_responses_are_twice_those_of_the_run_in_the_words_of_its_trainer() -> None:
    loop, verl = ({"responses_per_prompt": 32}, {"responses_per_prompt": 4})
    assert Wording(SetUp("loop", loop)).more_unequal_rewards().settings == ("responses_per_prompt=64",)
    assert typed(VerlWording(SetUp("verl", verl)).more_unequal_rewards().settings) == {"actor_rollout_ref.rollout.n": 8}
    trl = TrlWording(SetUp("trl", {"trainer": {"num_generations": 8}}))
    assert trl.more_unequal_rewards().settings == ("GRPOConfig(num_generations=16)",)
    assert VerlWording(SetUp("verl", {})).more_unequal_rewards().settings == ()


def test_smaller_steps_of_verl_are_one_lower_rate() -> None:
    verl = VerlWording(SetUp("verl", {"learning_rate": 1e-6}))
    assert verl.smaller_steps().text == "actor_rollout_ref.actor.optim.lr=3.3e-07"


def test_an_advised_intervention_of_a_job_keeps_those_that_it_has() -> None:
    job = JobWording(SetUp("job", {"intervention": ["bonus:0.02"]}))
    assert typed(job.positive_only().settings) == {"intervention": ["bonus:0.02", "psr"]}
    assert typed(job.intervention(effect("bonus", 0.05)).settings) == {"intervention": "bonus:0.05"}
    alone = JobWording(
        SetUp("job", {"intervention": ["nsr"], "probes": {"interventions": {"which": ["my.py:softer"]}}})
    )
    assert typed(alone.positive_only().settings) == {"intervention": "psr"}  # at most one weighs by the sign
    assert typed(alone.intervention(effect("mis:0.5,2")).settings) == {"intervention": ["nsr", "mis:0.5,2"]}
    assert typed(alone.intervention(effect("softer", 0.5)).settings) == {"intervention": ["nsr", "my.py:softer:0.5"]}


def test_values_of_the_run_are_advised_exactly_and_new_ones_with_two_digits() -> None:
    """A sampler's 1.0 beside a training at 1.25; a rate of 1.234e-4 times three; a tenth of the share of .0333."""
    trained = {"temperature": 1.25, "learning_rate": 1.234e-4, "target_kl_share": 0.0333}
    job = JobWording(SetUp("job", {"trainer": trained | {"generation_kwargs": {"temperature": 1.0}}}))
    assert typed(job.sample_with(temperature=1.25).settings) == {"trainer.generation_kwargs.temperature": 1.25}
    assert typed(job.larger_steps().settings) == {"trainer.learning_rate": 3.7e-4}
    trl = TrlWording(SetUp("trl", {"trainer": trained}))
    assert trl.intervention(effect("lr", 0.333)).settings == ("GRPOConfig(learning_rate=4.1e-05)",)
    bounded = TrlWording(SetUp("trl", {}, share=0.0333))
    assert bounded.bounded_step(times=0.1).settings == ("target_kl_share=0.0033",)
    assert typed(VerlWording(SetUp("verl", trained)).bounded_step(times=0.3).settings) == {
        "actor_rollout_ref.actor.optim.lr": 3.7e-5
    }


def test_a_list_with_a_comma_in_a_name_is_no_sweep() -> None:
    assert typed(JobWording(SetUp("job", {})).intervention(effect("mis:0.5,2")).settings) == {
        "intervention": "mis:0.5,2"
    }


def test_trl_is_advised_with_arguments_that_python_reads() -> None:
    trl = TrlWording(SetUp("trl", {"trainer": {"class": "GRPOTrainer", "learning_rate": 1e-6}}))
    told = [
        (effect("bonus", 0.02), {"entropy_coef": 0.02}), (effect("lr", 0.02), {"learning_rate": 2e-8}),
        (effect("std_norm"), {"scale_rewards": "group"}), (effect("length_norm"), {"loss_type": "grpo"}),
        (effect("drop_truncated"), {"mask_truncated_completions": True}),
    ]  # fmt: skip
    for measured, arguments in told:
        [setting] = trl.intervention(measured).settings
        call = ast.parse(setting, mode="eval").body
        assert isinstance(call, ast.Call)
        assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == arguments


def test_a_dr_grpo_trainer_is_advised_with_its_own_config_and_with_interventions_beside_those_it_has() -> None:
    own = DrGrpoWording(SetUp("trl", {"trainer": TRAINED, "attached": {"interventions": ["clip_cov", "nsr"]}}))
    assert own.smaller_steps().settings == ('DrGRPOConfig(target_kl_share="auto")',)
    assert own.fields(max_completion_length=64).settings == ("DrGRPOConfig(max_completion_length=64)",)
    for change, names in (
        (own.positive_only(), ["clip_cov", "psr"]),  # which has the place of its opposite
        (own.intervention(effect("bonus", 0.02)), ["clip_cov", "nsr", "bonus:0.02"]),
        (own.intervention(effect("lr", 0.5)), ["clip_cov", "nsr", "lr:0.5"]),
    ):
        (setting,) = change.settings
        assert change.text == f"DrGRPOTrainer(…, {setting})"
        assert setting == f"interventions={json.dumps(names)}"
        assert [intervention.given for intervention in interventions_to_train(names)] == names


def test_a_change_has_one_target_in_the_words_of_every_trainer() -> None:
    """Of findings with one target a report keeps the first, however each is worded."""
    for wording in (Wording(SetUp("loop", {})), TrlWording(SetUp("trl", {})), JobWording(SetUp("job", {}))):
        assert wording.fields(beta=0.1, top_p=1.0).target == "beta, top_p"
        assert wording.smaller_steps().text != wording.bounded_step().text
        assert wording.smaller_steps().target == wording.bounded_step().target == "target_kl_share"
        assert wording.longer_responses().target == "max_completion_length"
    assert VerlWording(SetUp("verl", {})).bounded_step().target == "learning_rate"


def test_only_what_can_be_pasted_is_a_setting() -> None:
    loop, trl = Wording(SetUp("loop", {})), TrlWording(SetUp("trl", {"trainer": {"class": "GRPOTrainer"}}))
    assert trl.positive_only().settings == trl.reward_weights().settings == trl.longer_responses().settings == ()
    assert trl.bounded_step().settings == loop.bounded_step().settings == ('target_kl_share="auto"',)
    assert loop.intervention(effect("bonus", 0.02)).settings == loop.larger_batch(2).settings == ()
    own = {"class": "GRPOTrainer", "generation_kwargs": {"top_p": 0.9, "stop": ["(x)"]}}
    told = TrlWording(SetUp("trl", {"trainer": own})).sample_with(top_p=1.0)
    assert told.settings == ("GRPOConfig(generation_kwargs={'top_p': 1.0, 'stop': ['(x)']})",)


def test_a_branch_that_the_report_advises_can_be_pasted_whatever_the_path(tmp_path: Path) -> None:
    folder = log_run(tmp_path / "my läufe" / "a b", **FALLS)
    (folder / "config.yaml").write_text("made_by: job\ntrainer: {learning_rate: 0.0001}\n")
    checkpoint = folder / "training_state" / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    said = json.loads(json.dumps(first_lines(read_run(folder))))
    assert typed(tuple(said["settings"])) == {"branch": str(checkpoint), "trainer.target_kl_share": "auto"}
    assert all(setting in said["advice"] for setting in said["settings"])
