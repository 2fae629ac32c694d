"""Trains with vLLM on the CPU: python tests/support/vllm_runs.py FOLDER KIND; prints one line of JSON.

KIND    plain     trl.GRPOTrainer, all parameters
        lora      DrGRPOTrainer with an adapter, which TRL merges for vLLM; also resumed after its first step
        filtered  DrGRPOTrainer with buffer=filtered
        bf16      plain, but sampled with TRL's default: in bf16 from fp32 weights. The same rollouts are measured a
                  second time as if the trainer's own policy had sampled them.

Each trains without probes and with all of them, from the same seeds. It needs a separate process, because vLLM sets
RANK and other variables and replaces functions of torch. On the CPU vLLM packs the weights, and then TRL cannot update
them: see `keep_weights`. Nothing in this package is changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CACHE_ROOT": tempfile.mkdtemp(prefix="vllm-"),
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip

import torch
import trl.generation.vllm_generation as generation
import vllm.model_executor.layers.utils as layers
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from rl_training import DrGRPOConfig, DrGRPOTrainer, attach
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.models.load import TINY_PATH
from rl_training.probes import (
    CovariancePredictorProbe,
    EffectiveSampleSizeProbe,
    GradientNoiseScaleProbe,
    GroundTruthProbe,
    SimpleEntropyProbe,
)
from rl_training.tasks.arithmetic import arithmetic

STEPS = 3


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Replace vLLM's choice of a CPU matrix product: all of its options pack the weights and drop the originals."""
    layer.cpu_linear = torch.nn.functional.linear


def save_model(folder: Path) -> Path:
    """Save a random Qwen2 with the tiny tokenizer, and return its folder. vLLM's CPU kernels need heads of size 32."""
    set_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(TINY_PATH, **shape)).float()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_PATH).save_pretrained(folder)
    return folder


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]


def is_even(completions: list[str], **columns: Any) -> list[float]:
    """Return a reward of 0 or 1 that depends on the text, so that some prompts have zero advantage."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def make_trainer(folder: Path, model: Path, kind: str, probed: bool) -> GRPOTrainer:
    set_seed(0)
    simple = SimpleEntropyProbe(per_sequence=True)
    others = [GradientNoiseScaleProbe(), EffectiveSampleSizeProbe(), CovariancePredictorProbe()]
    probes = [simple, GroundTruthProbe(every=2, sequences=16), *others] * probed
    ours = kind in ("lora", "filtered")
    args = (DrGRPOConfig if ours else GRPOConfig)(
        output_dir=str(folder), use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64, use_cpu=True, bf16=False,
        per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=4, max_completion_length=16,
        max_steps=STEPS, learning_rate=3e-3 if kind == "lora" else 3e-4, weight_decay=0.1, lr_scheduler_type="constant",
        beta=0.0, gradient_checkpointing=False, save_strategy="steps" if kind == "lora" else "no", save_steps=1,
        logging_steps=1, report_to=[], disable_tqdm=True,
        **({} if ours else {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    )  # fmt: skip
    trainer = (DrGRPOTrainer if ours else GRPOTrainer)(
        model=str(model),
        reward_funcs=is_even if kind == "filtered" else share_of_digits,
        args=args,
        train_dataset=arithmetic(num_train=64, num_eval=1).train_dataset,
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if kind == "lora" else None,
        **({"probes": probes, "buffer": FilteredBuffer() if kind == "filtered" else None} if ours else {}),
    )
    if probed and not ours:
        trainer.attachment = attach(trainer, probes=probes, whole_prompts=True)
    elif not ours:
        attach(trainer, probes=[], whole_prompts=True)
    trainer.remove_callback(PrinterCallback)
    return trainer


def sampled(trainer: GRPOTrainer) -> list[dict[str, torch.Tensor]]:
    """Return a list that collects vLLM's and the trainer's log-probabilities of each rollout."""
    rollouts: list[dict[str, torch.Tensor]] = []
    original = trainer._generate_and_score_completions

    def listening(inputs: Any) -> Any:
        output = original(inputs)
        keys = ("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "completion_ids")
        rollouts.append({key: output[key].clone() for key in keys})
        return output

    trainer._generate_and_score_completions = listening
    return rollouts


def forget_what_vllm_sampled_from(trainer: GRPOTrainer) -> None:
    """Show probes rollouts as if the trainer's policy had sampled them."""
    rollouts = trainer.attachment._measured.rollouts
    read = rollouts.read
    rollouts.read = lambda inputs: dataclasses.replace(read(inputs), sampling_logps=None)


def train(
    folder: Path, model: Path, kind: str, probed: bool, resume: Path | None = None, unweighted: bool = False
) -> dict[str, Any]:
    trainer = make_trainer(folder, model, kind, probed)
    if unweighted:
        forget_what_vllm_sampled_from(trainer)
    rollouts = sampled(trainer)
    set_seed(1)  # again, because the first trainer has created the vLLM engine, which sets its own seed
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    differences = [
        (r["sampling_per_token_logps"] - r["old_per_token_logps"])[r["completion_mask"].bool()] for r in rollouts
    ]
    return {
        "parameters": {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad},
        "completions": [r["completion_ids"] * r["completion_mask"] for r in rollouts],
        "differences": torch.cat(differences),
        "forward": [line.get("delta_h/forward") for line in trainer.state.log_history if "loss" in line],
        "forward_se": [line.get("delta_h/forward_se") for line in trainer.state.log_history if "loss" in line],
        "processes": trainer.accelerator.num_processes,
        "filled": [line.get("buffer/filled") for line in trainer.state.log_history if "loss" in line],
    }


def same(a: dict[str, Any], b: dict[str, Any], last: int = STEPS) -> bool:
    pairs = [*((a["parameters"][n], b["parameters"][n]) for n in a["parameters"])]
    pairs += zip(a["completions"][-last:], b["completions"][-last:], strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ.get("RANK", "0")
    layers.dispatch_cpu_unquantized_gemm = keep_weights
    dtype = {} if kind == "bf16" else {"dtype": "float32"}
    generation.LLM = functools.cache(functools.partial(generation.LLM, enforce_eager=True, **dtype))
    model = save_model(folder / f"model_{rank}")
    bare, probed = (train(folder / f"{kind}_{p}", model, kind, p) for p in (False, True))
    outcome = {
        "same": same(bare, probed),
        "largest_difference": float(probed["differences"].abs().max()),
        "ratio": [float(probed["differences"].min().exp()), float(probed["differences"].max().exp())],
        **{key: probed[key] for key in ("forward", "forward_se", "processes", "filled")},
    }
    if kind == "lora":
        checkpoint = folder / f"{kind}_True" / "checkpoint-1"
        resumed = train(folder / "resumed", model, kind, True, resume=checkpoint)
        outcome["resumed"] = same(probed, resumed, last=STEPS - 1)
        outcome["forward_resumed"] = resumed["forward"][-1]
    if kind == "bf16":
        unweighted = train(folder / "unweighted", model, kind, True, unweighted=True)
        outcome["same"] = outcome["same"] and same(probed, unweighted)
        outcome["forward_unweighted"] = unweighted["forward"]
    if rank == "0":
        print(json.dumps(outcome), flush=True)
    os._exit(0)  # vLLM's and gloo's teardown wait for each other


if __name__ == "__main__":
    main()
