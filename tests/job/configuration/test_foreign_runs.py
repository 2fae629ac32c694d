"""A run from an untrusted source: its settings run no code and leak nothing, whatever they contain.

Each attack is in the config.yaml of an otherwise normal run and would create a canary file. Commands read the run like
any other and refuse it in one line, unless they do not need the refused setting.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import composed
from foreign_runs import SECRET, TOUCH, analyze, branch, evaluate, foreign_run, probe, said, write_config
from omegaconf import OmegaConf

from rl_training import OfflineEntropyProbe
from rl_training.errors import UserError
from rl_training.interventions.named import INTERVENTIONS
from rl_training.job.configuration.prepare import prepare_run
from rl_training.job.configuration.run_settings import refuse_other_settings, run_settings
from rl_training.job.configuration.stored import MARK, escape_interpolations, load_settings, names_code

ROOT = Path(__file__).parents[3]
PICKLE, OWN = "{run}/canary.pkl", "{run}/own.py"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
SHELL = {"_target_": "os.system", "command": "touch {canary}"}
# By name: changes of a run's settings by dotted keys, with {run} and {canary} filled in; or a text for the whole file.
GADGETS: dict[str, dict[str, Any] | str] = {
    "a shell in the place of the task": {"data": SHELL},
    "a shell in the place of the model": {"model": SHELL},
    "a shell in the place of the trainer": {"trainer._target_": "os.system"},
    "a shell in the place of the adapter": {"adapter": SHELL},
    "a shell in the place of the buffer": {"buffer": SHELL},
    "a process": {"data": {"_target_": "subprocess.run", "args": ["touch", "{canary}"]}},
    "code of a text": {"data": {"_target_": "builtins.exec", "_args_": [TOUCH]}},
    "a shell by another name": {
        "data": {**SHELL, "_target_": "rl_training.job.configuration.shipped.shutil.os.system"}
    },
    "the package's own interpreter": {"data": {"_target_": "rl_training.records.pages.page._run", "program": TOUCH}},
    "the package's own import": {
        "data": {"_target_": "rl_training.interventions.custom.load_custom", "place": OWN, "name": "f"}
    },
    "a pickle of torch's": {"data": {"_target_": "torch.load", "f": PICKLE, "weights_only": False}},
    "a pickle of pandas'": {"data": {"_target_": "pandas.read_pickle", "filepath_or_buffer": PICKLE}},
    "a pickle of joblib's": {"data": {"_target_": "joblib.load", "filename": PICKLE}},
    "a pickle of numpy's": {"data": {"_target_": "numpy.load", "file": PICKLE, "allow_pickle": True}},
    "a formula that is evaluated": {"data": {"_target_": "sympy.sympify", "a": 'exec("' + TOUCH + '")'}},
    "a file that is run": {"data": {"_target_": "runpy.run_path", "path_name": OWN}},
    "a module that is imported": {"data": {"_target_": "importlib.import_module", "name": "own"}},
    "hydra's own instantiate": {"data": {"_target_": "hydra.utils.instantiate", "config": SHELL}},
    "a doctest": {"data": {"_target_": "doctest.testfile", "filename": OWN, "module_relative": False}},
    "settings that are made within the task": {"data.path": SHELL},
    "settings that are made within the model": {"model.dtype": SHELL},
    "settings that are made within the trainer": {"trainer.chat_template_kwargs": SHELL},
    "settings that are made within a list": {"adapter": {"_target_": "peft.LoraConfig", "target_modules": [SHELL]}},
    "settings that are made within lists of lists": {"data.path": [[{"a": [SHELL]}]]},
    "settings that are made within the buffer": {
        "buffer": {"_target_": "rl_training.hosts.trl.buffer.FilteredBuffer", "seed": SHELL}
    },
    "a target that conf/ ships, elsewhere": {"data": {"_target_": "peft.LoraConfig"}},
    "a target that conf/ ships, deeper": {"data.path": {"_target_": "rl_training.models.load.load_tiny"}},
    "a place with a dot": {"data": {"_target_": "rl_training.tasks.arithmetic.arithmetic", "x.y": SHELL}},
    "a place without a name": {"model": {"_target_": "rl_training.models.load.load_tiny", "": SHELL}},
    "arguments by their place": {"data._args_": [SHELL]},
    "a function in the place of its result": {"data._partial_": True},
    "no recursion": {"model._recursive_": False},
    "another conversion": {"model._convert_": "none"},
    "a target that is a list": {"data._target_": ["os.system"]},
    "an intervention in a file": {"intervention": OWN + ":f"},
    "an intervention in a module": {"intervention": ["psr", "own:f:0.5"]},
    "the token of the reader": {"data.path": "${oc.env:HF_TOKEN}"},
    "the token within a text": {"trainer.run_name": "a ${oc.env:HF_TOKEN} b"},
    "the token behind a backslash": {"trainer.run_name": r"\\${oc.env:HF_TOKEN}"},
    "the token of the reader, as a text that is resolved twice": {"trainer.run_name": r"\${oc.env:HF_TOKEN}"},
    "the token of the reader, as a text that is resolved thrice": {"data.path": r"\\\${oc.env:HF_TOKEN}"},
    "the token of the reader, as a number of an evaluation": {"trainer.temperature": r"\${oc.env:HF_TOKEN}"},
    "another setting": {"data": "${model}"},
    "a text that is decoded": {"data.path": "${oc.decode:'{_target_: os.system}'}"},
    "a kernel of the Hub": {"model.attn_implementation": "somebody/kernel"},
    "code of a reference model's own": {"trainer.beta": 0.1, "trainer.trust_remote_code": True},
    "code of a reference model's own, as an argument": {
        "trainer.beta": 0.1,
        "trainer.model_init_kwargs": {"trust_remote_code": True},
    },
    "a module for PEFT": {
        "adapter": {"_target_": "peft.LoraConfig", "megatron_config": {"a": 1}, "megatron_core": "own"}
    },
    "a server that gets the prompts": {"trainer.vllm_server_base_url": "http://somebody.example"},
    "an alias bomb": BOMB,
    "an anchor": "x: &x 1\n",
    "a merge": "x: &x {a: 1}\ny:\n  <<: *x\n",
    "a tag": "x: !!python/object/apply:os.system ['touch {canary}']\n",
    "nesting without end": f"x: {'[' * 100_000}",
    "a megabyte of settings": f"x: '{'a' * 2**21}'\n",
    "two targets": "data: {_target_: rl_training.tasks.arithmetic.arithmetic, _target_: os.system}\n",
    "two documents": "x: 1\n---\nx: 2\n",
    "a list": "- 1\n",
    "bytes": "\0\1\2",
    "a number in the place of the trainer": {"trainer": 5},
    "a list in the place of a model": {"model": [1]},
    "a text in the place of probes": {"probes": "simple"},
}
# Settings that only a training uses, and an analysis or an evaluation ignores.
OF_TRAINING: dict[str, dict[str, Any]] = {
    "a probe": {"probes.mine": SHELL},
    "settings that are made within a probe": {"probes.simple.every": SHELL},
    "a probe of the package, run otherwise": {"probes.mine": {"_target_": "rl_training.records.pages.page._run"}},
    "an intervention in a file, for a probe": {
        "probes.interventions": {"_target_": "rl_training.probes.InterventionsProbe", "which": [OWN + ":f"]}
    },
    "an intervention for a probe with a dot": {
        "probes": {"a.b": {"_target_": "rl_training.probes.InterventionsProbe", "which": [OWN + ":f"]}}
    },
    "files for the Hub": {"trainer.push_to_hub": True},
    "responses for the Hub": {"trainer.log_completions_hub_repo": "somebody/repo"},
}


REFUSAL = r"If you trust whoever made the run, add to this command line: |fix or delete it|remove it|the value itself"
TASK = """
from rl_training.tasks.arithmetic import arithmetic
from rl_training.step.loss_weights import LossWeights

def task(rows):
    task = arithmetic(num_train=16)
    return type(task)(task.train_dataset, task.eval_dataset.select(range(rows)), task.reward)

def f(loss, strength):
    return loss.weights
"""


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return foreign_run(tmp_path)


@pytest.mark.parametrize("gadget", GADGETS | OF_TRAINING)
def test_no_setting_of_a_foreign_run_executes_code_or_leaks_a_secret(run: Path, gadget: str) -> None:
    """An analysis does not need the run's probes, and an evaluation only needs task and model. The rest is ignored."""
    changes = (GADGETS | OF_TRAINING)[gadget]
    write_config(run, changes)
    for command in (analyze, branch, evaluate):
        is_needed = isinstance(changes, str) or command is branch or gadget not in OF_TRAINING
        if command is evaluate and isinstance(changes, dict):
            is_needed = any(key.startswith(("data", "model")) for key in changes)
        line = said(command, run)
        assert not is_needed or re.search(REFUSAL, line), (command, line)


@pytest.mark.parametrize("gadget", ["a shell in the place of the task", "an alias bomb", "an intervention in a file"])
def test_the_offline_probe_refuses_the_same_foreign_settings_as_an_analysis(run: Path, gadget: str) -> None:
    write_config(run, GADGETS[gadget])
    assert re.search(REFUSAL, said(probe, run))


def test_code_named_by_a_foreign_run_is_used_once_typed_on_the_command_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of its settings stay as in the run."""
    (tmp_path / "a_task_of_mine.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    write_config(run, {"data": {"_target_": "a_task_of_mine.task", "rows": 24}, "intervention": "a_task_of_mine:f"})
    named = ["data._target_=a_task_of_mine.task", "intervention=a_task_of_mine:f"]
    for command, word in ((evaluate, named[0]), (branch, named[0]), (branch, named[1])):
        line = said(command, run)
        assert f"add to this command line: {word}" in line or word == named[1]
    assert evaluate(run, named[0]).spec.rows == tuple(range(24))
    assert branch(run, *named).data == {"_target_": "a_task_of_mine.task", "rows": 24}
    write_config(run, {"intervention": ["a_task_of_mine:f", r"my\own.py:f"]})
    with pytest.raises(
        ValueError, match=re.escape(r"""command line: 'intervention=[a_task_of_mine:f,"my\own.py:f"]'""")
    ):
        branch(run)
    write_config(run, {"data": {"_target_": "another_task.task"}})
    with pytest.raises(ValueError, match=r"data\._target_='a_task_of_mine\.task' \(was 'another_task\.task'\)"):
        branch(run, *named)


def test_settings_are_read_back_exactly_as_written(run: Path) -> None:
    """Text with a reference stays literal in provenance. A run with marked code resumes with the same settings."""
    strange = {"a": ["${oc.env:HF_TOKEN}", r"\${x}", "$HOME", "plain"]}
    settings = {"provenance": {**strange, "command": "echo ${HOME}"}, "data": {"path": "$HOME"}}
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(settings))))
    assert OmegaConf.to_container(load_settings(run / "config.yaml"), resolve=True) == settings
    write_config(run, {"data._target_": "a_task_of_mine.task"})
    assert load_settings(run / "config.yaml").data._target_ == f"{MARK}a_task_of_mine.task"
    refuse_other_settings(composed("train", "data._target_=a_task_of_mine.task", "trainer.max_steps=2"), run)
    with pytest.raises(ValueError, match=r"data\._target_='rl_training.tasks.arithmetic.arithmetic'"):
        refuse_other_settings(composed("train", "trainer.max_steps=2"), run)


def test_a_tilde_in_a_foreign_run_is_not_the_home_of_the_reader(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is typed is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    stored = {"data.path": "~/secret.jsonl", "model.name": "~/weights"}
    write_config(run, stored)
    checkpoint = run / "training_state" / "checkpoint-1"
    own, analyzed, typed = branch(run), run_settings(checkpoint, []), run_settings(checkpoint, ["model.name='~/mine'"])
    own = prepare_run(own).cfg
    for settings in (own, analyzed):
        assert {key: OmegaConf.select(settings, key) for key in stored} == stored
    assert typed.model.name == f"{tmp_path}/mine"
    assert typed.data.path == stored["data.path"]
    (tmp_path / "secret.jsonl").write_text(
        '{"question": "1?", "answer": "#### 1"}\n{"question": "2?", "answer": "#### 2"}\n'
    )
    write_config(run, {"data": {"_target_": "rl_training.tasks.gsm8k.gsm8k", "path": "~/secret.jsonl"}})
    with pytest.raises(UserError, match=re.escape(f"{Path.cwd()}/~/secret.jsonl")):
        evaluate(run)
    assert len(evaluate(run, "data.path='~/secret.jsonl'").spec.task.train_dataset) == 1


def test_a_config_file_of_the_offline_probe_cannot_approve_code(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe.yaml"
    for words in (["+data._target_=os.system"], ["data={_target_: os.system, command: x}"], ["intervention=own.py:f"]):
        file.write_text(yaml.dump({"overrides": words}))
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: .*command line"):
            OfflineEntropyProbe.from_config_file(file)
        OfflineEntropyProbe({"overrides": words})
    for text in ("${oc.env:HF_TOKEN}", "a=${oc.env:HF_TOKEN}"):
        file.write_text(yaml.dump({"overrides": [text]}))
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: overrides.*oc.env:HF_TOKEN"):
            OfflineEntropyProbe.from_config_file(file)


@pytest.mark.parametrize("content", [
    {"r": "${oc.env:HF_TOKEN}"}, {"r": {"_target_": "os.system"}}, {"lora_alpha": "1"}, {"target_modules": [{"a": 1}]},
    {"target_modules": "${oc.env:HF_TOKEN}"}, {"target_modules": ["q", "x],data._target_=[os.system"]}, [],
])  # fmt: skip
def test_a_foreign_adapter_may_give_only_module_names_and_numbers(tmp_path: Path, content: Any) -> None:
    whole = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(whole))
    assert "adapter.target_modules=[q_proj,v_proj]" in OfflineEntropyProbe({}).overrides(tmp_path)
    file.write_text(json.dumps(whole | content if content else content))
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        OfflineEntropyProbe({}).overrides(tmp_path)


def test_built_in_interventions_need_no_approval_as_code() -> None:
    assert not any(names_code(text) for name in INTERVENTIONS for text in (name, f"{name}:0.5", f"{name}:0.5,2"))


def test_settings_are_instantiated_in_one_place_only() -> None:
    """The command for verl also makes probes, but from what was typed, and reads no folder."""
    places: dict[str, set[str]] = {}
    for path in (ROOT / "rl_training").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom | ast.Import) else []
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            for name in (*names, called):
                if re.fullmatch(
                    r"(\w*\.)*instantiate|OmegaConf\.load|yaml\.(\w*load\w*|parse)|torch\.load|pickle(\.\w+)?", name
                ):
                    places.setdefault(name, set()).add(str(path.relative_to(ROOT / "rl_training")))
    assert places == {
        "instantiate": {"job/objects/make.py", "hosts/verl/probes.py"},
        # Also for files in conf/, and for Hydra's file about a sweep.
        "OmegaConf.load": {
            "job/configuration/stored.py",
            "job/configuration/nested.py",
            "job/configuration/composition.py",
        },
        "yaml.parse": {"records/files/stored_yaml.py"},
        "pickle": {"records/files/pickles.py"},  # an error's name
        "torch.load": {"records/files/pickles.py", "offline/restored.py"},  # both with weights_only=True
        "yaml.safe_load": {"records/files/stored_yaml.py", "records/dashboard.py"},  # after plain_yaml; its own file
        "yaml.load": {"records/pages/charts.py"},  # the package's own templates
    }
