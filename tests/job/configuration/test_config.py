"""Every configuration file composes into objects, what a user types works, and mistakes are named."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import REFUSED, composed, composing, prepared_evaluation, quick_run, refusal
from hydra import compose
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rl_training import Probe
from rl_training.errors import UserError
from rl_training.job.commands import analyze, evaluate, train
from rl_training.job.configuration import composition
from rl_training.job.configuration.checks import check_settings
from rl_training.job.configuration.hydra_errors import explain
from rl_training.job.configuration.loggers import add_all_loggers
from rl_training.job.configuration.overrides import refuse_several_options
from rl_training.job.configuration.prepare import microbatches_per_step, normalize, prepare_analysis
from rl_training.job.configuration.run_settings import refuse_other_settings
from rl_training.job.configuration.shipped import CONF
from rl_training.job.configuration.sweep import sweep_folder
from rl_training.job.objects.make import make
from rl_training.job.run.training import TrainingRun
from rl_training.models.load import TINY_PATH, load_causal_lm, load_tiny
from rl_training.probes import BUILT_IN, SimpleEntropyProbe
from rl_training.records.jsonl import read_metrics

ROOT = Path(__file__).parents[3]
# Overrides that an option needs in addition to its name.
NEEDS = {"model=hub": ["model.name=somewhere"]}
OPTIONS = [
    f"{path.parent.name}={path.stem}"
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name not in ("hydra", "help", "metric")  # metrics are evaluate.py's
]


def built(tmp_path: Path, *overrides: str) -> TrainingRun:
    return quick_run(tmp_path / "run", "trainer.max_steps=1", *overrides)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_config_composes_and_its_targets_can_be_instantiated(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = composed("train", option, *NEEDS.get(option, []), "run_dir=somewhere")
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    monkeypatch.chdir("/tmp")
    instantiate(cfg.trainer, _convert_="all", report_to=[], output_dir="/tmp/unused")
    instantiate(cfg.adapter, _convert_="all")
    instantiate(cfg.buffer, _convert_="all")
    assert [p.name for p in map(instantiate, cfg.probes.values())] == list(cfg.probes)


def test_a_refused_argument_names_its_setting_and_an_error_in_custom_code_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "def task(lines):\n    return int(lines) or {}['question']\n"
    (tmp_path / "a_task_of_mine.py").write_text(file, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "a_task_of_mine.task"}
    with pytest.raises(UserError, match=r"^data: ValueError: .*'x'.* \(--debug .*\)$"):
        make("data", node, lines="x")
    with pytest.raises(UserError, match=r"^data: TypeError: .*'rows'"):
        make("data", node, lines="1", rows="1")
    with pytest.raises(KeyError, match="question") as caught:
        make("data", node, lines="0")
    assert caught.value.__notes__ == ["while data was made"]
    assert caught.traceback[-1].path == tmp_path / "a_task_of_mine.py"


def test_a_bug_of_the_package_while_hydra_composes_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "conf_folders", lambda: [][0])
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1"])
    with pytest.raises(IndexError):
        composition.run_composed("train", lambda cfg, words: None, lambda word: True)


@pytest.mark.parametrize(("name", "probe"), BUILT_IN.items())
def test_every_built_in_probe_has_a_file_with_its_options_and_their_defaults(name: str, probe: type[Probe]) -> None:
    written = OmegaConf.load(CONF / "probe" / f"{name}.yaml")[name]
    _, *options = inspect.signature(probe.__init__).parameters.values()
    defaults = {option.name: option.default for option in options}
    assert written == OmegaConf.create({"_target_": f"rl_training.probes.{probe.__name__}", **defaults})


def test_every_setting_of_a_probe_is_explained_beside_it() -> None:
    lines = [line for path in CONF.glob("probe/*.yaml") for line in path.read_text(encoding="utf-8").splitlines()]
    settings = [line for line in lines if line.startswith("  ") and not line.startswith(("  - ", "  _target_"))]
    assert len(settings) > 30
    assert [line for line in settings if " # " not in line] == []


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("probe=none", []),
        ("probe=simple", ["simple"]),
        ("probe=ess", ["ess"]),
        ("probe=[simple,none]", ["simple"]),
        ("probe=[simple,ess]", ["simple", "ess"]),
    ],
)
def test_probes_are_chosen_by_name_or_list(override: str, names: list[str]) -> None:
    assert list(composed("train", override).probes) == names


def test_an_option_of_a_probe_reaches_it(tmp_path: Path) -> None:
    run = built(tmp_path, "probes.simple.every=5", "probes.simple.responses_per_prompt=2")
    (probe,) = run.trainer.attachment.probes
    assert isinstance(probe, SimpleEntropyProbe)
    assert (probe.every, probe.entropy.responses_per_prompt) == (5, 2)


def test_the_seed_may_be_a_slurm_array_task_id_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    cfg = composed("train", "seed=${oc.env:SLURM_ARRAY_TASK_ID}")
    normalize(cfg, "train")
    check_settings(cfg)
    assert cfg.seed == cfg.trainer.seed == 7
    evaluation = prepared_evaluation("evaluation.seed=${oc.env:SLURM_ARRAY_TASK_ID}").values["evaluation"]
    assert evaluation["seed"] == 7
    typed = [f"{name}.seed=${{oc.env:SLURM_ARRAY_TASK_ID}}" for name in ("evaluation", "update")]
    analysis = prepare_analysis(composed("offline", "checkpoint=somewhere", *typed)).settings
    assert analysis.evaluation.seed == analysis.update.seed == 7


def test_any_field_of_the_trainer_can_be_set(tmp_path: Path) -> None:
    assert built(tmp_path, "++trainer.warmup_steps=7").trainer.args.warmup_steps == 7


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_of_the_default_task_leaves_its_records(tmp_path: Path, adapter: str) -> None:
    run = built(tmp_path, f"adapter={adapter}")
    run.train()
    run.report()
    names = {path.name for path in run.run_dir.iterdir()}
    assert names == {".lock", "config.yaml", "logs", "report", "training_state"}
    (line,) = read_metrics(run.run_dir / "logs")
    assert line["step"] == 1
    assert line["delta_h/forward_se"] > 0
    trainable = sum(p.numel() for p in run.trainer.model.parameters() if p.requires_grad)
    assert (trainable == 105_472) == (adapter == "none")
    card = (run.run_dir / "training_state" / "README.md").read_text()
    assert "This model is a fine-tuned version of the model in the folder `tiny`." in card


@pytest.mark.parametrize(
    ("sequences", "microbatch", "processes", "steps"), [(256, 32, 1, 8), (256, 32, 2, 4), (64, 8, 4, 2)]
)
def test_the_batch_size_is_given_for_all_processes_together(sequences, microbatch, processes, steps) -> None:
    assert microbatches_per_step(sequences, microbatch, processes, responses_per_prompt=8) == steps


@pytest.mark.parametrize(
    ("sequences", "microbatch", "processes", "way_out"),
    [
        (250, 32, 1, "batch.sequences_per_step=256"),
        (256, 30, 1, "batch.microbatch_size=24"),
        (256, 4, 1, "batch.microbatch_size=8"),
        (256, 32, 3, "batch.sequences_per_step=288"),
        (0, 32, 1, "batch.sequences_per_step=32"),
    ],
)
def test_an_indivisible_batch_is_refused_with_a_size_that_divides(sequences, microbatch, processes, way_out) -> None:
    with pytest.raises(ValueError, match=way_out):
        microbatches_per_step(sequences, microbatch, processes, responses_per_prompt=8)


@pytest.mark.parametrize(("overrides", "message"), REFUSED["build"].items())
def test_a_mistake_in_the_settings_is_named_with_the_fix(tmp_path: Path, overrides: str, message: str) -> None:
    with pytest.raises(Exception, match=refusal(message)):
        built(tmp_path, *overrides.split())


@pytest.mark.parametrize(("override", "explanation"), REFUSED["typed"].items())
def test_a_mistyped_override_is_explained_in_one_line(override: str, explanation: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *override.split()])
    with pytest.raises(HydraException) as raised:
        composed("train", *override.split())
    assert explanation in explain(raised.value, "train")
    assert "\n" not in explain(raised.value, "train")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.seed=1"], "unrecognized arguments: --trainer.seed=1: settings are KEY=VALUE, without dashes"),
        (["--cfg", "jobb"], "argument --cfg/-c: invalid choice: 'jobb'"),
        (["--config-name=foo"], "--config-name=foo: there is no such configuration. Choose from evaluate, offline, "),
    ],
)
def test_a_mistyped_flag_is_explained_in_one_line(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # what the command changes is undone
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(UserError) as raised:
        train()
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_setting_of_the_trainer_is_refused_by_an_evaluation_which_would_ignore_it(
    plus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # what the command changes is undone
    monkeypatch.setattr(sys, "argv", ["evaluate.py", f"{plus}trainer.temperature=0.5"])
    with pytest.raises(UserError, match=r"evaluation\.temperature and evaluation\.max_completion_length replace"):
        evaluate()


def test_a_mistyped_setting_of_an_evaluation_is_answered_with_one_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "temperature=0.5"])
    with pytest.raises(HydraException) as raised:
        composed("evaluate", "temperature=0.5")
    assert explain(raised.value, "evaluate").endswith("; did you mean evaluation.temperature?")


def test_lists_in_documented_commands_are_quoted_for_zsh() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *CONF.glob("hydra/help/*.yaml")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL) if page.suffix == ".md" else [text]
        assert not re.findall(r"(?<!['\"\w.])[\w.]+=\[.*", "\n".join(blocks)), page


def documented_commands() -> list[str]:
    """Return the commands of all pages that train, analyze or evaluate, without their comments."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [
        block for page in pages for block in re.findall(r"```(?:bash)?\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return sorted({line.split("  #")[0].strip() for line in lines if re.search(JOB_TYPED, line)})


JOB_TYPED = r"^(?:rl-training|(?:\w+=\S+ )*accelerate launch .*-m rl_training) (train|analyze|evaluate) (.*)"


@pytest.mark.parametrize("line", documented_commands())
def test_every_documented_command_composes(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(JOB_TYPED, line)
    assert found
    words = [word for word in shlex.split(found[2]) if word != "…"]
    if "-m" in words:  # a sweep over the values between commas
        words = [re.sub(r"^([\w.]+=[^\[,]+),.*", r"\1", word) for word in words if word != "-m"]
    typed: list[str] = []
    monkeypatch.setattr(sys, "argv", [found[1], *words])
    monkeypatch.setattr(composition.hydra, "main", lambda **_: lambda job: lambda: typed.extend(sys.argv[1:]))
    {"train": train, "analyze": analyze, "evaluate": evaluate}[found[1]]()
    composed({"analyze": "offline"}.get(found[1], found[1]), *typed)


def test_resuming_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    OmegaConf.save(composed("train", "run_dir=somewhere"), tmp_path / "config.yaml", resolve=True)
    refuse_other_settings(composed("train", "run_dir=elsewhere", "trainer.max_steps=99", "probe=none"), tmp_path)
    with pytest.raises(ValueError, match=r"batch\.sequences_per_step=128 \(was 256\).*seed=3 \(was 0\)"):
        refuse_other_settings(
            composed("train", "run_dir=somewhere", "batch.sequences_per_step=128", "seed=3"), tmp_path
        )


def test_a_stored_path_and_the_same_path_typed_are_the_same_setting(tmp_path: Path, monkeypatch) -> None:
    """Whether config.yaml has `~`, as a file of --config-dir or an older version may have left it, or the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    typed = composed("train", "run_dir=r", "model=hub", "model.name='~/weights'")
    normalize(typed, "train")
    assert typed.model.name == f"{tmp_path}/weights"
    for stored in ("~/weights", f"{tmp_path}/weights"):
        OmegaConf.save(OmegaConf.merge(typed, {"model": {"name": stored}}), tmp_path / "config.yaml", resolve=True)
        refuse_other_settings(typed, tmp_path)
    OmegaConf.save(OmegaConf.merge(typed, {"model": {"name": "~/others"}}), tmp_path / "config.yaml", resolve=True)
    with pytest.raises(UserError, match=rf"model\.name='{tmp_path}/weights' \(was '{tmp_path}/others'\)"):
        refuse_other_settings(typed, tmp_path)


@pytest.mark.parametrize(
    "content", [b"seed: [1", b"\xff\xfe", b"- 1", b""], ids=["no yaml", "no text", "a list", "empty"]
)
def test_resuming_a_run_with_a_broken_config_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){tmp_path / 'config.yaml'} "):
        refuse_other_settings(composed("train"), tmp_path)


def test_a_model_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(TINY_PATH / name, tmp_path)
    with pytest.raises(ValueError, match=rf"model\.name={tmp_path} .*tokenizer\.json"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("damage", ["weights", "config", "tokenizer"])
def test_a_damaged_model_folder_is_named(tmp_path: Path, damage: str) -> None:
    model, tokenizer = load_tiny()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    if damage == "weights":
        (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    elif damage == "config":
        (tmp_path / "model" / "config.json").write_text("{")
    else:
        (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=rf"model\.name={tmp_path / 'model'}: "):
        built(tmp_path, "model=hub", f"model.name={tmp_path / 'model'}")


def test_the_config_in_the_run_folder_is_resolved(tmp_path: Path) -> None:
    built(tmp_path)
    saved: Any = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert saved.trainer.output_dir == os.fspath(tmp_path / "run" / "training_state")
    assert "${" not in (tmp_path / "run" / "config.yaml").read_text()
    assert json.dumps(OmegaConf.to_container(saved))


def test_a_run_starts_with_what_it_will_not_measure_and_the_overrides_to_type(tmp_path: Path, caplog) -> None:
    batch = ("batch.sequences_per_step=16", "batch.microbatch_size=16", "trainer.max_completion_length=8")
    built(tmp_path, *batch, "trainer.max_steps=1").train()
    [plan] = [line for line in caplog.messages if "fold" in line]
    assert "use steps of at least 8 prompts, where these have 4: batch.microbatch_size=4" in plan
    assert "batch.sequences_per_step=32" in plan
    assert "Probes measure 4 folds of whole prompts a step, from 1 microbatch of 16 sequences" in plan


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["logger=[wandb,tensorboard]"], ["wandb", "tensorboard"]),
        (["logger=[none,trackio,wandb]"], ["trackio", "wandb"]),
        (["logger=[wandb,tensorboard]", "trainer.report_to=[trackio]"], ["trackio"]),
        (["logger=wandb"], ["wandb"]),
    ],
)
def test_a_run_has_a_dashboard_for_every_named_logger(words: list[str], kept: list[str]) -> None:
    with composing():
        cfg = compose("train", words)
        add_all_loggers(cfg, words)
    assert cfg.trainer.report_to == kept


def test_two_options_of_a_single_choice_group_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("adapter=[lora,none]: ")):
        refuse_several_options(["adapter=[lora,none]", "logger=[wandb,tensorboard]"])


@pytest.mark.parametrize(
    ("run_dir", "words", "folder"),
    [
        ("runs/run_seed_0", ["data=gsm8k"], "runs/run_seed_0,data=gsm8k"),
        ("runs/lr", ["run_dir=runs/lr", "trainer.learning_rate=0.1"], "runs/lr/learning_rate=0.1"),
        ("runs/12-00", ["run_dir=runs/${now:%H-%M}", "seed=1"], "runs/12-00/seed=1"),
        ("runs/1", ["run_dir=runs/$\\{seed\\}", "seed=1"], "runs/1"),  # as Hydra gives it to a job
        ("runs/12-00", ["run_dir=runs/$\\{now:%H-%M\\}", "seed=1"], "runs/12-00/seed=1"),
        ("runs/b", ["run_dir=runs/b"], "runs/b"),
        ("runs/a", ["intervention=[lr:0.5,psr]"], "runs/a,intervention=lr0.5,psr"),
    ],
)
def test_each_job_of_a_sweep_has_a_folder_that_names_its_values(run_dir: str, words: list[str], folder: str) -> None:
    swept = words[-1:]
    assert sweep_folder(run_dir, words, swept) == folder
    assert sweep_folder(run_dir, words, []) == run_dir


def test_jobs_of_a_sweep_whose_values_differ_in_what_no_folder_name_holds_have_different_folders() -> None:
    typed = ["data.path=/a/b", "data.path=/ab", "data.path=a/b", "data.path=ab", "data.path='a b'"]
    folders = [sweep_folder("runs/run", [word], [word]) for word in typed]
    assert len({*folders}) == len(typed), folders
    assert folders[3] == "runs/run,path=ab"
    assert all("/" not in folder.removeprefix("runs/") for folder in folders)
