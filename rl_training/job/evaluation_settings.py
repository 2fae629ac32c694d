"""Checks of evaluate.py's configuration that need no slow import: what is set, its kinds and ranges."""

from __future__ import annotations

from omegaconf import DictConfig

from rl_training.job.explain import load_plain
from rl_training.job.settings import Range, refuse_other_kinds, refuse_unset
from rl_training.job.shipped import CONF

RANGES = {
    "fraction": Range(float, 0, 1, open=True), "responses_per_prompt": Range(int, 1), "k": Range(int, 1, or_none=True),
    "temperature": Range(float, 0, open=True, or_none=True), "max_completion_length": Range(int, 1, or_none=True),
    "seed": Range(int, 0), "batch_size": Range(int, 1), "jobs": Range(int, 1),
}  # fmt: skip


def check_evaluation(cfg: DictConfig) -> None:
    """Raises ValueError for values that are not set, or mean nothing."""
    refuse_unset(cfg)
    refuse_other_kinds(cfg, load_plain(CONF / "evaluate.yaml"))
    e = cfg.evaluation
    for name, numbers in RANGES.items():
        hint = "; evaluation.greedy decodes greedily" if name == "temperature" else ""
        numbers.check(f"evaluation.{name}", e[name], hint)
    if e.k is not None and e.k > e.responses_per_prompt:
        raise ValueError(
            f"evaluation.k={e.k} is above evaluation.responses_per_prompt={e.responses_per_prompt}: pass@k needs at "
            f"least k responses; use evaluation.responses_per_prompt={e.k}"
        )
