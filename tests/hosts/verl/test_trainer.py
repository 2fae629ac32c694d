"""The order of rows, what the engine gets with them, and what is refused, with values worked by hand."""

from __future__ import annotations

import functools
import itertools
import math
import re
import shlex
import types
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("verl.workers")

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.trainer_base import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.utils import prepare_micro_batches

from rl_training.engine.driver import StepDriver
from rl_training.engine.fold_advice import more_folds_fix
from rl_training.engine.loop_spec import LoopSpec
from rl_training.errors import UserError
from rl_training.hosts.verl.loop_spec import FIXES, dr_grpo_settings, end_tokens_of
from rl_training.hosts.verl.measurement import Measurement
from rl_training.hosts.verl.message import rollout_facts
from rl_training.hosts.verl.refusals import ESTIMATORS
from rl_training.hosts.verl.trainer import TRAINER, ProbedTrainer, with_probes
from rl_training.hosts.verl.training_settings import training_settings
from rl_training.hosts.verl.whole_prompts import whole_prompts_fix, whole_prompts_order
from rl_training.parallel.ranks import Ranks
from rl_training.probes import SimpleEntropyProbe
from rl_training.step.folds import DEFAULT_NUM_FOLDS, plan_folds, plan_prompt_folds


def test_row_order_keeps_prompts_whole_and_balances_ranks() -> None:
    """Two long prompts and two short ones arrive, and each rank gets one of each."""
    keys = [f"{uid}_{session}_0" for session in range(2) for uid in ("a-long", "b-short", "c-short", "d-long")]
    lengths = [100 if "long" in key else 10 for key in keys]
    rows = whole_prompts_order(keys, lengths, ranks=2)
    assert rows is not None
    uids = [keys[row].split("_")[0] for row in rows]
    assert uids[::2] == uids[1::2]
    assert all({uid.split("-")[1] for uid in half} == {"long", "short"} for half in (uids[:4], uids[4:]))


@pytest.mark.parametrize("keys", [["a_0_0", "a_1_0", "b_0_0"], ["a_0_0", "a_1_0"]])
def test_prompts_that_do_not_divide_evenly_keep_verls_order(keys: list[str]) -> None:
    assert whole_prompts_order(keys, [5] * len(keys), ranks=2) is None


# --- settings ---------------------------------------------------------------------------------------------------------

FITTING = ["actor_rollout_ref.actor.strategy=fsdp2", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4",
           "+probes.simple._target_=rl_training.probes.SimpleEntropyProbe"]  # fmt: skip


def config_of(*words: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*FITTING, *words])


def test_a_supported_configuration_gets_engine_and_trainer_and_keeps_the_users_library() -> None:
    config = with_probes(config_of("actor_rollout_ref.model.external_lib=mine"))
    assert list(config.actor_rollout_ref.model.external_lib) == ["mine", "rl_training.hosts.verl"]
    assert config.trainer.v1.trainer_mode == TRAINER


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        (f"{ACTOR}.strategy=fsdp", f"set {ACTOR}.strategy=fsdp2"),
        ("trainer.v1.trainer_mode=separate_async", "set trainer.v1.trainer_mode=sync"),
        (f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16", "param_dtype=bf16"),
        (f"{ACTOR}.fsdp_config.offload_policy=True", "offload_policy=False"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size=1"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "use_fused_kernels=False"),
        ("actor_rollout_ref.model.enable_activation_offload=True", "enable_activation_offload=False"),
        ("algorithm.adv_estimator=gae", "adv_estimator=grpo"),
        ("actor_rollout_ref.rollout.n=1", "set actor_rollout_ref.rollout.n=2"),
        ("~probes.simple", "probe=all"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused_with_the_fix(setting: str, fix: str) -> None:
    with pytest.raises(ValueError, match="main_ppo") as refused:
        with_probes(config_of(setting))
    assert fix in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_advice_for_more_folds_names_verls_settings_and_following_it_gives_enough(ranks: int) -> None:
    """Verl refuses microbatches of a part of a prompt: each holds whole prompts."""
    kinds = set()
    for group, prompts, count in itertools.product((2, 4, 8), (1, 2, 3, 8), (1, 2, 3, 6)):
        size = group * prompts
        if plan_folds([size] * count, group, ranks)[-1].folds.stop >= DEFAULT_NUM_FOLDS:
            continue
        loop = LoopSpec(group, size, count, cast(Any, None), cast(Any, None), Ranks(ranks, torch.clone), FIXES)
        said = more_folds_fix(loop, [SimpleEntropyProbe()], can_recompute=True)
        asked = re.search(rf"(?:{MICROBATCH}=(\d+) )?{ACTOR}\.ppo_mini_batch_size=(\d+), with data.train_batch_", said)
        cut = re.search(r"probes\.simple\.num_folds=(\d+)", said)
        assert asked or cut, said
        if asked:
            new, sequences = int(asked[1] or size), int(asked[2]) * group
            assert sequences % (new * ranks) == 0
            assert plan_folds([new] * (sequences // new // ranks), group, ranks)[-1].folds.stop >= DEFAULT_NUM_FOLDS
            kinds.add("larger" if sequences > size * count * ranks else "smaller")
        if cut:
            assert plan_prompt_folds(prompts * count, ranks, int(cut[1]))[-1].folds.stop == int(cut[1])
            kinds.add("cut")
    assert kinds == {"larger", "smaller", "cut"}


class NamedVerl(SimpleEntropyProbe):
    name = "verl"  # a checkpoint has the number of steps under it


class NamedEngine(SimpleEntropyProbe):
    name = "engine"


def test_probes_that_workers_could_not_run_are_refused_with_one_line_before_they_start() -> None:
    mine = f"+probes.mine._target_={__name__}.NamedVerl"
    again = "+probes.again._target_=rl_training.probes.SimpleEntropyProbe"
    eight_prompts = ["trainer.n_gpus_per_node=1", f"{ACTOR}.ppo_mini_batch_size=8", f"{MICROBATCH}=8"]
    for settings, said in (
        ([mine], "the name verl is reserved"),
        ([mine.replace("NamedVerl", "NamedEngine")], "the name engine is reserved"),
        ([again], r"\['simple'\]"),
        (["+probes.simple.evry=3"], r"probes\.simple: .*evry"),
        (["+probes.simple.fold_dtype=int3"], r"probes\.simple: .*int3"),
        (["probes.simple._target_=no_such_module.Probe"], r"probes\.simple: .*no_such_module"),
        ([*eight_prompts, "+probes.simple.num_folds=9"], r"num_folds=9 .*num_folds=8"),
        ([*eight_prompts, f"{MICROBATCH}=2", "+probes.simple.num_folds=9"], r"num_folds=9 .*num_folds=8"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            with_probes(config_of(*settings))
        assert "\n" not in str(refused.value)
    with_probes(config_of(*eight_prompts, "+probes.simple.num_folds=8"))


def tag(version: int) -> dict[str, int]:
    return {"min_global_steps": version, "max_global_steps": version}


def test_the_engine_receives_what_it_cannot_see_of_training_and_rollout() -> None:
    assert rollout_facts([tag(4)] * 8, 5) == {"number": 5, "is_fresh": True}
    settings = training_settings(config_of("algorithm.norm_adv_by_std_in_grpo=False"), 2)
    assert settings["probes"] == {"simple": {"_target_": "rl_training.probes.SimpleEntropyProbe"}}
    assert (settings["responses_per_prompt"], settings["end_tokens"]) == (4, [2])
    assert (settings["has_plain_advantages"], settings["sampling_mismatch"]) == (True, "")


def test_settings_that_change_training_are_recorded_and_others_are_not() -> None:
    def recorded(*words: str) -> Any:
        return training_settings(config_of(*words), None)["recorded"]

    plain = recorded()
    for word in (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.clip_ratio_high=0.28",
                 "algorithm.use_kl_in_reward=True", "actor_rollout_ref.rollout.top_p=0.9", "data.train_batch_size=8",
                 "reward.custom_reward_function.path=mine.py"):  # fmt: skip
        assert recorded(word) != plain, word
    for word in ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "data.dataloader_num_workers=0",
                 "data.val_files=other.parquet", f"{ACTOR}.profiler.enable=True", "trainer.save_freq=5"):  # fmt: skip
        assert recorded(word) == plain, word


@pytest.mark.parametrize("configured", [7, [2, 7]])
def test_stop_tokens_of_the_generation_config_end_a_response_too(configured: Any) -> None:
    model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=configured))
    settings = training_settings(config_of(), 2)
    assert end_tokens_of(cast(Any, types.SimpleNamespace(model_config=model)), settings) == [2, 7]


def test_a_step_that_no_probe_measures_needs_no_norm_before_verls_own(caplog: pytest.LogCaptureFixture) -> None:
    """Verl's own then tells whether it makes the step. The first that it skips is told, and all keep their number."""
    measurement = object.__new__(Measurement)
    measurement.driver, measurement._number, measurement._rollout_number = StepDriver([]), 0, 0
    measurement._has_warned_of_skipped = False
    group = types.SimpleNamespace(param_groups=[{"lr": 0.1}])
    measurement._loop = cast(Any, types.SimpleNamespace(
        ranks=Ranks(1, torch.clone), shard=types.SimpleNamespace(optimizer=group)
    ))  # fmt: skip
    for rollout, norm in enumerate((1.0, math.nan, math.inf, 1.0), start=1):
        measurement.begin({"number": rollout, "is_fresh": True}, lambda: pytest.fail("microbatches are cut twice"))
        measurement.optimizer_step(lambda norm=norm: norm, lambda: pytest.fail("the norm is computed twice"))
        assert measurement._metrics.get("skipped", 0) == (not math.isfinite(norm))
        assert measurement._is_fresh == (not math.isfinite(norm))
        measurement.driver.finish()
    assert measurement._number == 4
    assert [line.message.partition(":")[0] for line in caplog.records] == ["step 2"]


DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=True", "data.max_prompt_length=500", "data.max_response_length=1500"]
EIGHT_GPUS = ["trainer.n_gpus_per_node=4", "trainer.nnodes=2", f"{ACTOR}.ppo_mini_batch_size=16"]
MICROBATCH = f"{ACTOR}.ppo_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ([f"{MICROBATCH}=8"], ""),
        ([f"{MICROBATCH}=2"], ""),
        ([f"{MICROBATCH}=6"], f"set {MICROBATCH} to a multiple or a divisor of actor_rollout_ref.rollout.n=4"),
        ([f"{MICROBATCH}=8", f"{ACTOR}.shuffle=True"], f"set {ACTOR}.shuffle=False"),
        ([f"{MICROBATCH}=8", f"{ACTOR}.ppo_mini_batch_size=12"], "ppo_mini_batch_size to a multiple of 8, the number"),
        ([*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=8000"], ""),
        ([*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=7999"], f"set {ACTOR}.ppo_max_token_len_per_gpu=8000 or more"),
    ],
)
def test_settings_that_split_the_responses_of_a_prompt_are_named_with_the_fix(settings: list[str], fix: str) -> None:
    reason = whole_prompts_fix(config_of(*EIGHT_GPUS, *settings))
    assert fix in reason
    assert bool(reason) == bool(fix)


@pytest.mark.parametrize(("prompts", "group"), [(32, None), (64, 8)])
def test_prompt_groups_are_forced_only_where_a_process_has_whole_prompts(
    prompts: int, group: int | None, monkeypatch
) -> None:
    """On 64 GPUs a mini batch of 32 prompts with 8 responses gives each GPU 4 rows: verl cannot make groups of 8."""
    monkeypatch.setattr(PPOTrainerSync, "_update_actor", lambda self, batch, metrics: batch)
    trainer = object.__new__(ProbedTrainer)
    settings = [*DYNAMIC, "trainer.n_gpus_per_node=8", "trainer.nnodes=8", "actor_rollout_ref.rollout.n=8"]
    trainer.config = config_of(*settings, f"{ACTOR}.ppo_mini_batch_size={prompts}")
    trainer.tokenizer, trainer.global_steps = types.SimpleNamespace(eos_token_id=2), 1
    info = trainer._update_actor(KVBatchMeta(keys=["a_0_0"], tags=[tag(0)]), {}).extra_info
    assert info.get("force_group_size") == group
    rows = prompts * 8 // 64
    ids = torch.nested.as_nested_tensor([torch.arange(3)] * rows, layout=torch.jagged)
    data = TensorDict({"input_ids": ids}, batch_size=rows)
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=True, max_token_len_per_gpu=100, force_group_size=info.get("force_group_size", 1)
    )
    assert sum(map(len, prepare_micro_batches(data)[0])) == rows


@pytest.mark.parametrize("name", ESTIMATORS)
def test_supported_estimators_give_one_advantage_per_response(name: str) -> None:
    """Two prompts have four responses each, of one to three tokens, with a reward on the last token."""
    mask = (torch.arange(3) < torch.tensor([1, 2, 3, 3, 2, 2, 1, 3]).unsqueeze(1)).long()
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25])
    last = torch.nn.functional.one_hot(mask.sum(dim=1) - 1, 3)
    batch = {"token_level_rewards": rewards.unsqueeze(1) * last, "response_mask": mask}
    data = DataProto.from_dict(batch, non_tensors={"uid": np.array(list("aaaabbbb"), dtype=object)})
    computed = compute_advantage(data, name, norm_adv_by_std_in_grpo=False, config=AlgoConfig()).batch["advantages"]
    assert torch.equal(computed * mask, computed[:, :1] * mask)
    plain = rewards - rewards.view(2, 4).mean(dim=1).repeat_interleave(4)
    assert torch.allclose(computed[:, 0], plain) == (name == "grpo")  # the only estimator that can be Dr-GRPO's


@pytest.mark.parametrize("tags", [[tag(4), tag(3)], [tag(3)], [{}]])
def test_responses_of_older_weights_are_not_fresh(tags: list[dict[str, int]]) -> None:
    assert not rollout_facts(tags, 5)["is_fresh"]


def test_top_p_is_named_with_the_fix_and_normalized_advantages_are_not_dr_grpos() -> None:
    settings = training_settings(config_of("actor_rollout_ref.rollout.top_p=0.9"), None)
    assert settings["sampling_mismatch"].endswith("set actor_rollout_ref.rollout.top_p=1")
    assert not settings["has_plain_advantages"]


def test_the_documented_command_is_supported_and_has_dr_grpos_loss() -> None:
    command = (Path(__file__).parents[3] / "examples" / "verl_gsm8k.sh").read_text(encoding="utf-8")
    words = [word for word in shlex.split(command.replace("\\\n", " "), comments=True) if "=" in word]
    config = with_probes(config_of(*(word for word in words if not word.startswith("probe="))))
    settings = training_settings(config, None)
    assert (settings["has_plain_advantages"], settings["sampling_mismatch"]) == (True, "")
    actor = config.actor_rollout_ref.actor
    assert actor.loss_scale_factor == config.data.max_response_length
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.n * longest <= actor.ppo_max_token_len_per_gpu


DR_GRPO = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 12, "clip_ratio_low": 0.1}


def settings_of_loss(**changes: Any) -> Any:
    known = {"strategy": "fsdp2", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4, **DR_GRPO, **changes}
    return dr_grpo_settings(functools.partial(print, config=FSDPActorConfig(**known)), TensorDict({}, batch_size=2))


def test_dr_grpos_loss_is_recognized_by_its_settings() -> None:
    settings = settings_of_loss()
    assert (settings.max_length, settings.epsilon_low, settings.epsilon_high, settings.hides_truncated) == (
        12,
        0.1,
        0.2,
        False,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"loss_agg_mode": "token-mean"},
        {"loss_scale_factor": None},
        {"use_kl_loss": True},
        {"entropy_coeff": 0.01},
        {"policy_loss": PolicyLossConfig(loss_mode="gspo")},
    ],
)
def test_another_loss_is_not_mistaken_for_dr_grpos(change: dict[str, Any]) -> None:
    assert settings_of_loss(**change) is None
