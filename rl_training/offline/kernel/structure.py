"""Summaries of a finished kernel: which classes of pairs change entropy, and how gradients are aligned.

Everything is computed from the kernel's files, without a model.

    contribution of a pair     C(i, j) = c X̃(i, j) A_j /(N_E N_U L), in nats per token; sums to δH₁'s gradient part
    same text                  the same tokens, prompt and response: all that a covariance within one sequence can see
    coupling                   all other pairs: the effect of sequences on one another through shared parameters
      same prompt, other text  anti-aligned, because E[∂S | prompt] = 0
      other prompt
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rl_training.errors import UserError
from rl_training.offline.kernel.clusters import participation_ratio
from rl_training.offline.kernel.sketches import cosines
from rl_training.optim.formula import CAUSES
from rl_training.records.files.damaged import naming_the_file
from rl_training.records.files.limited import MAX_STATE_BYTES, read_text
from rl_training.records.json_values import from_json

SAME_TEXT = "same text"
SAME_PROMPT = "same prompt, other text"
OTHER_PROMPT = "other prompt"
CLASSES = (SAME_TEXT, SAME_PROMPT, OTHER_PROMPT)
COUPLING = "coupling (other text)"
KERNEL_FILE = "kernel.safetensors"
SEQUENCES_FILE = "sequences.jsonl"
# The buffer that a sequence belongs to.
EVALUATION = "evaluation"
UPDATE = "update"
Row = dict[str, Any]
# Why numbers of an analysis are nan:
NOT_FINITE = "not a finite number"
NO_PAIR = "E and U have no such pair of sequences with gradients"
NO_CHANGE = "the pairs' contributions add up to 0: there are no shares of it"
OTHER_POLICY = "E is a sample of another step's policy (kernel.source=fixed): it does not tell this policy's entropy"
NO_SPREAD = "E's log-probabilities are all predicted to change equally, or all do: there is no slope"


@dataclass(frozen=True)
class Kernel:
    """A finished kernel: the tensors and metadata of its file."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def scale(self) -> float:
        """The factor c /(N_U L) that turns K(i, j) A_j into a change of log π(i), in nats."""
        return float(self.metadata["clip_coefficient"]) / (
            self.tensors["kernel"].shape[1] * int(self.metadata["max_length"])
        )


def load_kernel(folder: Path) -> Kernel:
    """Load the kernel of a folder. Raise a UserError if it is not finished, or damaged."""
    path = folder / KERNEL_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no {KERNEL_FILE}: run rl-training analyze kernel.enabled=true")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata())
        return Kernel(load_file(path), metadata)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}): remove it, and run rl-training analyze again") from error


@dataclass(frozen=True)
class Structure:
    """A finished kernel with its sequences."""

    kernel: Kernel
    evaluation: list[Row]
    update: list[Row]

    @classmethod
    def read(cls, folder: Path) -> Structure:
        """Load the kernel of a folder. Raise a UserError if it is not finished, or damaged."""
        kernel = load_kernel(folder)
        path = folder / SEQUENCES_FILE
        with naming_the_file(path, "is missing or damaged", "run rl-training analyze again"):
            text = read_text(path, MAX_STATE_BYTES)
            rows = [from_json(json.loads(line)) for line in text.splitlines()]  # reads null as nan
            buffers = [[row for row in rows if row["buffer"] == name] for name in (EVALUATION, UPDATE)]
        return cls(kernel, *buffers)

    @property
    def on_policy(self) -> bool:
        """Whether E was sampled from the policy before the step. If not, E says nothing about that policy's entropy."""
        return self.kernel.metadata.get("texts_of_step") == self.kernel.metadata.get("step")

    @property
    def advantages(self) -> Tensor:
        return self.kernel.tensors["advantages"]

    @property
    def contributions(self) -> Tensor:
        """The entropy change that each pair causes, (N_E, N_U), in nats per token."""
        pairs = self.kernel.tensors["entropy_kernel"] * self.advantages
        return self.kernel.scale * pairs / len(pairs)

    @property
    def cosines(self) -> Tensor:
        """The exact cosines between gradients in the metric M, (N_E, N_U); nan where a gradient is 0."""
        tensors = self.kernel.tensors
        return tensors["kernel"] / (tensors["sq_norms"].unsqueeze(1) * tensors["update_sq_norms"]).sqrt()

    @property
    def log_probability_moves(self) -> Tensor:
        """The change of log π(i) that each pair (i, j) causes, (N_E, N_U), in nats."""
        return self.kernel.scale * self.kernel.tensors["kernel"] * self.advantages

    @cached_property
    def classes(self) -> dict[str, Tensor]:
        """Masks of the pairs in each of the CLASSES, (N_E, N_U) bool."""
        return _classes(self.evaluation, self.update)

    def right(self, rows: Sequence[Row]) -> Tensor:
        """Return for each row whether its reward is above the midpoint of U's lowest and highest reward."""
        rewards = [row["reward"] for row in self.update]
        middle = (min(rewards) + max(rewards)) / 2
        return torch.tensor([row["reward"] > middle for row in rows])


def _classes(a: Sequence[Row], b: Sequence[Row]) -> dict[str, Tensor]:
    """Return masks of the pairs of these rows in each of the CLASSES, (len(a), len(b)) bool."""
    text, prompt = (torch.tensor([[x[key] == y[key] for y in b] for x in a]) for key in ("hash", "prompt_hash"))
    return {SAME_TEXT: text, SAME_PROMPT: prompt & ~text, OTHER_PROMPT: ~prompt}


# --- tables -----------------------------------------------------------------------------------------------------------


def pair_table(s: Structure) -> list[Row]:
    """Return one row per class of pairs: number of pairs, contribution to δH₁'s gradient part, cosines."""
    whole = s.contributions
    cosine = s.cosines
    moved = s.log_probability_moves
    masks = {"all": torch.ones_like(whole, dtype=torch.bool), **s.classes, COUPLING: ~s.classes[SAME_TEXT]}
    right_e = s.right(s.evaluation)
    right_u = s.right(s.update)
    for e, rows in (("right", right_e), ("wrong", ~right_e)):
        for u, columns in (("right", right_u), ("wrong", ~right_u)):
            masks[f"{e} in E, {u} in U"] = rows.unsqueeze(1) & columns
    total = float(whole.sum())
    return [
        {
            "pairs": name,
            "count": int(mask.sum()),
            "contribution": float(whole[mask].sum()),
            "share": float(whole[mask].sum()) / total + 0.0 if total else math.nan,  # + 0.0: no pairs have 0, not -0
            **_distribution(cosine[mask]),
            "log_probability_change": float(moved[mask].sum()) / len(mask),
        }
        for name, mask in masks.items()
    ]


def _distribution(cosine: Tensor) -> Row:
    cosines = pd.Series(cosine)  # its statistics skip nan
    quantiles = {f"cosine_{q}": cosines.quantile(q / 100) for q in (5, 50, 95)}
    return {"cosine_mean": cosines.mean(), "cosine_sd": cosines.std(), **quantiles}


def cosine_table(s: Structure) -> list[Row]:
    """Return one row per class of pairs within E and within U, with cosines estimated from sketches.

    Pairs of a sequence with itself are left out. `cosine_stderr` is the rms standard error of a single cosine: see
    sketches.py.
    """
    tensors = s.kernel.tensors
    table = []
    for name, prefix, rows in (("E", "", s.evaluation), ("U", "update_", s.update)):
        sketches = tensors[f"{prefix}sketches"]
        norms = tensors[f"{prefix}sq_norms"]
        values, stderr = cosines(sketches, sketches, norms, norms)
        pairs = torch.ones_like(values, dtype=torch.bool).triu(1) & values.isfinite()
        for kind, mask in _classes(rows, rows).items():
            chosen = mask & pairs
            error = float(stderr[chosen].square().mean().sqrt())
            table.append({"within": name, "pairs": kind, "count": int(chosen.sum()), **_distribution(values[chosen]),
                          "cosine_stderr": error})  # fmt: skip
    return table


def predictions(s: Structure) -> list[Row]:
    """Return one row per sequence of E: the predicted (W·δθ, by cause) and measured change of its log-probability."""
    by_cause = s.kernel.tensors["products"]
    return [
        {"evaluation": row["row"], **dict(zip(CAUSES, parts.tolist(), strict=True)), "predicted": float(parts.sum()),
         "measured": row["logp_change"], "reward": row["reward"], "tokens": row["tokens"], "hash": row["hash"]}
        for row, parts in zip(s.evaluation, by_cause, strict=True)
    ]  # fmt: skip


def top_pairs(s: Structure, count: int = 10) -> list[Row]:
    """Return the pairs that lower entropy most, then those that raise it most, with texts, rewards and distances."""
    contributions = s.contributions
    cosine = s.cosines
    order = contributions.flatten().argsort()
    chosen = [*order[:count].tolist(), *order[-count:].flip(0).tolist()]
    rows = []
    for flat in dict.fromkeys(chosen):
        i, j = divmod(flat, len(s.update))
        e = s.evaluation[i]
        u = s.update[j]
        rows.append({
            "contribution": float(contributions[i, j]), "cosine": float(cosine[i, j]), "advantage": u["advantage"],
            "evaluation": i, "update": j, "tokens_apart": edit_distance(e["ids"], u["ids"]),
            "logp_apart": abs(e["logp"] - u["logp"]), "evaluation_reward": e["reward"], "update_reward": u["reward"],
            "evaluation_text": e["prompt"] + e["response"], "update_text": u["prompt"] + u["response"],
        })  # fmt: skip
    return rows


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the edit distance of two token sequences (insertions, deletions, replacements): (1,2,3), (1,3) → 1."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before = row
        row = [i]
        for j, y in enumerate(b):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (x != y)))
    return row[-1]


def single_predictions(s: Structure) -> tuple[float, float]:
    """Regress the measured change of log π on the predicted W_i·δθ over E. Return slope and correlation."""
    predicted = s.kernel.tensors["products"].sum(dim=1)
    measured = predicted.new_tensor([row["logp_change"] for row in s.evaluation])
    pairs = torch.stack([predicted, measured])
    return float(torch.cov(pairs)[0, 1] / predicted.var()), float(torch.corrcoef(pairs)[0, 1])


# --- E and U together, from sketches ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distinct:
    """The distinct texts of E and U, with their cosines estimated from sketches."""

    rows: list[Row]  # `times` says how often the text occurs
    cosines: Tensor  # (n, n)
    participation_ratio: float


def distinct_texts(s: Structure) -> Distinct:
    """Return the distinct texts of E and U whose gradient is not 0."""
    tensors = s.kernel.tensors
    rows = [*s.evaluation, *s.update]
    sketches = torch.cat([tensors["sketches"], tensors["update_sketches"]])
    sq_norms = torch.cat([tensors["sq_norms"], tensors["update_sq_norms"]])
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        if sq_norms[number] > 0:
            first.setdefault(row["hash"], number)
    chosen = torch.tensor(list(first.values()))
    times = {key: sum(row["hash"] == key for row in rows) for key in first}
    distinct = [{**rows[n], "times": times[key]} for key, n in first.items()]
    return Distinct(distinct, *sketched_cosines(sketches[chosen], sq_norms[chosen]))


def sketched_cosines(sketches: Tensor, sq_norms: Tensor) -> tuple[Tensor, float]:
    """Return the cosines between these sequences, (n, n), and their participation ratio."""
    values, _ = cosines(sketches, sketches, sq_norms, sq_norms)
    scaled = sketches.double() / sq_norms.sqrt().view(-1, 1, 1)
    return values.fill_diagonal_(1.0), participation_ratio(torch.einsum("nsm,qsm->snq", scaled, scaled))


# --- the numbers of an analysis --------------------------------------------------------------------------------------


def headline(s: Structure) -> dict[str, float]:
    """Return the kernel's numbers that go into the results of an analysis."""
    return {name: value for numbers, _ in headline_groups(s) for name, value in numbers.items()}


def headline_groups(s: Structure) -> list[tuple[dict[str, float], str]]:
    """Return the numbers of `headline` in groups, each with the reason for those of them that are nan."""
    by_class: Mapping[str, Row] = {row["pairs"]: row for row in pair_table(s)}
    share = {name: row["share"] if s.on_policy else math.nan for name, row in by_class.items()}
    slope, correlation = single_predictions(s)
    distinct = distinct_texts(s)
    shares = {
        "kernel/share_same_text": share[SAME_TEXT],
        "kernel/share_coupling": share[COUPLING],
        "kernel/share_same_prompt": share[SAME_TEXT] + share[SAME_PROMPT],
        "kernel/share_other_prompt": share[OTHER_PROMPT],
    }
    mean_cosines = {
        "kernel/cosine_same_prompt_other_text": by_class[SAME_PROMPT]["cosine_mean"],
        "kernel/cosine_other_prompt": by_class[OTHER_PROMPT]["cosine_mean"],
    }
    of_texts = {
        "kernel/distinct_texts": float(len(distinct.rows)),
        "kernel/participation_ratio": distinct.participation_ratio,
    }
    return [
        ({"kernel/identity_error": float(s.kernel.metadata["identity_error"])}, NOT_FINITE),
        (shares, NO_CHANGE if s.on_policy else OTHER_POLICY),
        (mean_cosines, NO_PAIR),
        (of_texts, NOT_FINITE),
        ({"kernel/logp_slope": slope, "kernel/logp_correlation": correlation}, NO_SPREAD),
    ]
