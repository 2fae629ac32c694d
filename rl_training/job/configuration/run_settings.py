"""The settings of a run, read from its config.yaml. Analyses and branches override them from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from rl_training.errors import UserError
from rl_training.job.configuration.checks import DERIVED_FIELDS, derived_value
from rl_training.job.configuration.groups import REQUIRED_KEYS, TRAINER_KEYS
from rl_training.job.configuration.nested import describe_differences, flatten
from rl_training.job.configuration.overrides import force_add, root_key, with_home, with_overrides
from rl_training.job.configuration.prepare import normalize, read_numbers
from rl_training.job.configuration.shipped import CONF
from rl_training.job.configuration.stored import PROVENANCE, load_settings, refuse_marked, unmarked
from rl_training.records.files.masking import without_masks, without_secrets
from rl_training.records.folder import CONFIG_FILE, TRAINING_STATE, run_of
from rl_training.records.made_by import JOB, MADE_BY
from rl_training.records.training_settings import affects_training

BRANCH_OWN_KEYS = ("run_dir", "resume", "branch", "additional_steps")  # that a branch does not take from its run
UNCHANGEABLE_PREFIXES = ("model.", "adapter.", "data.", "trainer.optim")  # of settings that a branch must not change
IN_A_RUN = f"RUN/{TRAINING_STATE}/checkpoint-N beside RUN/{CONFIG_FILE}"
# Settings that determine which prompts each step learns from.
PROMPT_ORDER_KEYS = ("seed", "batch.sequences_per_step", "trainer.num_generations", "trainer.steps_per_generation",
                     "trainer.num_iterations")  # fmt: skip


def run_settings(checkpoint: Path, changes: Sequence[str]) -> DictConfig:
    """Return the configuration of the run that a checkpoint belongs to, with these changes applied.

    For a checkpoint outside a run, the changes are applied to train.yaml and must name model and data.

    Raises:
        UserError: For a setting that does not exist, or if model or data must be named and are not.
    """
    run = run_of(checkpoint)
    if run is None:
        missing = [f"{group}=…" for group in ("model", "data") if group not in {root_key(word) for word in changes}]
        if missing:
            raise UserError(
                f"{checkpoint} is not in a run ({IN_A_RUN}): give {' '.join(missing)}, and adapter=lora if it is an "
                "adapter; see --help"
            )
        cfg = compose("train", overrides=[force_add(word) for word in changes])
        normalize(cfg, "train")
        return cfg
    config_file = run / CONFIG_FILE
    cfg = with_overrides(load_settings(config_file), changes, f"the run in {run}")
    missing = [key for key in REQUIRED_KEYS if key not in cfg]
    if missing:
        groups = [f"{key}=…" for key in missing if (CONF / key).is_dir()]
        give = f", or give {' '.join(groups)}" if len(groups) == len(missing) else ""
        raise UserError(f"{config_file} lacks {', '.join(missing)}, which a run needs: fix the file{give}")
    read_numbers(cfg, "train")
    return cfg


def refuse_other_settings(cfg: DictConfig, run_dir: Path) -> None:
    """Raise UserError if a run would be resumed with different settings, some of which would be ignored."""
    config_file = run_dir / CONFIG_FILE
    if not config_file.is_file():
        return
    if changed := describe_differences(_of_training(load_settings(config_file)), _of_training(cfg)):
        raise UserError(
            f"resume: {run_dir} was started with other settings: {changed}. Give the same ones (its "
            f"{CONFIG_FILE} has them all), or start a new run from its weights: model=hub model.name=CHECKPOINT"
        )


def _of_training(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings that affect training, by dotted key, as a run stores them; those of a command are a job's.

    `~` is expanded, only to compare: a stored one and the same one typed are the same path.
    """
    stored = {MADE_BY: JOB} | without_masks(without_secrets(unmarked(OmegaConf.to_container(cfg, resolve=True))))
    settings = {key: value for key, value in flatten(stored).items() if affects_training(key)}
    return {key: with_home(key, value) for key, value in settings.items()}


def resolve_branch(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return cfg, or for branch=CHECKPOINT the settings of the checkpoint's run with the overrides applied.

    Weights, optimizer state, random state and position in the data come from the checkpoint: a branch without changes
    repeats its run bit for bit.

    Args:
        overrides: The overrides as typed.

    Raises:
        UserError: If there is no such checkpoint, or if model, adapter, data or optimizer would change.
    """
    if cfg.get("branch") is None:
        return cfg
    run, checkpoint = _branch_checkpoint(cfg.branch)
    stored = load_settings(run / CONFIG_FILE)
    for name in (PROVENANCE, MADE_BY):  # those of a branch are its own
        stored.pop(name, None)
    as_given: Any = OmegaConf.to_container(cfg, resolve=False)  # unresolved: run_dir may refer to the branch's seed
    changes = [word for word in overrides if root_key(word) not in BRANCH_OWN_KEYS]
    settings = with_overrides(stored, changes, f"the run in {run}")
    read_numbers(settings, "train")
    if changed := describe_differences(_unchangeable(stored), _unchangeable(settings)):
        raise UserError(
            f"branch={checkpoint} would have {changed}: a branch keeps model, adapter, data and optimizer. Start a new "
            f"run from its weights with model=hub model.name={checkpoint}"
        )
    refuse_marked(settings, *TRAINER_KEYS, "probes")  # before anything is written
    settings.merge_with({key: with_home(key, as_given[key]) for key in BRANCH_OWN_KEYS})
    if Path(str(settings.run_dir)).resolve().is_relative_to(checkpoint.parent):
        raise UserError(f"run_dir={settings.run_dir} lies among the checkpoints of another run: choose another folder")
    settings.branch = str(checkpoint)
    for node in (settings.buffer, *settings.probes.values()):  # in config.yaml, ${seed} is resolved
        if isinstance(node, DictConfig) and node.get("seed") == stored.seed:
            node.seed = settings.seed
    for name in DERIVED_FIELDS:
        settings.trainer[name] = derived_value(settings, name)
    return settings


def _unchangeable(settings: DictConfig) -> dict[str, Any]:
    """Return the settings that a branch must not change, by dotted key."""
    return {key: unmarked(value) for key, value in flatten(settings).items() if key.startswith(UNCHANGEABLE_PREFIXES)}


def _branch_checkpoint(value: object) -> tuple[Path, Path]:
    """Return the run and the checkpoint that branch=VALUE names: a checkpoint folder, or a run for its newest.

    Raises:
        UserError: If it is not in a run folder.
    """
    from rl_training.records.checkpoints import find_checkpoint  # imports torch, which --help must not wait for

    if str(value) in ("", "latest", "auto", "none"):
        raise UserError(f"branch={value}: give RUN/{TRAINING_STATE}/checkpoint-N, or RUN for its newest")
    checkpoint = find_checkpoint(with_home("branch", str(value)), Path(), setting="branch").resolve()
    run = run_of(checkpoint)
    if run is None:
        raise UserError(
            f"branch={value} is not in a run folder ({IN_A_RUN}): start a new run from its weights with model=hub "
            "model.name=CHECKPOINT"
        )
    return run, checkpoint


def prompt_order_changes(cfg: DictConfig) -> str:
    """Name the settings of a branch that change the order of prompts relative to its run; "" if none do."""
    stored = flatten(load_settings(Path(cfg.branch).parents[1] / CONFIG_FILE))
    before, now = (
        {key: settings[key] for key in PROMPT_ORDER_KEYS if key in settings} for settings in (stored, flatten(cfg))
    )
    return describe_differences(before, now)
