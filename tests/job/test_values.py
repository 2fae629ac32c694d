"""Values that are judged by themselves: at once, before any import that takes long, in one line with the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from configs import composed, composing
from omegaconf import OmegaConf

from rl_training.job.run_settings import run_settings
from rl_training.job.settings import check_analysis, check_evaluation, check_run, name_of


def test_what_judges_values_imports_neither_torch_nor_trl() -> None:
    modules = ("settings", "command_line")
    lines = ["import sys", *(f"import rl_training.job.{name}" for name in modules)]
    lines.append("sys.exit(', '.join({'torch', 'trl', 'transformers'} & sys.modules.keys()))")
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("++trainer.top_p=1.5", "trainer.top_p=1.5 must be above 0 and at most 1"),
        ("++trainer.top_p=0", "trainer.top_p=0 must be above 0 and at most 1"),
        ("trainer.max_completion_length=0", "trainer.max_completion_length=0 must be at least 1"),
        ("trainer.max_steps=abc", "trainer.max_steps=abc must be a whole number"),
        ("trainer.max_steps=0", "trains nothing: give at least 1"),
        ("++trainer.max_grad_norm=null", "trainer.max_grad_norm=None must be a number; 0 switches clipping off"),
        ("trainer.temperature=0", "trainer.temperature=0 must be above 0"),
        ("trainer.learning_rate=nan", "trainer.learning_rate=nan must be finite"),
        ("++trainer.epsilon_high=-1", "trainer.epsilon_high=-1 must be at least 0"),
        ("probes.simple.per_sequence=maybe", "probes.simple.per_sequence=maybe must be true or false"),
        ("probes.simple.responses_per_prompt=1.5", "must be a whole number"),
        ("++trainer.num_iterations=0", "trainer.num_iterations=0 must be at least 1"),
        ("+probes.ground_truth.sequences=1e8", "probes.ground_truth.sequences=100000000.0 must be a whole number"),
        ("+probes.ground_truth.sequences=100000000", "at most 65536: more would take hours"),
        ("run_dir=", "run_dir= is not a folder"),
        ("run_dir=null", "run_dir=None is not a folder"),
        ("model=hub", "model.name is not set: give model.name=VALUE"),
        ("batch.microbatch_size=12", "use batch.microbatch_size=8"),
    ],
)
def test_a_training_that_makes_no_sense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_run(composed("train", "run_dir=somewhere", override))


def test_a_logger_that_is_not_installed_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fix = r"logger=trackio: trackio is not installed: pip install 'rl-training\[trackio\]', or choose another logger"
    with pytest.raises(ValueError, match=fix):
        check_run(composed("train", "logger=trackio", "run_dir=somewhere"))
    check_run(composed("train", "logger=none", "run_dir=somewhere"))


def test_settings_that_may_be_null_or_at_the_end_of_their_range_are_taken() -> None:
    taken = ("++trainer.epsilon_high=null", "++trainer.top_p=1", "++trainer.min_p=0", "trainer.max_steps=-1")
    assert check_run(composed("train", *taken, "run_dir=somewhere")) == 8


def test_a_typo_in_the_folder_of_a_run_that_goes_on_does_not_lead_to_another_run(tmp_path: Path) -> None:
    (tmp_path / "run_a" / "training_state").mkdir(parents=True)
    check_run(composed("train", f"run_dir={tmp_path / 'run_a'}", "resume=latest"))
    with pytest.raises(
        ValueError, match=rf"run_aa holds no run to continue; .*; did you mean run_dir={tmp_path}/run_a\?"
    ):
        check_run(composed("train", f"run_dir={tmp_path / 'run_aa'}", "resume=latest"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("truth.etas=abc", "truth.etas=abc must be a list"),
        ("truth.etas=[abc]", "truth.etas=abc must be a number in the list"),
        ("truth.etas=[inf]", "truth.etas=inf must be finite in the list"),
        ("truth.odd=2", "truth.odd=2 must be true or false"),
        ("evaluation.prompts=abc", "evaluation.prompts=abc must be a whole number"),
        ("evaluation.prompts=1", "evaluation.prompts=1 must be at least 2"),
        ("evaluation.overlap=some", "choose from forbidden, allowed, wanted"),
        ("evaluation.source=test", "choose train, eval, or a list of rows"),
        ("truth.etas=[1.0,-1.0]", "truth.etas=-1.0 must be above 0: a multiple of the step"),
        ("log.level=all", "choose from none, minimal, standard, detailed, debug"),
        ("sweep.evaluation_sizes=[1]", "sweep.evaluation_sizes=1 must be at least 2"),
        ("sweep.evaluation_sizes=[300]", "300 is more than the 256 sequences of E"),
        (
            "evaluation.prompts=32 evaluation.responses=8 sweep.evaluation_sizes=[16,12]",
            r"12 sequences are not two prompts .* multiples of evaluation.responses=8",
        ),
        ("sweep.update_seeds=[2] truth.enabled=false", "compares prediction with truth"),
        ("truth.enabled=false first_order.enabled=false", "neither prediction nor truth"),
        ("kernel.enabled=true first_order.enabled=false", "needs the entropy gradient"),
        ("kernel.dtype=float16", "kernel.dtype=float16: choose from float32, bfloat16"),
        ("kernel.sketch_buckets=500", "kernel.sketch_buckets=500: choose from 1, 2, 4, .*, 512,"),
        ("kernel.sketch_repeats=1", "kernel.sketch_repeats=1 must be at least 2"),
        ("evaluation=5", "evaluation=5 must be a group of settings"),
        ("kernel.memory_gb=lots", "kernel.memory_gb=lots must be a number"),
        ("evaluation.overlap=null", "evaluation.overlap=null has no meaning"),
        ("learning_rate=-1e-4", "learning_rate=-0.0001 must be above 0, or null for the checkpoint's"),
        ("learning_rate=nan", "learning_rate=nan must be finite, or null for the checkpoint's"),
        ("name=../../x", r"name=\.\./\.\./x names a folder"),
        ("name=a/b", "name=a/b names a folder"),
        ("name=.x", r"name=\.x names a folder"),
        ("checkpoint=???", "checkpoint is not set: give checkpoint=VALUE"),
    ],
)
def test_an_analysis_that_makes_no_sense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_analysis(composed("offline", "checkpoint=somewhere", *override.split()))


def test_the_name_of_a_job_of_a_sweep_is_made_fit_behind_what_was_typed() -> None:
    assert check_analysis(composed("offline", "checkpoint=somewhere", "evaluation.source=[3,4]")).evaluation.source == [
        3,
        4,
    ]
    assert name_of("default,run=['data.path=/x/y z']") == "default,run=data.path=xyz"
    assert name_of("mine-2_a.b") == "mine-2_a.b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.k=0", "evaluation.k=0 must be at least 1"),
        ("evaluation.k=9", "use evaluation.responses_per_prompt=9"),
        ("evaluation.jobs=many", "evaluation.jobs=many must be a whole number"),
        ("evaluation.greedy=1", "evaluation.greedy=1 must be true or false"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_evaluation(composed("evaluate", override))


def test_a_run_that_does_not_say_its_data_is_analysed_with_data_that_are_given(tmp_path: Path) -> None:
    checkpoint = tmp_path / "training_state" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    cfg = composed("train", "run_dir=somewhere")
    OmegaConf.set_struct(cfg, False)
    del cfg["data"]
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    with composing():
        with pytest.raises(ValueError, match=r"config.yaml lacks data, which .* or give data=…$"):
            run_settings(checkpoint, [])
        changed = run_settings(checkpoint, ["data=arithmetic", "model=tiny", "model.dtype=bfloat16"])
    assert changed.data._target_.endswith("arithmetic")
    assert changed.model.dtype == "bfloat16"  # which conf/model/tiny.yaml does not list, and its loader takes
