"""rl-training dashboard: makes a saved W&B workspace with a section for each question that a run answers.

    rl-training dashboard --project rl-training              saves it, and prints its address
    rl-training dashboard --project rl-training --dry-run    prints what it would save; no account needed

The table SECTIONS defines sections and panels; change nothing else. A metric that a run does not show there leaves its
panel empty: logger.metrics=all shows all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.extras import of_an_extra


@dataclass(frozen=True)
class Panel:
    """A line plot over optimizer steps, of some metrics or of all whose name matches a pattern."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None
    unit: str = ""


# The core metrics of any run: logger.metrics=core, the default, shows these only; stock TRL's printed lines keep them.
CORE = (
    "loss", "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "learning_rate", "completions/mean_length",
    "entropy", "entropy/token", "delta_h/forward", "delta_h/forward_se", "delta_h/cumulative_predicted",
    "delta_h/cumulative_measured", "measured/delta_h", "measured/delta_h_se", "gns/batch_ratio",
    "ess/advantage_fraction", "probe_cost/fraction_of_step", "forecast/chance_below", "eval_reward",
)  # fmt: skip

NATS = "nats per token"
SECTIONS = {
    "reward": [
        Panel("Reward: mean over the step's responses", ("reward",)),
        Panel("Spread of rewards within a prompt", ("reward_std", "frac_reward_zero_std")),
        Panel("Response length", ("completions/mean_length", "completions/max_length"), unit="tokens"),
        Panel("Gradient norm, before clipping", ("grad_norm",)),
    ],
    "entropy: predicted and measured": [
        Panel("Change since the first step", ("delta_h/cumulative_measured", "delta_h/cumulative_predicted"),
              unit=NATS),
        Panel("Entropy, measured", ("entropy/token",), unit=NATS),
        Panel("Entropy in 20 steps, with an alert", ("forecast/median", "forecast/low", "forecast/high"), unit=NATS),
        Panel("Chance that it is below alert.below then", ("forecast/chance_below",)),
        Panel("Change by one step", ("delta_h/forward", "delta_h/backward", "delta_h/trapezoid", "measured/delta_h"),
              unit=NATS),
        Panel("Standard errors of that change",
              ("delta_h/forward_se", "delta_h/backward_se", "delta_h/trapezoid_se"), unit=NATS),
        Panel("Naive product: biased, a diagnostic", ("delta_h/reuse", "delta_h/forward"), unit=NATS),
        Panel("Entropy of a response, measured", ("entropy/sequence",), unit="nats per sequence"),
    ],
    "causes": [
        Panel("Parts of the step: momentum, gradient, decay",
              ("delta_h/part/momentum", "delta_h/part/gradient", "delta_h/part/decay"), unit=NATS),
        Panel("Layers", pattern=r"^delta_h/layer/\d+$", unit=NATS),
    ],
    "prediction against truth": [
        Panel("Change by one step, measured", ("delta_h/true", "delta_h/forward"), unit=NATS),
        Panel("Slope and coverage", ("calibration/slope_corrected", "calibration/coverage")),
    ],
    "interventions": [
        Panel("Change of entropy by a step with it, minus a plain step's", pattern=r"^intervention/.*/mean_delta_h$",
              unit=NATS),
        Panel("The same for the reward", pattern=r"^intervention/.*/mean_delta_reward$"),
        Panel("Reward given up per nat kept", pattern=r"^intervention/.*/mean_price$"),
    ],
    "token classes": [
        Panel("By entropy at the token", pattern=r"^tokens/entropy/.*/mean_delta_h$", unit=NATS),
        Panel("By its text", pattern=r"^tokens/text/.*/mean_delta_h$", unit=NATS),
        Panel("By place in its response", pattern=r"^tokens/position/.*/mean_delta_h$", unit=NATS),
        Panel("By the sign of its advantage", pattern=r"^tokens/(advantage|response)/.*/mean_delta_h$", unit=NATS),
    ],
    "noise scale": [
        Panel("Noise scale", ("gns/noise_scale_prompts", "gns/noise_scale_prompts_low",
                              "gns/adam_noise_scale_prompts"), unit="prompts"),
        Panel("Batch over noise scale", ("gns/batch_ratio", "gns/batch_ratio_low", "gns/batch_ratio_high")),
        Panel("Noise and signal: tr Σ, |G|²", ("gns/trace", "gns/grad_sq_norm")),
        Panel("Noise scale by kind of module", pattern=r"^gns/kind/[a-z]+$", unit="prompts"),
    ],
    "effective sample size": [
        Panel("Share of sequences that count", ("ess/advantage_fraction", "ess/token_weight_fraction")),
        Panel("Effective sequences", ("ess/advantage", "ess/token_weight", "ess/importance"), unit="sequences"),
        Panel("Share with zero advantage", ("ess/zero_advantage", "ess/zero_advantage_prompts")),
    ],
    "sampler and trainer": [
        Panel("Divergence per token, sampler to policy", ("sampler/kl",), unit="nats per token"),
        Panel("Share of sequences that count", ("sampler/ess",)),
        Panel("Mean ratio: below 1, the sampler cuts its distribution", ("sampler/mean_ratio",)),
        Panel("Tokens with ratios outside [0.9, 1.1]; changed by the loss",
              ("sampler/ratio_outside", "sampler/corrected_share")),
    ],
    "buffer": [
        Panel("Prompts accepted, of those generated; places filled", ("buffer/acceptance", "buffer/filled")),
        Panel("Generations for a rollout", ("buffer/attempts",)),
        Panel("Tokens generated for a rollout, those rejected included", ("buffer/generated_tokens",), unit="tokens"),
    ],
    "cost": [
        Panel("Share of a step that the probes take", ("probe_cost/fraction_of_step",)),
        Panel("Each probe", pattern=r"^probe_cost/.*_seconds$", unit="seconds"),
        Panel("A step", ("step_time",), unit="seconds"),
    ],
}  # fmt: skip


def build_workspace(entity: str, project: str, name: str) -> Any:
    """Returns the wandb_workspaces.workspaces.Workspace of SECTIONS, not saved. ImportError without that package."""
    with of_an_extra():
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces

    def plot(panel: Panel) -> Any:
        return reports.LinePlot(
            title=panel.title, x="step", y=list(panel.metrics), metric_regex=panel.pattern, title_y=panel.unit or None
        )

    sections = [
        workspaces.Section(name=title, panels=[plot(panel) for panel in panels], is_open=True)
        for title, panels in SECTIONS.items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def main(arguments: Sequence[str] | None = None) -> None:
    """Saves or prints the workspace that the command line asks for; exits with 2, saying why, if it cannot."""
    parser = argparse.ArgumentParser(
        prog="rl-training dashboard",
        description=f"Save a W&B workspace for the runs of logger=wandb, with the sections: {', '.join(SECTIONS)}.",
        epilog="Needs the extra dashboard (pip install 'rl-training[dashboard]') and, unless --dry-run, an account "
        "(wandb login). Runs that were kept offline appear in it after wandb sync.",
    )
    parser.add_argument("--project", default="rl-training", help="W&B project of the runs (default: %(default)s)")
    parser.add_argument("--entity", help="user or team that the project belongs to (default: that of the account)")
    parser.add_argument("--name", default="Entropy, and why", help="name of the saved view (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the view as JSON instead of saving it")
    args = parser.parse_args(arguments)
    try:
        if args.dry_run:
            workspace = build_workspace(args.entity or "your-entity", args.project, args.name)
            print(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2))
        else:
            with of_an_extra():
                import wandb
            if not wandb.login(prompt=False):
                raise ValueError("this machine has no W&B account: wandb login, or see the view with --dry-run")
            build_workspace(args.entity or str(wandb.Api().default_entity), args.project, args.name).save()
    except (ImportError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
