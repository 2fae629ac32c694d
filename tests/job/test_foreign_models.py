"""A model or adapter from an untrusted source: code in its folder is not run, whatever refers to it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from foreign_runs import TOUCH, Canary

from rl_training.errors import UserError
from rl_training.job.objects.checkpoint_policy import load_policy
from rl_training.models import adapter_patterns
from rl_training.models.adapter_patterns import refuse_endless_patterns
from rl_training.models.load import TINY_PATH, load_causal_lm, load_tiny

ENDLESS = r"(([a-z_.0-9]+)*)*:"
ESCAPE = "{{ cycler.__init__.__globals__.os.system('touch ' ~ canary) }}{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the shipped model, and add code that would create a canary file."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_PATH, folder)
    code = TOUCH.format(canary=tmp_path / "canary")
    (folder / "custom_generate").mkdir()
    for name in ("mine.py", "custom_generate/generate.py"):
        (folder / name).write_text(f"{code}\nclass Mine: ...\ndef generate(model, **_): ...\n")
    return folder


def write(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def model_of_its_own(folder: Path) -> None:
    maps = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    write(folder / "config.json", model_type="mine", auto_map=maps)


def model_of_a_known_kind(folder: Path) -> None:
    write(folder / "config.json", auto_map={"AutoModelForCausalLM": "mine.Mine"})


def tokenizer_of_its_own(folder: Path) -> None:
    write(folder / "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})


def kernel_of_the_hub(folder: Path) -> None:
    write(folder / "config.json", attn_implementation="somebody/kernel")


def kernel_of_the_hub_by_part(folder: Path) -> None:
    write(folder / "config.json", attn_implementation={"": "somebody/kernel"})


def kernel_of_the_hub_for_experts(folder: Path) -> None:
    write(folder / "config.json", text_config={"experts_implementation": {"text": ["x", "somebody/kernel"]}})


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"w": Canary(folder.parent / "canary")}, folder / "pytorch_model.bin")


def adapter_with_a_module(folder: Path) -> None:
    lora = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": str(TINY_PATH)}
    (folder / "adapter_config.json").write_text(
        json.dumps(lora | {"megatron_config": {"a": 1}, "megatron_core": "mine"})
    )


def adapter_with_an_endless_pattern(folder: Path, **changes: Any) -> None:
    lora = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": str(TINY_PATH)}
    changes = changes or {"target_modules": ENDLESS}
    (folder / "adapter_config.json").write_text(json.dumps(lora | changes))


REFUSED: dict[Callable[[Path], None], str] = {
    model_of_its_own: "needs code that comes with it",
    kernel_of_the_hub: "would fetch and run compiled code.*model.attn_implementation=sdpa",
    kernel_of_the_hub_by_part: "would fetch and run compiled code.*model.attn_implementation=sdpa",
    kernel_of_the_hub_for_experts: "would fetch and run compiled code: experts_implementation",
    adapter_with_an_endless_pattern: r"adapter_config.json: the pattern '\(\(\[a-z.*give names of modules",
    pickled_weights: "no model could be loaded",
    adapter_with_a_module: "names modules to be imported",
}


@pytest.mark.parametrize(
    "make", [*REFUSED, model_of_a_known_kind, tokenizer_of_its_own], ids=lambda make: make.__name__
)
def test_no_code_of_a_model_folder_is_run(folder: Path, make: Callable[[Path], None], monkeypatch) -> None:
    """Known classes are loaded without the folder's code."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(adapter_patterns, "MAX_SECONDS", 2.0)
    make(folder)
    if make in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[make]):
            load_causal_lm(folder)
    else:
        model, tokenizer = load_causal_lm(folder)
        model.generate(**tokenizer("1+1=", return_tensors="pt"), max_new_tokens=2)
    assert not (folder.parent / "canary").exists()


def test_no_module_that_an_adapter_names_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    adapter_with_a_module(folder)
    with pytest.raises(ValueError, match="megatron_config"):
        load_policy(folder, load_tiny, with_reference=False, temperature=1.0, max_completion_length=4)
    assert not (folder.parent / "canary").exists()


@pytest.mark.parametrize(
    ("changes", "is_endless"),
    [
        ({"exclude_modules": ENDLESS}, True),
        ({"rank_pattern": {ENDLESS: 2}}, True),
        ({"alpha_pattern": {"q_proj": 2, ".*.*.*.*.*.*.*.*.*:": 2}}, True),
        ({"layers_pattern": [ENDLESS]}, True),
        ({"target_modules": r".*\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|up|down)_proj"}, False),
        (
            {"target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q|k)_proj.*?)|(?:\bmodel\..*)"},
            False,
        ),
        ({"target_modules": ["q_proj", "model.layers.0.mlp"], "rank_pattern": {"^model.*q_proj": 4}}, False),
        ({"target_modules": "all-linear", "modules_to_save": None}, False),
    ],
    ids=str,
)
def test_an_adapter_is_refused_for_a_pattern_that_never_ends_and_for_no_other(
    monkeypatch, changes: Any, is_endless: bool
) -> None:
    if is_endless:
        monkeypatch.setattr(adapter_patterns, "MAX_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"^adapter: .*\b0 s\b") if is_endless else contextlib.nullcontext():
        refuse_endless_patterns({"target_modules": ["q_proj"], **changes}, "adapter", ["model.layers.0.mlp.up_proj"])


def test_a_pattern_whose_trial_crashes_is_named_and_not_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = adapter_patterns.TRIAL.replace(
        "    for expression", "    if pattern == 'b*': sys.exit(1)\n    for expression"
    )
    monkeypatch.setattr(adapter_patterns, "TRIAL", trial)
    with pytest.raises(UserError, match=r"^adapter: .*'b\*' .* names"):
        refuse_endless_patterns({"target_modules": ["a*", "b*"]}, "adapter")


def test_an_adapter_with_settings_of_any_size_is_refused_before_it_is_read(folder: Path) -> None:
    with open(folder / "adapter_config.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"adapter_config.json .* 1 MB"):
        load_causal_lm(folder)


def test_a_chat_template_cannot_access_python_objects(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(ESCAPE)
    _, tokenizer = load_causal_lm(folder)
    with pytest.raises(jinja2.exceptions.SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}], canary=str(folder.parent / "canary"))
    assert not (folder.parent / "canary").exists()
