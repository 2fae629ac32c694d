"""Do the predictions hold for larger models and longer responses? GRPO runs with 200 tokens a response.

    OMP_NUM_THREADS=1 python benchmarks/size.py train --size 1m            trains a base model, then 40 GRPO steps
    OMP_NUM_THREADS=1 python benchmarks/size.py train --size 10m --lora
    OMP_NUM_THREADS=1 python benchmarks/size.py table                      a table of all existing runs
    OMP_NUM_THREADS=1 python benchmarks/size.py interventions --size 1m    at the states 10, 20, 30 and 40 of a run

A response is a chain of sums modulo 10, 50 lines like `+3=0` after the prompt `q7:`; the model chooses what to add. It
earns 1 if every line is right. The base model starts as a Qwen2 with random weights and learns from chains with errors,
rare after +1, +2 and +3 and frequent after the others. So a third of the responses are right, and GRPO can improve.

`train` measures the entropy change on fresh responses (probes/ground_truth.py) for comparison with the predictions.
`interventions` draws new batches at each state. It compares each intervention's predicted change with the change of the
step times the entropy and reward gradients from `--sequences` fresh responses.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path

import rl_training.job.silence  # noqa: F401

import torch
from datasets import Dataset
from default_task import Progress, default_trainer
from other_samplers import StateKeeper
from peft import LoraConfig
from sampler import Corrections, large_sample, print_cases
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_training import DrGRPOTrainer, Probe
from rl_training.probes import GroundTruthProbe, MeasuredStepProbe, SimpleEntropyProbe
from rl_training.records.jsonl import Records, read_estimates
from rl_training.statistics.calibration import interval_covers
from rl_training.tasks.task import Task
from rl_training.tasks.tiny import build_tokenizer

LINES = 50  # per response, 4 tokens each
EASY, ERROR = (1, 2, 3), (0.002, 0.02)  # easy addends; error rates of worked lines with an easy and another addend
# hidden size, layers; steps and learning rate of the base model; prompts, responses per prompt, learning rate of GRPO
SIZES = {"1m": (128, 5, 300, 2e-3, 16, 8, 3e-4), "10m": (320, 8, 150, 1e-3, 8, 4, 5e-5)}

STATES = (10, 20, 30, 40)
INTERVENTIONS = ["bonus:0.1", "psr", "nsr", "w_reinforce", "std_norm", "clip_cov:0.02", "top_entropy"]


def prompts(seed: int, number: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{rng.choice('abcdefghijklmnopqrstuvwxyz')}{rng.randrange(10)}:" for _ in range(number)]


def chain(prompt: str, rng: random.Random) -> str:
    """Return a worked response. The prompt's letter decides how often it adds 1, 2 or 3."""
    total, lines = int(prompt[1]), []
    for _ in range(LINES):
        easy = rng.random() < 0.3 + 0.02 * (ord(prompt[0]) - ord("a"))
        added = rng.choice(EASY if easy else (4, 5, 6, 7, 8, 9))
        total = rng.randrange(10) if rng.random() < ERROR[not easy] else (total + added) % 10
        lines.append(f"+{added}={total}")
    return "".join(lines)


def all_lines_right(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [float(_is_right(int(prompt[1]), text)) for prompt, text in zip(prompts, completions, strict=True)]


def _is_right(total: int, text: str) -> bool:
    lines = [text[start : start + 4] for start in range(0, len(text), 4)]
    for line in lines:
        if not (len(line) == 4 and line[0] == "+" and line[2] == "=" and line[1].isdigit() and line[3].isdigit()):
            return False
        total = (total + int(line[1])) % 10
        if total != int(line[3]):
            return False
    return len(lines) == LINES


def base_model(folder: Path, size: str) -> None:
    """Train the model that GRPO starts from, on worked responses, and save it with its tokenizer."""
    hidden, layers, steps, rate, *_ = SIZES[size]
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = 256
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, max_position_embeddings=256,
        tie_word_embeddings=True, initializer_range=0.05, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    rng = random.Random(0)
    for step in (bar := tqdm(range(steps), desc=f"base model, {model.num_parameters():,} parameters")):
        rows = [prompt + chain(prompt, rng) for prompt in prompts(step, 32)]
        ids = torch.tensor(tokenizer(rows).input_ids)
        labels = ids.clone()
        labels[:, :3] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trainer_of(
    output: Path, size: str, lora: bool, probes: list[Probe], steps: int, scratch: str, records: Records | None = None
) -> DrGRPOTrainer:
    """Return a trainer that starts from the base model of this size. Trains the base model first if it is missing."""
    base = output / f"base_{size}"
    if not base.is_dir():
        base_model(base, size)
    num_prompts, responses, rate = SIZES[size][-3:]
    train_dataset, eval_dataset = (Dataset.from_dict({"prompt": prompts(seed, 4096)}) for seed in (-1, -2))
    settings = {"peft_config": LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")} if lora else {}
    return default_trainer(
        scratch, probes, steps, 2e-3 if lora else rate, records=records, model_folder=base,
        task=Task(train_dataset, eval_dataset, all_lines_right), num_generations=responses,
        per_device_train_batch_size=num_prompts * responses // 8, max_completion_length=4 * LINES, **settings,
    )  # fmt: skip


def train(output: Path, size: str, lora: bool, steps: int, every: int, sequences: int) -> None:
    """Train one run and record every prediction, and the measured truth at every `every`-th step."""
    folder = output / f"{size}{'_lora' if lora else ''}"
    probes = [SimpleEntropyProbe(), MeasuredStepProbe(), GroundTruthProbe(every, sequences)]
    began = time.time()
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=steps, desc=folder.name, unit="step") as bar:
        trainer = trainer_of(output, size, lora, probes, steps, scratch, Records(folder))
        trainer.add_callback(Progress(bar))
        trainer.train()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    facts = {"parameters": parameters, "prompts": SIZES[size][-3], "seconds": time.time() - began}
    facts["rewards"] = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def interventions(output: Path, size: str, batches: int, sequences: int) -> None:
    """Print how many intervals of INTERVENTIONS cover the true change, at each of STATES and over all."""
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        run = StateKeeper()
        first = trainer_of(output, size, False, [], STATES[-1] + 1, scratch)
        first.add_callback(run)
        first.train()
        for state in STATES:
            first.model.load_state_dict(run.weights[state], strict=False)
            truth = large_sample(first, sequences, seed=77, part_size=sequences // 8)
            probe = Corrections(run, truth, INTERVENTIONS, state)
            again = trainer_of(output, size, False, [SimpleEntropyProbe(num_folds=8), probe], batches, scratch)
            again.add_callback(StateKeeper((run.weights[state], run.optimizers[state])))
            print(f"state {state}:", flush=True)
            again.train()
            probe.report()
            cases += probe.cases
    print_cases("all", cases)


def row_of(folder: Path) -> str:
    """Return a table row: coverage and error for single steps, and sums over the run."""
    by_name: dict[str, dict[int, dict[str, float]]] = {}
    for row in read_estimates(folder):
        by_name.setdefault(row["name"], {})[row["about_step"]] = row
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    truth = by_name["delta_h/true"]
    cells = [folder.name, f"{facts['parameters']:,}", f"{facts['rewards'][0]:.2f} → {facts['rewards'][-1]:.2f}"]
    for name in ("measured/delta_h", "delta_h/forward", "delta_h/backward", "delta_h/trapezoid"):
        pairs = [
            (p, true)
            for step, true in truth.items()
            if (p := by_name.get(name, {}).get(step)) and p["stderr"] is not None and math.isfinite(p["stderr"])
        ]
        held = [
            interval_covers(p["value"] - true["value"], p["stderr"], int(p["num_samples"]), true["stderr"])
            for p, true in pairs
        ]
        cells.append(f"{sum(held):.0f} of {len(held)}")
    cells += [
        f"{sum(row['value'] for row in rows):+.4f} ± {1.96 * math.hypot(*(row['stderr'] for row in rows)):.4f}"
        for rows in zip(*pairs, strict=True)
    ]
    predicted, measured = (by_name[f"delta_h/cumulative_{name}"] for name in ("predicted", "measured"))
    last = max(predicted)
    cells += [f"{row[last]['value']:+.4f} ± {1.96 * row[last]['stderr']:.4f}" for row in (predicted, measured)]
    pairs = [(by_name["delta_h/forward"][step], true) for step, true in truth.items()]
    error = sum((p["value"] - true["value"]) ** 2 - true["stderr"] ** 2 for p, true in pairs)
    size = sum(true["value"] ** 2 - true["stderr"] ** 2 for _, true in pairs)
    cells += [f"{math.sqrt(error / size):.2f}", f"{4 * facts['prompts'] * error / size:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["train", "table", "interventions"])
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=2, help="steps between measurements on fresh responses")
    parser.add_argument("--sequences", type=int, default=512, help="fresh responses of each measurement")
    parser.add_argument("--batches", type=int, default=8, help="batches at each state of `interventions`")
    parser.add_argument("--output", type=Path, default=Path("runs/size"))
    options = parser.parse_args()
    if options.part == "train":
        train(options.output, options.size, options.lora, options.steps, options.every, options.sequences)
        return
    if options.part == "interventions":
        interventions(options.output, options.size, options.batches, options.sequences)
        return
    titles = ("run", "parameters", "reward", "measured", "forward", "backward", "trapezoid", "Σ trapezoid", "Σ true",
              "run: predicted", "measured", "error of forward / change", "prompts by it", "by the probe")  # fmt: skip
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for folder in sorted(path.parent for path in options.output.glob("*/facts.json")):
        print(row_of(folder))


if __name__ == "__main__":
    main()
