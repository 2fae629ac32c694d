"""Several processes measure the same as one, under DDP, ZeRO and FSDP2. An impossible launch ends with the reason.

The runs of tests/support/replay.py train on the same given rollouts. The first half of the sequences, rank 0's share,
has up to 24 tokens each, the second half up to 9. At the first of two steps the second half has zero advantage.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from configs import QUICK, launched_program
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from same_estimates import above_limit, differences, of_records

from rl_training.hosts.trl.refusals import (
    READABLE_STAGES,
    refuse_deepspeed_that_cannot_be_read,
    refuse_fsdp_that_cannot_be_read,
)
from rl_training.job.objects.trainer_checks import check_sharding
from rl_training.offline.restored import restore
from rl_training.records.checkpoint_flaws import find_flaw
from rl_training.records.jsonl import read_metrics

ROOT = Path(__file__).parents[3]
NO_DEEPSPEED = "" if importlib.util.find_spec("deepspeed") else "needs deepspeed: pip install -e '.[deepspeed]'"
SHARDED = ["zero2_2", "zero3_2", "fsdp2_2"]
ALL_SHARDED = ["zero1_2", *SHARDED]
BY_FOLDS = ("intervention/", "tokens/", "top_token/")
FRESH = ("delta_h/true", "delta_h/evaluation", "delta_h/ess", "delta_h/weight_")  # estimates of GroundTruthProbe


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all runs, and return the folder that contains a folder for each."""
    folder = tmp_path_factory.mktemp("replay")
    names = ["plain_2", "plain_2_bare", "plain_1", "plain_1_continued", *SHARDED, "zero1_2_lora"]
    names += ["zero1_2", *(f"{run}_bare" for run in (*ALL_SHARDED, "fsdp2_2_bf16"))] + [
        f"{run}_resumed" for run in SHARDED[1:]
    ]
    names += ["fsdp2_2_bf16", "plain_1_remedied", "plain_2_remedied"]
    names += [f"{run}_bounded" for run in ("plain_1", "plain_2", *SHARDED)]
    names = [name for name in names if not (NO_DEEPSPEED and name.startswith("zero"))]
    ended = forks.run("tests/support/replay.py", str(folder), *names)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return folder


def saved(runs: Path, run: str, rank: int = 0) -> dict[str, Any]:
    if run.startswith("zero") and NO_DEEPSPEED:
        pytest.skip(NO_DEEPSPEED)
    return torch.load(runs / run / f"{rank}.pt")


def estimates(runs: Path, run: str, *, fresh: bool = False) -> dict[tuple[int, str], tuple[float, float]]:
    """Return the estimates from the given rollouts, or (`fresh`) from responses that the run samples itself."""
    recorded = of_records(runs / run / "logs")
    return {
        key: row for key, row in recorded.items() if key[1].startswith(FRESH) == fresh and "halves_at" not in key[1]
    }


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(x.double().square().sum()) for x in tensors.values()))


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert that the joint difference is within 1e-5 of the joint norm."""
    assert a.keys() == b.keys()
    assert norm_of({name: a[name] - b[name] for name in a}) <= 1e-5 * norm_of(a)


def of_kind(step: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in step.items() if name.startswith(f"{kind}/")}


def joined_steps(runs: Path, run: str) -> list[dict[str, torch.Tensor]]:
    """Return the steps of two processes with their shards of the flat tensors concatenated."""
    pairs = zip(saved(runs, run, 0)["steps"], saved(runs, run, 1)["steps"], strict=True)
    return [{name: torch.cat([part, second[name]]) for name, part in first.items()} for first, second in pairs]


# --- DDP and ZeRO -----------------------------------------------------------------------------------------------------


def test_two_processes_give_the_estimates_of_one_from_the_same_rollouts(runs: Path) -> None:
    """This covers all values: δH, noise scale, sample sizes. δH's error bar may differ: see the documented limits."""
    assert above_limit(differences(estimates(runs, "plain_1"), estimates(runs, "plain_2"), fields=1)) == {}


@pytest.mark.parametrize("run", ["zero2_2", "zero3_2"])  # for DDP and FSDP2 see parallel/test_sharding.py
def test_two_processes_give_the_intervention_and_token_estimates_of_one(runs: Path, run: str) -> None:
    """Values and error bars agree: a fold that is left out is also missing from the other process's updates.

    To 1e-4, because much cancels in small classes, and Adam's v is close to 0 in the first steps.
    """
    saved(runs, run)  # skipped where DeepSpeed is not installed
    first, second = (
        {key: row for key, row in estimates(runs, name).items() if key[1].startswith(BY_FOLDS)}
        for name in ("plain_1", run)
    )
    off = differences(first, second)
    assert len(off) > 50
    assert above_limit(off, 1e-4) == {}


def test_two_processes_train_with_interventions_like_one(runs: Path) -> None:
    """To 1e-5 of the change by the interventions, which is 3e-8 of the weights."""
    first, second, plain = (
        saved(runs, run)["parameters"] for run in ("plain_1_remedied", "plain_2_remedied", "plain_1")
    )
    changed, off = ({name: weight - other[name] for name, weight in first.items()} for other in (plain, second))
    assert norm_of(off) <= 1e-5 * norm_of(changed)


@pytest.mark.parametrize("run", ["plain_2", *SHARDED])
def test_two_processes_bound_a_step_like_one(runs: Path, run: str) -> None:
    """KL and factor are computed over all processes. The resulting weights agree to 1e-5 of the bound's change."""
    first, second = (saved(runs, f"{name}_bounded")["parameters"] for name in ("plain_1", run))
    unbounded = saved(runs, "plain_1")["parameters"]
    assert norm_of({name: weight - second[name] for name, weight in first.items()}) <= 1e-5 * norm_of(
        {name: weight - unbounded[name] for name, weight in first.items()}
    )
    expected, estimates_of_run = (estimates(runs, f"{name}_bounded") for name in ("plain_1", run))
    assert estimates_of_run.keys() == expected.keys()
    assert expected[1, "bound/tries"][0] > 0
    for key, (value, _) in expected.items():
        assert estimates_of_run[key][0] == pytest.approx(value, rel=1e-3), key


@pytest.mark.parametrize("run", ["plain_2", *SHARDED])
def test_shards_of_gradients_and_states_join_to_those_of_one_process(runs: Path, run: str) -> None:
    """Compared before clipping, which affects every step. Each process holds about half of all entries."""
    steps = joined_steps(runs, run)
    assert len(steps) == 2
    for a, b in zip(saved(runs, "plain_1")["steps"], steps, strict=True):
        for kind in ("gradient", "exp_avg", "exp_avg_sq"):
            assert_same_tensors(of_kind(a, kind), of_kind(b, kind))
    for rank in (0, 1):
        sharded = saved(runs, run, rank)
        assert_same_tensors(saved(runs, "plain_1")["parameters"], sharded["parameters"])
        part, whole = (
            sum(map(torch.numel, steps[0].values())) for steps in (sharded["steps"], joined_steps(runs, run))
        )
        assert 0.4 < part / whole < 0.6
    if run.startswith("zero"):  # DeepSpeed was really used: it calls large collectives from Python, unlike DDP
        assert max(sharded["collectives"]) > 10_000


@pytest.mark.parametrize("run", ["zero2_2", "zero1_2_lora"])
def test_a_zero_checkpoint_is_restored_with_the_moments_of_its_next_step(runs: Path, run: str, make_trainer):
    """They are bitwise those that the run's second step had on its processes. The weights are the file's."""
    second = joined_steps(runs, run)[1]
    checkpoint = runs / run / "state" / "checkpoint-1"
    adapter = LoraConfig.from_pretrained(checkpoint) if run.endswith("lora") else None
    if adapter:
        adapter.inference_mode = False  # it is always saved as True, which would freeze the adapter
    restored = restore(make_trainer(peft_config=adapter, lr_scheduler_type="linear", max_steps=2), checkpoint)
    assert restored.optimizer.states is not None
    assert set(restored.optimizer.states) == {name.partition("/")[2] for name in of_kind(second, "exp_avg")}
    assert restored.learning_rate == pytest.approx(1.5e-4)
    weights = load_file(checkpoint / ("adapter_model.safetensors" if adapter else "model.safetensors"))
    for name, state in restored.optimizer.states.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(state, moment).flatten(), second[f"{moment}/{name}"])
        assert torch.equal(restored.parameters[name], weights[name.replace(".default.", ".")])


def test_an_fsdp_checkpoint_is_refused(runs: Path, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"fsdp2_2/state/checkpoint-1 .*FSDP"):
        restore(make_trainer(), runs / "fsdp2_2" / "state" / "checkpoint-1")


@pytest.mark.parametrize("run", ["plain_2", *SHARDED])
def test_the_mean_of_the_fold_gradients_is_the_gradient(runs: Path, run: str) -> None:
    for step in (step for rank in (0, 1) for step in saved(runs, run, rank)["steps"]):
        means = {f"gradient/{name.removeprefix('own/')}": mean for name, mean in of_kind(step, "own").items()}
        assert_same_tensors(of_kind(step, "gradient"), means)


@pytest.mark.parametrize("run", ["zero2_2", "fsdp2_2"])
def test_attach_leaves_one_run_folder_under_a_sharded_launch(runs: Path, run: str) -> None:
    """Its estimates agree with the other launches: see the tests below."""
    assert [saved(runs, run, rank)["listens"] for rank in (0, 1)] == [True, True]  # none ends before the report
    assert yaml.safe_load((runs / run / "config.yaml").read_text())["batch"]["processes"] == 2
    assert (runs / run / "report" / "report.html").is_file()
    assert [row["step"] for row in read_metrics(runs / run / "logs")] == [1, 2]
    assert not (runs / f"{run}-2").exists()


@pytest.mark.parametrize("run", ALL_SHARDED)
def test_sharded_launches_give_the_estimates_of_ddp(runs: Path, run: str) -> None:
    saved(runs, run)
    first, other = (
        {key: row for key, row in estimates(runs, name).items() if not key[1].startswith(BY_FOLDS)}
        for name in ("plain_2", run)
    )
    off = differences(first, other)
    assert len(off) > 30
    assert above_limit(off) == {}


@pytest.mark.parametrize("run", ["plain_2", *ALL_SHARDED, "fsdp2_2_bf16"])
def test_training_with_probes_is_bitwise_training_without_them_on_every_rank(runs: Path, run: str) -> None:
    for rank in (0, 1):
        probed, bare = (saved(runs, name, rank)["parameters"] for name in (run, f"{run}_bare"))
        assert [name for name in bare if not torch.equal(bare[name], probed[name])] == []


@pytest.mark.parametrize(("run", "sharded_by"), [("zero3_2", "DeepSpeed"), ("fsdp2_2", "FSDP")])
def test_training_with_sharded_weights_resumes_bitwise_from_its_checkpoint(runs, run, sharded_by: str) -> None:
    for rank in (0, 1):
        whole, resumed = (saved(runs, name, rank)["parameters"] for name in (run, f"{run}_resumed"))
        assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    last, again = (
        {key: row for key, row in estimates(runs, name).items() if key[0] == 2 and not key[1].startswith(BY_FOLDS)}
        for name in (run, f"{run}_resumed")
    )
    assert len(last) > 40
    assert repr(again) == repr(last)  # repr, so that nan equals nan
    checkpoint = runs / run / "state" / "checkpoint-1"
    assert find_flaw(checkpoint, sharded_by) == ""
    assert find_flaw(checkpoint) == f"it was written under {sharded_by}: resume with the same launch file"


def test_a_run_resumed_with_another_number_of_processes_has_its_last_update(runs: Path) -> None:
    """Each process reads its own entries of that update, for `backward`. Error bars continue from earlier steps."""
    last, again = (
        {key: row for key, row in estimates(runs, name).items() if key[0] == 2 and not key[1].startswith(BY_FOLDS)}
        for name in ("plain_1", "plain_1_continued")
    )
    assert math.isfinite(last[2, "delta_h/backward"][0])
    assert above_limit(differences(last, again)) == {}


@pytest.mark.parametrize("run", ["zero3_2", "fsdp2_2"])
def test_with_gathered_weights_a_process_may_sample_more_batches_than_another(runs: Path, run: str) -> None:
    """By default transformers would make the processes wait for one another at each token, forever."""
    assert [saved(runs, run, rank)["fresh"] for rank in (0, 1)] == [33, 32]


@pytest.mark.parametrize("run", ["zero3_2", "fsdp2_2"])
def test_the_effect_of_a_sharded_step_is_measured_at_the_new_weights(runs: Path, run: str) -> None:
    """As with unsharded weights: the same responses, scored before and after each step."""
    saved(runs, run)
    whole, cut = (estimates(runs, name, fresh=True) for name in ("plain_2", run))
    for name in ("delta_h/true", "delta_h/true_sequence", "delta_h/evaluation"):
        value, stderr = whole[1, name]
        assert abs(value) > 0.01 * stderr > 0
        assert cut[1, name][0] == pytest.approx(value, abs=1e-3 * stderr), name


def test_in_mixed_precision_fsdp2_shows_probes_the_weights_before_they_are_rounded(runs: Path) -> None:
    """With rounded weights a step's measured change of entropy would be rounding noise, 13 standard errors off."""
    exact, mixed = estimates(runs, "plain_2"), estimates(runs, "fsdp2_2_bf16")
    for step in (1, 2):
        for name in ("delta_h/forward", "delta_h/backward"):
            value, stderr = exact[step, name]
            assert mixed[step, name][0] == pytest.approx(value, abs=0.2 * stderr, nan_ok=True), (step, name)
    weights = [tensor for tensor in saved(runs, "fsdp2_2_bf16")["parameters"].values() if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.float32 for tensor in weights)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights)


def test_under_ddp_probes_send_only_a_few_numbers_besides_gradients(runs: Path) -> None:
    """Counts collectives called from Python, TRL's included, except for the histograms of token classes.

    Not counted either: the folds' gradients, and the weights that `measured` swaps in and out, which are exchanged.
    """
    probed, bare = saved(runs, "plain_2")["collectives"], saved(runs, "plain_2_bare")["collectives"]
    assert len(probed) > len(bare)
    assert [count for count in probed if count > 500 and count % 2**15] == []  # squared norms: 2 per parameter and fold


def test_a_rank_without_any_advantage_joins_all_collectives(runs: Path) -> None:
    rows = estimates(runs, "plain_2")
    assert rows[1, "ess/zero_advantage"][0] == 0.5
    for name in ("delta_h/forward", "gns/trace_step", "ess/token_weight"):
        assert math.isfinite(rows[1, name][0])


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({}, "stage 0"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "fp16"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
    ],
)
def test_an_unsupported_deepspeed_setup_is_refused_with_the_fix(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_deepspeed_that_cannot_be_read(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_version": 1}, r"FSDP1.* fsdp_version: 2 "),
        ({"fsdp_version": 2, "cpu_offload": True}, "fsdp_offload_params: false"),
    ],
)
def test_an_unsupported_fsdp_setup_is_refused_with_the_fix(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_fsdp_that_cannot_be_read(FullyShardedDataParallelPlugin(**settings))
    refuse_fsdp_that_cannot_be_read(FullyShardedDataParallelPlugin(fsdp_version=2))


def test_the_shipped_deepspeed_configurations_are_supported() -> None:
    for stage in READABLE_STAGES:
        refuse_deepspeed_that_cannot_be_read({"zero_optimization": {"stage": stage}})
        assert f'"stage": {stage}' in (ROOT / "launch" / f"zero{stage}.json").read_text(encoding="utf-8")


def test_a_deepspeed_checkpoint_is_complete_only_with_its_engine_states(tmp_path: Path) -> None:
    """A run without DeepSpeed would silently load the weights and start Adam from zero."""
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}', encoding="utf-8")
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save({}, tmp_path / name)
    (tmp_path / "latest").write_text("global_step7", encoding="utf-8")
    assert find_flaw(tmp_path, "DeepSpeed") == "global_step7 is missing or damaged"
    (tmp_path / "global_step7").mkdir()
    for rank in (0, 1):
        torch.save({}, tmp_path / "global_step7" / f"rank_{rank}_optim_states.pt")
    assert find_flaw(tmp_path, "DeepSpeed") == ""
    assert "it was written under DeepSpeed" in find_flaw(tmp_path)
    (tmp_path / "global_step7" / "rank_1_optim_states.pt").write_bytes(b"half")
    assert "rank_1_optim_states.pt is missing or damaged" in find_flaw(tmp_path, "DeepSpeed")
    (tmp_path / "latest").unlink()
    assert "it was written without DeepSpeed" in find_flaw(tmp_path, "DeepSpeed")


# --- impossible launches ----------------------------------------------------------------------------------------------


def test_requesting_two_processes_and_getting_one_is_an_error(tmp_path: Path) -> None:
    asked = ["--cpu", "--num_processes", "2", "train.py", *QUICK, f"run_dir={tmp_path / 'run'}"]
    program, env = launched_program(*asked)
    ended = forks.run(*program, env=env)
    assert ended.returncode != 0
    assert "asked for several processes and started only this one: use --config_file launch/cpu_ddp" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP"])
def test_requested_sharding_that_does_not_take_effect_is_an_error(make_trainer, monkeypatch, name: str) -> None:
    trainer = make_trainer()
    check_sharding(trainer)
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ValueError, match=f"^{name} .* DDP"):
        check_sharding(trainer)
