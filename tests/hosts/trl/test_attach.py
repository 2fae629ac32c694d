"""Attached probes are called at every moment in order, change nothing about training, and leave nothing behind."""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import trl
from seen import Seen
from trainers import FEW, SHORT_LAST_STEP, differing, graded, outcome, outcome_without_probes, trainer_maker
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer, RLOOTrainer

from rl_training import DrGRPOTrainer, Estimate, Reading, attach
from rl_training.engine.verifier import LEFT_OUT
from rl_training.errors import UserError
from rl_training.hosts.trl.rollouts.batches import EXTRA_BATCH_KEYS
from rl_training.hosts.trl.settings.whole_prompts import whole_prompts_fix
from rl_training.hosts.trl.wrapping import wrap
from rl_training.models.load import load_tiny
from rl_training.policy.policy import Policy
from rl_training.probes import (
    CovariancePredictorProbe,
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    SimpleEntropyProbe,
)
from rl_training.records.jsonl import read_estimates, read_metrics
from rl_training.records.writer import Records
from rl_training.step.needs import Need


class Witness(Seen):
    """Records which of its hooks were called, and for which step."""

    name = "witness"

    def __init__(self, name: str = "witness", every: int = 1) -> None:
        self.name = name
        super().__init__(every)
        self.heard: list[Any] = []

    def measure(self, ctx: Any, state: Any) -> Reading:
        step = ctx.step
        reading = super().measure(ctx, state)
        self.heard.append(("measure", step.number))
        self.before = {name: weight.clone() for name, weight in step.weights.items()}
        return reading

    def after_step(self, ctx: Any, reading: Reading) -> Reading:
        step = ctx.step
        moved = any(not torch.equal(w, self.before[name]) for name, w in step.weights.items())
        self.heard.append(("after", moved))
        return reading


def of_other_responses() -> SimpleEntropyProbe:
    other = SimpleEntropyProbe(responses_per_prompt=2)
    other.name = "other"
    return other


class Measured(NamedTuple):
    witness: Witness
    logs: Path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Train two steps with probes and records."""
    folder = tmp_path_factory.mktemp("measured")
    witness = Witness()
    probes = [witness, SimpleEntropyProbe(responses_per_prompt=2)]
    trainer = trainer_maker(folder)(probes=probes, records=Records(folder / "logs"))
    trainer.train()
    return Measured(witness, folder / "logs")


def test_hooks_are_called_in_order_and_once(measured) -> None:
    assert measured.witness.heard == [
        ("measure", 1), ("after", True),
        ("measure", 2), ("after", True),
    ]  # fmt: skip


def test_every_2_measures_steps_1_3_5(make_trainer) -> None:
    witness = Witness(every=2)
    make_trainer(probes=[witness], max_steps=5, gradient_accumulation_steps=1).train()
    assert [what[1] for what in witness.heard if what[0] == "measure"] == [1, 3, 5]


def test_a_plain_grpo_trainer_is_bitwise_unchanged_and_logs_the_probe(make_trainer) -> None:
    """One rollout per step: on-policy, and each prompt's responses are in one step, but microbatches mix prompts."""
    settings = {"max_steps": 2}
    trainer = make_trainer(GRPOTrainer, **settings)
    with attach(trainer, probes=[SimpleEntropyProbe()], metrics="all", whole_prompts=False):
        assert differing(outcome(trainer), outcome_without_probes(GRPOTrainer, **settings)) == []
    logged = {key for row in trainer.state.log_history for key in row}
    assert {"probe_cost/simple_seconds", "probe_cost/fraction_of_step"} <= logged
    assert {"entropy/token", "delta_h/reuse", "delta_h/backward", "delta_h/forward_se"} <= logged


def test_a_plain_grpo_trainer_that_logs_all_prints_the_core_numbers(make_trainer, capsys) -> None:
    """As for any TRL user, with transformers' own printing callback."""
    trainer = make_trainer(GRPOTrainer, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=8)
    trainer.add_callback(PrinterCallback)
    with attach(trainer, metrics="all"):
        trainer.train()
    said = capsys.readouterr().out.splitlines()
    printed = ast.literal_eval(next(line for line in said if "'reward'" in line))
    logged = trainer.state.log_history[0]
    of_probes = ("delta_", "ess/", "step/", "probe_cost/", "update/", "sampler/residual")
    probed = {name for name in logged if name.startswith(of_probes) or "entropy/" in name}
    shown = {"delta_h/forward", "delta_h/forward_se", "entropy/token", "ess/advantage_fraction"}
    shown |= {"delta_h/cumulative_predicted", "delta_h/cumulative_measured", "probe_cost/fraction_of_step"}
    assert shown < probed
    assert set(printed) & probed == shown
    assert set(logged) - probed - {"step"} <= set(printed)  # everything that TRL logs is printed


def test_a_plain_trainer_with_whole_prompt_order_has_the_forward_estimate(make_trainer) -> None:
    trainer = make_trainer(GRPOTrainer)
    witness = Witness()
    with attach(trainer, probes=[SimpleEntropyProbe(), witness]):
        trainer.train()
    assert any("delta_h/forward" in row for row in trainer.state.log_history)
    for step in witness.kept_steps:
        assert not step.reasons.no_folds
        for rows in step.batch.microbatch_rows:
            assert sorted(step.batch.rollout.prompt_index[rows.start : rows.stop].unique(return_counts=True)[1]) == [
                4,
                4,
            ]


def test_prompts_that_span_microbatches_are_measured_like_those_that_do_not(make_trainer) -> None:
    rows = []
    for size, count in ((4, 4), (2, 8)):
        shape = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count, "max_completion_length": 8}
        trainer = make_trainer(
            probes=[SimpleEntropyProbe()], reward=graded, max_steps=1, adam_epsilon=1e-5, dtype=torch.float64, **shape
        )
        trainer.train()
        rows.append(trainer.attachment.latest["delta_h/forward"])
    whole, cut = rows
    assert (cut.value, cut.stderr) == pytest.approx((whole.value, whole.stderr), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "trainer_class", "said"),
    [
        (
            {"steps_per_generation": 4},
            GRPOTrainer,
            "no prediction, and no noise scale: the responses of a prompt are "
            r"spread over several optimizer steps, or processes: attach\(trainer, ..., whole_prompts=True\) and "
            r"gradient_accumulation_steps=8 in GRPOConfig\.",  # a step of two prompts would have no error bars either
        ),
        (
            {"num_iterations": 2},
            DrGRPOTrainer,
            "no prediction at some steps: an earlier step has .*: num_iterations=1 in GRPOConfig",
        ),
    ],
)
def test_training_begins_with_what_it_will_not_measure(
    make_trainer, caplog, settings: Any, trainer_class: Any, said: str
) -> None:
    with attach(make_trainer(GRPOTrainer, max_steps=1, **FEW, **settings), probes=[SimpleEntropyProbe()],
                whole_prompts=trainer_class is DrGRPOTrainer) as attachment:  # fmt: skip
        attachment._trainer.train()
    assert any(re.match(said, line) for line in caplog.messages)


@pytest.mark.parametrize(("steps_per_generation", "is_other"), [(None, False), (4, False), (5, True)])
def test_advice_warns_of_changed_steps_only_where_steps_would_no_longer_divide_a_generation(
    make_trainer, steps_per_generation: int | None, is_other: bool
) -> None:
    shape = {"gradient_accumulation_steps": 3, "steps_per_generation": steps_per_generation}
    trainer = make_trainer(GRPOTrainer, per_device_train_batch_size=4, num_generations=4, **shape)
    fix = whole_prompts_fix(trainer)
    assert "gradient_accumulation_steps=8 in GRPOConfig" in fix
    assert fix.endswith("which responses of a generation each step learns from") == is_other


def test_whole_prompt_order_keeps_the_sequences_and_the_random_state(make_trainer) -> None:
    batches, streams = [], []
    for whole in (False, True):
        witness, trainer = Witness(), make_trainer(GRPOTrainer, max_steps=1)
        with attach(trainer, probes=[witness], whole_prompts=whole):
            trainer.train()
        rollout = witness.kept_steps[0].batch.rollout
        rows = zip(
            rollout.completion_ids.tolist(), rollout.advantages.tolist(), rollout.prompt_ids.tolist(), strict=True
        )
        batches.append(sorted(rows))
        streams.append(torch.random.get_rng_state())
    assert batches[0] == batches[1]
    assert torch.equal(*streams)


def test_nothing_is_left_on_the_trainer_after_remove(make_trainer) -> None:
    trainer = make_trainer(GRPOTrainer)
    before, callbacks = set(vars(trainer)), list(trainer.callback_handler.callbacks)
    attachment = attach(trainer, probes=[SimpleEntropyProbe()], whole_prompts=True)
    assert set(vars(trainer)) != before
    trainer._buffered_inputs = [dict.fromkeys((*EXTRA_BATCH_KEYS, "advantages"))]
    attachment.remove()
    assert trainer._buffered_inputs == [{"advantages": None}]
    assert set(vars(trainer)) == before
    assert trainer.callback_handler.callbacks == callbacks
    assert all(not p._backward_hooks for p in trainer.model.parameters())
    trainer.add_callback = None
    with pytest.raises(TypeError):  # in the middle of attaching
        attach(trainer)
    del trainer.add_callback
    assert set(vars(trainer)) == before


def test_remove_restores_what_others_had_set(make_trainer) -> None:
    trainer = make_trainer(GRPOTrainer)
    theirs = trainer.compute_loss
    trainer.compute_loss = theirs
    attach(trainer, probes=[]).remove()
    assert vars(trainer)["compute_loss"] is theirs
    attachment, functions = attach(trainer, probes=[]), [graded]
    trainer.reward_funcs = functions
    attachment.remove()
    assert trainer.reward_funcs is functions


def test_a_wrapper_below_another_one_passes_calls_on_once_it_is_undone() -> None:
    owner, heard = SimpleNamespace(double=lambda number: 2 * number), []
    with ExitStack() as undo:
        wrap(owner, "double", lambda original, number: heard.append(number) or original(number), undo)
        ours = owner.double
        owner.double = theirs = lambda number: 1 + ours(number)
        assert owner.double(3) == 7
    assert owner.double is theirs
    assert owner.double(4) == 9
    assert heard == [3]


REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    ("settings", "probes", "said"),
    [
        (REENTRANT, [SimpleEntropyProbe()], '"use_reentrant": False'),
        ({"ddp_static_graph": True}, [SimpleEntropyProbe()], "ddp_static_graph=False"),
        (
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
            [SimpleEntropyProbe()],
            "1 x 6 sequences on a process, no multiple of num_generations=4: .* Use per_device_train_batch_size=8",
        ),
        ({"num_generations": 1}, [SimpleEntropyProbe()], "at least 2 generations"),
        ({"reward_weights": [math.nan]}, [], r"reward_weights=\[nan\] must be finite"),
        ({}, [Witness(), Witness()], "same name"),
        ({}, [SimpleEntropyProbe(), of_other_responses()], r"all probes share one entropy gradient.*'simple', 'other'"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused_at_attach(make_trainer, settings, probes, said) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(probes=probes, **settings)


def test_fp16_from_accelerates_configuration_is_refused_too(make_trainer) -> None:
    """The trainer's own fp16 stays False. Gradients would be 1024 times too large, and the trace 1024²."""
    trainer = make_trainer(GRPOTrainer)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(ValueError, match=r"mixed_precision: fp16"):
        attach(trainer, probes=[SimpleEntropyProbe()])


def test_a_generation_with_prompts_spread_over_processes_is_refused(make_trainer) -> None:
    trainer = make_trainer(GRPOTrainer, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer.args.steps_per_generation = 1  # possible with two processes
    with pytest.raises(ValueError, match=r"1 x 2 sequences .*num_generations"):
        attach(trainer, probes=[Witness()], whole_prompts=True)


def test_a_model_that_was_replaced_before_training_began_is_the_one_that_is_measured(make_trainer) -> None:
    values = []
    for is_late in (False, True):
        trainer = make_trainer(GRPOTrainer, **FEW, max_steps=1)
        other = copy.deepcopy(trainer.model)
        with torch.no_grad():
            other.model.norm.weight.mul_(0.8)
        if not is_late:
            trainer.model = trainer.model_wrapped = other
        attachment = attach(trainer, probes=[SimpleEntropyProbe()], whole_prompts=False)
        trainer.model = trainer.model_wrapped = other
        trainer.train()
        values.append({name: (e.value, e.stderr, e.code) for name, e in attachment.latest.items()})
    assert str(values[0]) == str(values[1])
    assert math.isfinite(values[1]["entropy/token"][0])


def test_attaching_twice_or_to_a_frozen_model_is_refused(make_trainer) -> None:
    trainer = make_trainer(GRPOTrainer)
    with attach(trainer, probes=[Witness()]) as attached, pytest.raises(ValueError, match=r"probes attached: remove\("):
        attach(trainer, probes=[Witness()])
    with pytest.raises(ValueError, match=r"removed from their trainer: attach\("):
        attached.__enter__()
    trainer = make_trainer(probes=[Witness()])
    with pytest.raises(ValueError, match=r"probes=\[...\] and records='FOLDER/logs' to DrGRPOTrainer.*\bremove\(\)"):
        attach(trainer, probes=[Witness()])
    trainer.attachment.remove()
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        attach(trainer, probes=[Witness()])


@pytest.mark.parametrize("trained_with", [{"interventions": ["bonus:0.5"]}, {"target_kl_share": "auto"}])
def test_what_a_trainer_trains_with_is_not_removed_with_its_probes(make_trainer, trained_with: dict[str, Any]) -> None:
    trainer = make_trainer(**trained_with)
    attached = dict(vars(trainer))
    with pytest.raises(ValueError, match="with interventions or target_kl_share, which would be removed"):
        trainer.attachment.remove()
    with pytest.raises(ValueError, match=r"records='FOLDER/logs' to DrGRPOTrainer\(\.\.\.\)$"):  # no advice to remove
        attach(trainer)
    with trainer.attachment:
        pass
    assert vars(trainer) == attached


@pytest.mark.parametrize("given", [object(), None])
def test_an_object_that_is_not_a_trainer_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=rf"trl\.GRPOTrainer.*\b{type(given).__name__}\b"):
        attach(given, probes=[Witness()])


def test_the_asynchronous_trainer_is_refused_by_name_with_the_reason() -> None:
    async_grpo = pytest.importorskip("trl.experimental.async_grpo")
    trainer = object.__new__(async_grpo.AsyncGRPOTrainer)
    with pytest.raises(ValueError, match=r"AsyncGRPOTrainer.* _generate_and_score_completions.*measured_loop"):
        attach(trainer, probes=[Witness()])


def test_the_rloo_trainer_is_refused_with_the_grpo_settings_of_the_same_gradient() -> None:
    """It has every method that is checked for, so a list of missing methods would be empty."""
    with pytest.raises(
        ValueError, match=r"is RLOOTrainer\. GRPOTrainer has .*loss_type='dr_grpo', scale_rewards='none'"
    ):
        attach(object.__new__(RLOOTrainer), probes=[Witness()])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("UnslothGRPOTrainer", "its forward pass returns None for log-probabilities and entropies while it trains"),
        ("FasterGRPOTrainer", "nothing says that its _get_per_token_logps_and_entropies returns"),
    ],
)
def test_a_copy_of_trls_trainer_is_refused_even_in_its_place(monkeypatch, name: str, said: str) -> None:
    """As unsloth replaces it: with all its methods, under its name in TRL, and no subclass of it."""
    members = {key: value for key, value in vars(GRPOTrainer).items() if key not in ("__dict__", "__weakref__")}
    copy = type(name, GRPOTrainer.__bases__, {**members, "__module__": f"compiled.{name}"})
    monkeypatch.setattr(trl, "GRPOTrainer", copy)
    with pytest.raises(ValueError, match=rf"this is {name}, a copy .*: {said}"):
        attach(object.__new__(copy), probes=[Witness()])


def test_the_short_last_step_of_an_epoch_has_the_folds_of_its_own_microbatches(make_trainer) -> None:
    """Six microbatches with four per step: the last step has two."""
    witness = Witness()
    rows = make_trainer().train_dataset.select(range(12))
    make_trainer(probes=[witness], train_dataset=rows, **SHORT_LAST_STEP).train()
    assert [len(step.batch.microbatch_rows) for step in witness.kept_steps] == [4, 2]
    assert witness.kept_steps[-1].batch.fold.tolist() == [0] * 8 + [1] * 8


def test_a_short_last_step_whose_prompts_span_microbatches_has_all_possible_folds(make_trainer) -> None:
    """Steps have eight microbatches of half a prompt, in four folds. The last step has four: two whole prompts."""
    witness = Witness()
    witness.needs, witness.num_folds = Need.FOLD_GRADIENTS, 4
    rows = make_trainer().train_dataset.select(range(6))
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 4}
    make_trainer(probes=[witness], train_dataset=rows, **(SHORT_LAST_STEP | shape)).train()
    assert [len(step.batch.microbatch_rows) for step in witness.kept_steps] == [8, 4]
    assert [step.batch.fold.tolist() for step in witness.kept_steps] == [
        [fold for fold in range(4) for _ in range(4)], [0] * 4 + [1] * 4,
    ]  # fmt: skip


def test_a_step_on_two_rollouts_is_measured_with_importance_ratios_for_the_older_one(make_trainer) -> None:
    """Six microbatches per rollout, four per step: two in the second step were sampled by the first step's weights."""
    witness = Witness()
    shape = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 6}
    trainer = make_trainer(probes=[witness, SimpleEntropyProbe(), EffectiveSampleSizeProbe()], max_steps=2, **shape)
    trainer.train()
    batch = witness.kept_steps[-1].batch
    ratios = (batch.scores.logps - batch.rollout.sampling_logps)[batch.scores.mask.bool()].abs()
    older = batch.scores.mask[:16].sum()
    assert ratios[:older].mean() > 1e-3
    torch.testing.assert_close(ratios[older:], torch.zeros_like(ratios[older:]), rtol=0, atol=1e-4)
    latest = trainer.attachment.latest
    for name in ("delta_h/forward", "delta_h/backward", "ess/importance"):
        assert math.isfinite(latest[name].value), latest[name].reason
    assert latest["ess/importance"].value < 32.0


def test_attaching_within_a_training_is_refused_and_possible_once_it_has_failed(make_trainer) -> None:
    """Its beginning is over: no step could be measured, and no report would be written."""
    moments = ["on_train_begin", "on_step_begin", "on_step_end"]
    said = []

    def attach_now(trainer: Any) -> None:
        with pytest.raises(UserError) as refused:
            attach(trainer, probes=[Witness()])
        said.append(str(refused.value))
        if len(said) == len(moments):
            raise KeyboardInterrupt

    trainer = make_trainer(GRPOTrainer, max_steps=1, **FEW)
    for moment in moments:
        trainer.add_callback(Acting(trainer, moment, attach_now))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all("before trainer.train()" in line for line in said)
    attach(trainer, probes=[Witness()]).remove()


def test_training_goes_on_after_an_interrupt_in_the_middle_of_a_step(make_trainer) -> None:
    class Interrupted(Witness):
        times = 0

        def measure(self, ctx: Any, state: Any) -> Reading:
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt
            return super().measure(ctx, state)

    trainer = make_trainer(probes=[Interrupted(), SimpleEntropyProbe()], max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_log_line_of_several_steps_has_the_latest_estimate_and_a_nan_loss_names_its_own_step(make_trainer) -> None:
    class Counting(Witness):
        def after_step(self, ctx: Any, reading: Reading) -> Reading:
            return Reading(measured={"counting/step": Estimate(float(len(self.kept_steps)))})

    trainer = make_trainer(probes=[Counting()], logging_steps=2)
    trainer.train()
    assert [line["counting/step"] for line in trainer.state.log_history if "counting/step" in line] == [2.0]
    with pytest.raises(ValueError, match=r"^step 2: loss is nan: training has diverged"):
        trainer.log({"loss": math.nan})


@pytest.mark.parametrize("bad", [math.inf, math.nan, None])
def test_a_non_finite_reward_stops_training_and_names_the_completion(make_trainer, bad) -> None:
    def broken(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.5] * (len(completions) - 1) + [bad]

    with pytest.raises(ValueError, match=r"step 1: 1 of 32 rewards .*broken.*completion '"):
        make_trainer(reward=broken).train()


def test_a_second_training_with_probes_is_refused_and_keeps_the_records_of_the_first(make_trainer, tmp_path) -> None:
    """Also of the step that Ctrl-C came after, which the trainer has not logged."""
    trainer = make_trainer(probes=[Witness()], records=Records(tmp_path / "logs"), logging_steps=9, max_steps=3, **FEW)
    trainer.add_callback(Acting(trainer, AFTER, interrupt_after_step_2))
    with pytest.raises(KeyboardInterrupt) as ended:
        trainer.train()
    before = read_estimates(tmp_path / "logs")
    assert [row["step"] for row in before] == [row["step"] for row in read_metrics(tmp_path / "logs")] == [1, 2]
    assert [note.partition("; ")[0] for note in ended.value.__notes__] == [
        f"what was measured until then is in {tmp_path / 'logs'}"
    ]
    with pytest.raises(ValueError, match=r"trained before.*resume_from_checkpoint=.*make a new trainer"):
        trainer.train()
    assert read_estimates(tmp_path / "logs") == before


def interrupt_after_step_2(trainer: Any) -> None:
    if trainer.state.global_step == 2:
        raise KeyboardInterrupt


ONE = {"witness/one": Estimate(1.0)}


def broken(ctx: Any, state: Any) -> None:
    raise RuntimeError("from the probe")


@pytest.mark.parametrize(
    ("hook", "does", "said"),
    [
        ("measure", lambda ctx, state: None, "^probe 'witness': measure must return a Reading, and returned None$"),
        ("measure", lambda ctx, state: {}, "^probe 'witness': measure must return a Reading, and returned a dict$"),
        (
            "measure",
            lambda ctx, state: Reading(measured={"witness/one": 0.5}),
            "^probe 'witness': measure must return Estimates by name, and 'witness/one' is a float$",
        ),
        (
            "measure",
            lambda ctx, state: Reading(measured=ONE),
            "^probe 'witness': measure must return the next state too, an int as from init.., and .* has None$",
        ),
        (
            "measure",
            lambda ctx, state: Reading(ONE, state=1),
            r"^probe 'witness': measure must return predictions only with needs = Need\.ENTROPY_GRADIENT",
        ),
        ("after_step", lambda ctx, reading: None, "^probe 'witness': after_step must return a Reading"),
        (
            "after_step",
            lambda ctx, reading: Reading(state=1),
            "^probe 'witness' returned nothing at step 1: return nan with a reason instead$",
        ),
        ("measure", broken, "from the probe"),
        ("measure", lambda ctx, state: ctx.prediction, r"needs = Need\.ENTROPY_CHANGE"),
    ],
)
def test_a_probe_that_breaks_its_contract_ends_training_with_the_reason(
    make_trainer, hook: str, does: Any, said: str
) -> None:
    witness = Witness()
    setattr(witness, hook, does)
    witness.init = lambda: 0  # type: ignore[method-assign]
    with pytest.raises((ValueError, RuntimeError), match=said):
        make_trainer(probes=[witness], max_steps=1, **FEW).train()


def test_gradients_are_kept_only_for_probes_that_need_them_until_the_step_ends(make_trainer) -> None:
    frugal, greedy = Witness("frugal"), Witness("greedy")
    greedy.needs = Need.FOLD_GRADIENTS
    make_trainer(probes=[frugal], max_steps=1).train()
    assert frugal.kept_steps[0].gradients.by_fold is None
    trainer = make_trainer(probes=[frugal, greedy], max_steps=2, **{**FEW, "per_device_train_batch_size": 8})
    trainer.train()
    assert len(greedy.kept_steps[0].gradients.by_fold) == 4
    assert trainer.attachment.driver._training.measurer._fold_recorder.by_fold is None


def test_an_entropy_change_read_by_several_probes_is_computed_once(make_trainer, monkeypatch) -> None:
    """Adding other probes that read it next to `simple` adds no passes."""

    class Reader(Witness):
        needs = Need.ENTROPY_CHANGE

        def measure(self, ctx: Any, state: Any) -> Reading:
            assert ctx.prediction.quantities
            return super().measure(ctx, state)

    asked = []
    score = Policy.score

    def counted(policy: Policy, rollout: Any, rows: Any, **options: Any) -> Any:
        asked.append(len(rows))
        return score(policy, rollout, rows, **options)

    monkeypatch.setattr(Policy, "score", counted)
    make_trainer(probes=[SimpleEntropyProbe(num_folds=4)], max_steps=1).train()
    alone, asked[:] = list(asked), []
    make_trainer(probes=[SimpleEntropyProbe(num_folds=4), Reader(), CovariancePredictorProbe()], max_steps=1).train()
    assert asked == alone


def test_a_trainable_parameter_that_the_loss_does_not_reach_is_treated_as_frozen(
    make_trainer,
) -> None:
    """The optimizer does not step it either, not even by weight decay."""
    latest, parameters = [], []
    for trained, probes in ((True, [SimpleEntropyProbe(), GradientNoiseScaleProbe()]), (False, None), (True, [])):
        witness = Witness()
        trainer = make_trainer(per_device_train_batch_size=4)
        trainer.model.register_parameter("unused", torch.nn.Parameter(torch.ones(3), requires_grad=trained))
        trainer.attachment.remove()
        attached = [SimpleEntropyProbe(), GradientNoiseScaleProbe()] if probes is None else probes
        with attach(trainer, probes=[*attached, witness] if attached else [], whole_prompts=True) as attachment:
            parameters.append(outcome(trainer).weights)
            latest.append(dict(attachment.latest))
        if trained and attached:
            step = witness.kept_steps[-1]
            assert not step.gradients.mean["unused"].any()
            assert not step.optimizer.states["unused"].delta(torch.ones(3), torch.zeros(3)).total.any()
    measured, frozen, bare = parameters
    assert all(torch.equal(measured[name], other[name]) for other in (frozen, bare) for name in measured)
    assert torch.equal(measured["unused"], torch.ones(3))
    assert latest[0].keys() >= latest[1].keys()
    for name, estimate in latest[1].items():
        latest_estimate = latest[0][name]
        expected = pytest.approx((estimate.value, estimate.stderr), rel=1e-5, abs=1e-9, nan_ok=True)
        assert (latest_estimate.value, latest_estimate.stderr) == expected, name


def test_gradients_consumed_within_the_backward_are_an_error(make_trainer) -> None:
    """Optimizers that step layer by layer do this. All parameters would look as if the loss did not reach them."""
    trainer = make_trainer(probes=[EffectiveSampleSizeProbe()])
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(ValueError, match="optim=adamw_torch"):
        trainer.train()


class Acting(TrainerCallback):
    """A user's callback that changes the trainer at one moment of its training."""

    def __init__(self, trainer: Any, moment: str, act: Callable[[Any], object]) -> None:
        setattr(self, moment, lambda *args, **kwargs: act(trainer) and None)


class BackwardTwice(DrGRPOTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.accelerator.backward(loss, retain_graph=True)
        return loss


class NotUnscaled(DrGRPOTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        each_gradient(lambda gradient: gradient.mul_(1024.0))(self)
        return loss


def each_gradient(change: Callable[[torch.Tensor], object]) -> Callable[[Any], object]:
    return lambda trainer: [change(parameter.grad) for parameter in trainer.model.parameters()]


def each_weight(change: Callable[[torch.Tensor], object]) -> Callable[[Any], object]:
    return lambda trainer: [change(parameter.data) for parameter in trainer.model.parameters()]


def another_rate(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 2.0


def another_optimizer(trainer: Any) -> None:
    torch.optim.SGD(trainer.model.parameters(), lr=0.1).step()


def no_clip(trainer: Any) -> None:
    trainer.accelerator.clip_grad_norm_ = lambda *args, **kwargs: torch.tensor(1.0)


def no_zero_grad(trainer: Any) -> None:
    trainer.model.zero_grad = lambda *args, **kwargs: None


BEFORE, BETWEEN, AFTER = "on_pre_optimizer_step", "on_substep_end", "on_step_end"
WRONG_STEPS: dict[str, tuple[type[GRPOTrainer], str, Callable[[Any], object]]] = {
    "backward twice": (BackwardTwice, AFTER, str),
    "scaled gradients": (NotUnscaled, AFTER, str),
    "a promised clip that is not made": (DrGRPOTrainer, "on_train_begin", no_clip),
    "a clip that was not promised": (DrGRPOTrainer, BEFORE, each_gradient(lambda g: g.clamp_(-1e-4, 1e-4))),
    "zero_grad forgotten": (DrGRPOTrainer, "on_train_begin", no_zero_grad),
    "zero_grad between microbatches": (DrGRPOTrainer, BETWEEN, each_gradient(torch.Tensor.zero_)),
    "gradients reversed": (DrGRPOTrainer, BEFORE, each_gradient(torch.Tensor.neg_)),
    "another learning rate": (DrGRPOTrainer, BEFORE, another_rate),
    "a second optimizer": (DrGRPOTrainer, BEFORE, another_optimizer),
    "weights edited between microbatches": (DrGRPOTrainer, BETWEEN, each_weight(lambda w: w.mul_(1.01))),
    "garbage": (DrGRPOTrainer, BEFORE, each_weight(torch.Tensor.normal_)),
}


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_step_that_differs_from_the_predicted_one_has_no_prediction_but_a_reason(make_trainer, wrong: str) -> None:
    trainer_class, moment, act = WRONG_STEPS[wrong]
    trainer = make_trainer(trainer_class, probes=[SimpleEntropyProbe()], max_grad_norm=0.05, **FEW)
    trainer.add_callback(Acting(trainer, moment, act))
    trainer.train()
    forward = trainer.attachment.latest["delta_h/forward"]
    assert math.isnan(forward.value)
    assert forward.code in ("gradient_mismatch", "not_the_formula", "edited_within_step")
    assert forward.code != "not_the_formula" or "leave gradients as" in forward.reason


def loss_again(trainer: Any) -> None:
    trainer.compute_loss(trainer.model, trainer._buffered_inputs[0])


def test_weights_edited_by_a_callback_are_not_the_step_of_the_optimizer(make_trainer) -> None:
    """Another callback computes a loss once the gradients are complete, which is no microbatch of the step."""
    trainer = make_trainer(probes=[SimpleEntropyProbe()], **FEW)
    trainer.add_callback(Acting(trainer, BEFORE, loss_again))
    trainer.add_callback(Acting(trainer, AFTER, each_weight(lambda weight: weight.mul_(1.01))))
    trainer.train()
    assert math.isfinite(trainer.attachment.latest["delta_h/forward"].value)
    assert "step 1: weights were changed" in trainer.attachment.latest["delta_h/backward"].reason


@pytest.mark.parametrize(("moment", "said"), [(BEFORE, "between the probes' measurement and"), (AFTER, "after it by")])
def test_a_second_optimizer_is_detected_beside_one_without_a_formula(make_trainer, moment: str, said: str) -> None:
    trainer = make_trainer(probes=[SimpleEntropyProbe()], optim="adagrad", **FEW)
    act = another_optimizer if moment == BEFORE else each_weight(lambda weight: weight.mul_(1.01))  # no gradients
    trainer.add_callback(Acting(trainer, moment, act))
    trainer.train()
    assert f"step 1: weights were changed {said}" in trainer.attachment.latest["delta_h/backward"].reason
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks  # no hook is left


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which skips torch's own __init__, as ScheduleFree's and Lookahead's do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_an_optimizer_that_torch_did_not_set_up_is_measured_without_a_formula(make_trainer) -> None:
    model = load_tiny()[0]
    optimizer = Wrapper(torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [1e-3])
    trainer = make_trainer(GRPOTrainer, **FEW, model=model, optimizers=(optimizer, schedule))
    attached = attach(trainer, probes=[SimpleEntropyProbe()], whole_prompts=True)
    trainer.train()
    assert attached.latest["delta_h/forward"].code == "no_formula"
    assert math.isfinite(attached.latest["entropy/token"].value), attached.latest["entropy/token"].reason


def test_a_step_that_the_optimizer_does_not_take_is_detected_as_skipped(make_trainer) -> None:
    def no_step(trainer: Any) -> None:
        trainer.optimizer.optimizer.step = lambda *args, **kwargs: None

    trainer = make_trainer(probes=[SimpleEntropyProbe()], **FEW)
    trainer.add_callback(Acting(trainer, "on_train_begin", no_step))
    trainer.train()
    latest = trainer.attachment.latest
    assert latest["delta_h/forward"].code == "left_out"
    assert latest["delta_h/backward"].reason == LEFT_OUT.prefixed("step 1")
    assert math.isfinite(latest["entropy/token"].value)
