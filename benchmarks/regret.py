"""How much does a choice of what to train with regret? Five ways to choose, against the best arm of long runs.

    python benchmarks/regret.py register RUNS      trains the runs, 20 steps each, and writes down what each way chooses
    python benchmarks/regret.py arms RUNS          trains all arms from there to step 80, three seeds each
    python benchmarks/regret.py table RUNS         prints the regrets: how far below the best arm the chosen one ends

The ways are (a) the report at step 20, (b) `rl-training try` with branches of 20 steps, (c) plain, (d) PSR, (e) the
lowest price at step 20. What they choose is written to regret_registered.json, which is committed before `arms` is run;
`arms` refuses a setting that is not in it. --settings NAME … takes some; --small shrinks all, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import rl_training.job.silence  # noqa: F401

from rl_training.records.folder import LOGS_FOLDER
from rl_training.records.jsonl import read_metrics
from rl_training.records.report.interventions import as_list, preferred
from rl_training.records.report.series import read_run

REGISTERED = Path(__file__).with_name("regret_registered.json")
LONG = ["+data.min_operands=8", "+data.max_operands=9", "trainer.max_completion_length=48"]
SHORT = ["+data.min_operands=3", "+data.max_operands=4", "trainer.max_completion_length=16"]
# 32 prompts with 8 responses; learning rates at which entropy falls slowly and fast.
SETTINGS = {
    "chains_3e-4": ["trainer.learning_rate=3e-4"],
    "chains_1e-3": ["trainer.learning_rate=1e-3"],
    "chains_lora_3e-3": ["adapter=lora", "trainer.learning_rate=3e-3"],
    "long_3e-4": [*LONG, "trainer.learning_rate=3e-4"],
    "long_1e-3": [*LONG, "trainer.learning_rate=1e-3"],
    "long_lora_3e-3": [*LONG, "adapter=lora", "trainer.learning_rate=3e-3"],
    "short_1e-3": [*SHORT, "trainer.learning_rate=1e-3"],
    "long_beta2_1e-3": [*LONG, "trainer.learning_rate=1e-3", "trainer.adam_beta2=0.999"],
}
ARMS = ["lr:0.5", "bonus:{bonus}", "psr", "nsr", "clip_cov"]
KL = "kl:0.04"  # with an adapter: the reference is the base model
WAYS = ("report", "try", "plain", "psr", "price")
SMALL = ["trainer.num_generations=4", "batch.sequences_per_step=32", "batch.microbatch_size=4"]


def command(*words: str) -> None:
    """Runs a command of rl-training."""
    subprocess.run([sys.executable, "-m", "rl_training", *words], check=True)


def arms_of(setting: str, strengths: dict[str, str]) -> list[str]:
    """Returns the arms of a setting, plain apart, with the strength of the bonus that the report asks for."""
    names = [arm.format(bonus=strengths.get("bonus", "0.01")) for arm in ARMS]
    return [*names, *([KL] if "lora" in setting else [])]


def lowest_price(run: Path) -> str:
    """Returns what keeps entropy at the lowest mean price at the last measured step; plain for nothing."""
    row = next(row for row in reversed(read_metrics(run / LOGS_FOLDER)) if "intervention/psr/delta_h" in row)
    names = [key.split("/")[1] for key in row if key.startswith("intervention/") and key.endswith("/mean_price")]
    prices = {name: row[f"intervention/{name}/mean_price"] for name in names if row[f"intervention/{name}/delta_h"] > 0}
    return min((name for name in prices if math.isfinite(prices[name])), key=prices.__getitem__, default="plain")


def register(setting: str, runs: Path, small: bool) -> dict[str, object]:
    """Trains the run of a setting, and returns what each way chooses and the arms, before these are trained."""
    run, size = runs / setting, SMALL if small else []
    which = "[bonus,psr,nsr,lr,clip_cov" + (",kl]" if "lora" in setting else "]")
    if not (run / "config.yaml").is_file():
        command("train", *SETTINGS[setting], *size, f"run_dir={run}", f"trainer.max_steps={2 if small else 20}",
                "probe=[simple,interventions]", "probes.interventions.every=1", f"probes.interventions.which={which}",
                "logger=none")  # fmt: skip
    asked = [text.partition(":") for text in preferred(read_run(run))]
    arms = arms_of(setting, {name: strength for name, _, strength in asked if strength})
    steps, seeds = (1, 1) if small else (20, 3)
    command("try", str(run), f"interventions={as_list(arms)}", f"steps={steps}", f"seeds={seeds}",
            f"evaluation.fraction={0.02 if small else 0.25}", f"output={run}_try")  # fmt: skip
    result = json.loads(Path(f"{run}_try", "result.json").read_text(encoding="utf-8"))
    chosen = {"report": asked[0][0] if asked else "plain", "try": result["choice"].partition(":")[0],
              "plain": "plain", "psr": "psr", "price": lowest_price(run)}  # fmt: skip
    return {"arms": arms, "chosen": chosen}


def train_arms(setting: str, runs: Path, arms: list[str], small: bool) -> None:
    """Trains all arms of a setting to step 80, and evaluates them."""
    steps, seeds = (2, 2) if small else (60, 3)
    command("try", str(runs / setting), f"interventions={as_list(arms)}", f"steps={steps}", f"seeds={seeds}",
            "halving=false", f"evaluation.fraction={0.02 if small else 0.25}",
            f"output={runs / setting}_arms")  # fmt: skip


def regrets(setting: str, runs: Path, chosen: dict[str, str]) -> dict[str, dict[str, float]]:
    """Returns by way and quantity how far the chosen arm's difference to plain lies below the best arm's."""
    result = json.loads((runs / f"{setting}_arms" / "result.json").read_text(encoding="utf-8"))
    ends = {each["name"].split(":")[0]: each["differences"] for each in result["candidates"]}
    quantities = [name for name in next(iter(ends.values())) if name == "reward" or name.startswith("pass@")]
    gains = {arm: {name: row[name][0] for name in quantities} for arm, row in ends.items()}
    gains["plain"] = dict.fromkeys(quantities, 0.0)
    best = {name: max(row[name] for row in gains.values()) for name in quantities}
    return {way: {name: best[name] - gains[chosen[way]][name] for name in quantities} for way in WAYS}


def print_table(settings: list[str], runs: Path, registered: dict[str, dict[str, dict[str, str]]]) -> None:
    """Prints the regret in each quantity of each way at each setting, and its median and sum."""
    found = {setting: regrets(setting, runs, registered[setting]["chosen"]) for setting in settings}
    for name in next(iter(found.values()))["plain"]:
        print(f"\n{name:20}" + "".join(f"{way:>10}" for way in WAYS))
        for setting, rows in found.items():
            print(f"{setting:20}" + "".join(f"{rows[way][name]:10.3f}" for way in WAYS))
        columns = [sorted(rows[way][name] for rows in found.values()) for way in WAYS]
        medians = [(column[(len(column) - 1) // 2] + column[len(column) // 2]) / 2 for column in columns]
        print(f"{'median':20}" + "".join(f"{median:10.3f}" for median in medians))
        print(f"{'sum':20}" + "".join(f"{sum(column):10.3f}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["register", "arms", "table"])
    parser.add_argument("runs", type=Path, help="folder of all runs")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--small", action="store_true", help="to see that it runs: registered in RUNS, not here")
    options = parser.parse_args()
    file = options.runs / REGISTERED.name if options.small else REGISTERED
    registered = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if options.part == "table":
        print_table([name for name in options.settings if name in registered], options.runs, registered)
        return
    for setting in options.settings:
        if options.part == "register":
            registered.setdefault(setting, {}).update(register(setting, options.runs, options.small))
            file.write_text(json.dumps(registered, indent=1), encoding="utf-8")
        elif setting not in registered:
            sys.exit(f"{setting} is not registered: what is chosen has to be written down before the arms are trained")
        else:
            train_arms(setting, options.runs, registered[setting]["arms"], options.small)


if __name__ == "__main__":
    main()
