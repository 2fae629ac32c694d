"""OfflineEntropyProbe is offline.py with another configuration; logs of every level are complete and can be read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from analyzed_runs import RUN, checkpoint
from configs import REFUSED, composed, composing, refusal
from full_disk import files_of_at_most
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file

from rl_training import OfflineEntropyProbe
from rl_training.errors import UserError
from rl_training.job.api.offline_probe import CHOICES, SETTINGS
from rl_training.job.configuration.nested import flatten
from rl_training.job.configuration.prepare import prepare_analysis, prepare_run
from rl_training.job.configuration.shipped import PROBE_CONFIGS
from rl_training.job.run.analysis import analyze_checkpoints
from rl_training.job.run.training import build_run
from rl_training.offline.results import statistics_of
from rl_training.records import probe_logs, read_probe_log
from rl_training.records.analyses import read_analysis
from rl_training.records.files.atomic_write import write_atomically

KEYS_OF_ANSWER = {
    "deltaH1", "bars_dot", "learning_rate", "deltaH_true", "H_orig", "H_upd", "B_E", "B_U", "G",
    "avg_generation_length", "avg_reward", "timing", "diagnostics", "log",
}  # fmt: skip


def small(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a quick analysis with its logs in a folder."""
    config: dict[str, Any] = {
        "batch_config": {"B_E": 16, "B_U": 8},
        "memory_config": {"microbatch_size": 8},
        "detailed_logging": {"output_directory": str(folder)},
    }
    return {key: config.get(key, {}) | sections.get(key, {}) for key in {**config, **sections}}


@pytest.fixture(scope="module")
def probed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Do an analysis in full detail, in nats per sequence, by SNIS."""
    config = small(
        tmp_path_factory.mktemp("logs"), detailed_logging={"level": "debug"},
        importance={"is_mode": "snis", "report_per_token": False},
    )  # fmt: skip
    return OfflineEntropyProbe(config).run_mixed_probe(checkpoint(run, 1))


def test_the_offline_probe_gives_the_results_of_the_command(run: Path, probed: dict[str, Any], tmp_path: Path) -> None:
    overrides = ["evaluation.prompts=16", "update.prompts=8", "memory.microbatch_size=8", "report=false"]
    with composing():
        cfg = compose("offline", [f"checkpoint={checkpoint(run, 1)}", *overrides, f"output={tmp_path}"])
        (path,) = analyze_checkpoints(prepare_analysis(cfg))
    results = read_analysis(path)["results"]
    assert probed["diagnostics"] == results
    assert set(probed) == KEYS_OF_ANSWER
    assert (
        probed["deltaH1"] == results["deltaH1_sequence"] == pytest.approx(probed["bars_dot"] * results["learning_rate"])
    )
    assert probed["deltaH_true"] == results["deltaH_snis_sequence"]
    assert probed["H_upd"] == results["H_orig_sequence"] + results["deltaH_snis_sequence"]
    assert (probed["B_E"], probed["B_U"], probed["G"]) == (16, 8, 4)


def test_without_a_prediction_only_the_measured_part_is_run_and_returned(run: Path, tmp_path: Path) -> None:
    """Also that a script under @hydra.main, which has initialized Hydra, can do so."""
    config = small(tmp_path, probe_rework={"compute_delta_h1": False}, detailed_logging={"enabled": False})
    config |= {"batch_config": {"B_E": 8, "B_U": 4, "G": 2}, "overrides": ["evaluation.responses=2"]}
    with composing():  # as @hydra.main does
        of_script = GlobalHydra.instance().hydra
        results = OfflineEntropyProbe(config).run_mixed_probe(checkpoint(run, 2))
        assert GlobalHydra.instance().hydra is of_script
    assert set(results) == KEYS_OF_ANSWER - {"deltaH1", "bars_dot", "learning_rate"}
    assert "gradient of E" not in results["timing"]
    assert (results["log"], results["G"]) == ("", 2)
    assert (results["B_E"], results["diagnostics"]["N_E"]) == (8, 16)
    assert list(tmp_path.iterdir()) == []


def test_the_example_configs_run_and_cover_every_option(run: Path) -> None:
    probe = OfflineEntropyProbe.from_config_file(PROBE_CONFIGS / "full_example.yaml")
    others = {"checkpoint.checkpoint_path", "importance.report_per_token", "detailed_logging.enabled", "overrides"}
    assert flatten(probe.config).keys() == {*SETTINGS, *CHOICES} | others
    given, default = composed("offline", *probe.overrides(run)), composed("offline", f"checkpoint={run}")
    assert {key for key in default if given[key] != default[key]} == {"name", "report", "dashboards"}
    results = OfflineEntropyProbe.from_config_file(PROBE_CONFIGS / "quick_test.yaml").run_mixed_probe(
        checkpoint(run, 2)
    )
    assert Path(results["log"]).is_relative_to(run / "offline")
    assert len(probe_logs(Path(results["log"]).parent)) >= 1


@pytest.mark.parametrize(("config", "says"), REFUSED["offline_probe"])
def test_an_unknown_key_or_value_is_refused_with_the_closest_valid_one(config: dict[str, Any], says: Any) -> None:
    with pytest.raises(ValueError, match=refusal(says)):
        OfflineEntropyProbe(config)


def test_old_names_of_models_and_data_sets_are_accepted() -> None:
    old = {"checkpoint": {"backbone": "qwen2_5_15"}, "batch_config": {"dataset_name": "gsm8k_r1_template"}}
    assert {"model=qwen2_5_1_5b", "data=gsm8k"} <= set(OfflineEntropyProbe(old).overrides("C"))
    with pytest.raises(ValueError, match=r"checkpoint\.checkpoint_path "):
        OfflineEntropyProbe({}).overrides()


def test_an_adapter_folder_uses_the_optimizer_state_of_its_parent(tmp_path: Path) -> None:
    built = composed("train", f"run_dir={tmp_path / 'run'}", *RUN[:-1], "adapter=lora", "adapter.r=4")
    run = build_run(prepare_run(built))
    run.train()
    run.end()
    saved, alone = checkpoint(tmp_path / "run", 2), tmp_path / "step_2"
    shutil.copytree(saved, alone / "model", ignore=shutil.ignore_patterns("*.pt", "*.pth", "trainer_state.json"))
    config = small(tmp_path / "logs", checkpoint={"backbone": "tiny"}, detailed_logging={"level": "minimal"})
    config["batch_config"] |= {"dataset_name": "arithmetic", "G": 4}
    config["overrides"] = ["trainer.weight_decay=0.1", "trainer.max_grad_norm=0.1", "trainer.max_completion_length=24"]
    probe = OfflineEntropyProbe(config)
    with pytest.raises(ValueError, match=r"it lacks .*step_2/optimizer\.pt"):
        probe.run_mixed_probe(alone / "model")
    state = torch.load(saved / "optimizer.pt")
    state["param_groups"] = [group for group in state["param_groups"] if group["params"]]  # like other trainers
    torch.save(state, alone / "optimizer.pt")
    (alone / "model" / "adapter_model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"it lacks .*model/adapter_model\.safetensors"):
        probe.run_mixed_probe(alone / "model")
    (tmp_path / "kept").rename(alone / "model" / "adapter_model.safetensors")
    results, of_run = probe.run_mixed_probe(alone / "model"), OfflineEntropyProbe(small(tmp_path / "logs"))
    assert results["learning_rate"] == pytest.approx(1e-4)
    assert results["deltaH1"] == pytest.approx(of_run.run_mixed_probe(saved)["deltaH1"], rel=1e-6)
    assert "_step_2.json.gz" in results["log"]
    assert (tmp_path / "step_2" / "offline" / "mixed_probe" / "step_2" / "result.json").is_file()


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_debug_log_holds_matching_sequences_tokens_and_tensors(probed: dict[str, Any]) -> None:
    tables = read_probe_log(probed["log"])
    results = tables["results"].set_index("name")
    assert results["value"]["deltaH_snis_sequence"] == probed["deltaH_true"]
    assert results["stderr"]["deltaH_snis"] == probed["diagnostics"]["deltaH_snis_se"]
    e, tokens = tables["evaluation"], tables["tokens"]
    sums = tokens.groupby("sequence")
    assert list(e["sequence"]) == list(range(16))
    assert (sums.size() == e["length"]).all()
    torch.testing.assert_close(torch.tensor(sums["logp"].sum().values), torch.tensor(e["logp"].values))
    assert e["weight"].to_numpy() == pytest.approx([math.exp(d) for d in e["logp_after"] - e["logp"]])
    assert all("=" in prompt for prompt in e["prompt"])
    snis = (e["weight"] * e["entropy_after"]).sum() / e["weight"].sum() - e["entropy"].mean()
    assert snis == pytest.approx(probed["deltaH_true"])
    u = tables["update"]
    assert u["reward"].mean() == pytest.approx(probed["avg_reward"])
    assert u.groupby("prompt_index")["advantage"].sum().to_numpy() == pytest.approx([0.0] * 8, abs=1e-6)
    assert tables["statistics"].loc["importance_weight", "max"] == pytest.approx(probed["diagnostics"]["w_max"])
    raw = load_file(probed["log"].replace(".json.gz", "_tensors.safetensors"))
    assert float(raw["direction"][1] @ raw["delta"]) == pytest.approx(probed["deltaH1"], rel=1e-4)


def test_a_quantity_unknown_for_one_sequence_has_no_statistics() -> None:
    """A mean over the known ones would describe different sequences. E and U may have different numbers of them."""
    e, u = (
        [{"length": length} for length in (1.0, 2.0, 6.0)],
        [{"reward": math.nan, "length": 4.0}, {"reward": 1.0, "length": 2.0}],
    )
    statistics = statistics_of(e, u)
    assert statistics["generation_length"] == {
        "mean": 3.0,
        "sd": 7**0.5,
        "min": 1.0,
        "q25": 1.5,
        "median": 2.0,
        "q75": 4.0,
        "max": 6.0,
    }
    assert statistics["update_length"]["mean"] == 3.0
    assert all(map(math.isnan, statistics["reward"].values()))


def test_higher_log_levels_hold_more_and_sequences_can_be_left_out(run: Path, tmp_path: Path) -> None:
    sizes = []
    for level in ("minimal", "detailed"):
        logging = {"level": level, "log_sequences": False, "compress": False}
        log = OfflineEntropyProbe(small(tmp_path, detailed_logging=logging)).run_mixed_probe(checkpoint(run, 1))["log"]
        assert log.endswith(("checkpoint-1.json", "checkpoint-1_2.json"))  # if both are written within the same second
        content = json.loads(Path(log).read_text())
        assert "response" not in json.dumps(content)
        sizes.append(len(Path(log).read_bytes()))
        files = {path.name for path in Path(log).parent.glob(f"{Path(log).stem}*")}
        assert files == {f"{Path(log).stem}{end}" for end in (".json", "_summary.json", "_config.yaml")}
    assert sizes[0] < sizes[1]
    table = probe_logs(tmp_path)
    assert list(table["level"]) == ["minimal", "detailed"]
    assert (table["step"] == 1).all()
    assert table["deltaH1"].notna().all()


def test_log_files_are_written_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "day" / name for name in ("a.json.gz", "a_config.yaml", "a_summary.json")]
    with files_of_at_most(100), pytest.raises(UserError, match=str(paths[2])):
        write_atomically(dict(zip(paths, (b"x", b"x", b"x" * 1000), strict=True)))
    assert list((tmp_path / "day").iterdir()) == []
    moved: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (moved.append(to.name), replace(self, to))[1])
    write_atomically(dict.fromkeys(paths, b"x"))
    assert moved[-1] == "a_summary.json"  # moved last, so if it exists, all files do
    with pytest.raises(ValueError, match=str(paths[2])):
        read_probe_log(paths[2])
