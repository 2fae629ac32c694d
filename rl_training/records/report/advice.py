"""The one thing to change, for the first lines of a report. docs/how_to/entropy_is_falling.md gives the same advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_training.records.report.interventions import Effect, effects_of, halving, keeping
from rl_training.records.report.series import Run
from rl_training.records.report.set_up import JOB, TRL, SetUp
from rl_training.records.report.standing_out.line import Line
from rl_training.records.report.verdict import LOST, RISES, SPENT, STEADY, Verdict

# If entropy is lost, the settings of these lines, in this order, come before a change of the loss.
FIRST = ("jump", "equal", "endless", "cut_off", "unmixed", "sampler", "noise", "reference")
NOTHING_YET = "There is nothing to do yet."
SETTING = "Setting: "  # prefix of a line's advice that is a setting
# By intervention: the field of GRPOConfig that does the same, and its value; "" for the intervention's strength.
FIELDS: Mapping[str, tuple[str, str]] = {
    "bonus": ("entropy_coef", ""), "max_grad_norm": ("max_grad_norm", ""), "top_entropy": ("top_entropy_quantile", ""),
    "kl": ("beta", ""), "clip_higher": ("epsilon_high", ""), "std_norm": ("scale_rewards", "group"),
    "length_norm": ("loss_type", "grpo"), "drop_truncated": ("mask_truncated_completions", "True"),
    "keep_truncated": ("mask_truncated_completions", "False"),
}  # fmt: skip


def advice(run: Run, verdict: Verdict, lines: Sequence[Line]) -> str:
    """Return the sentence that says what to change, or that there is nothing to do."""
    by_name, set_up = {line.name: line for line in lines}, SetUp.of(run)
    if "large_step" in by_name:
        return f"To change: {set_up.bounded_step()}, since steps are too large."
    if verdict.kind == LOST:
        return _against_the_loss(run, by_name, set_up)
    if verdict.kind == RISES and "bonus" in by_name:
        return f"To change: {_setting(by_name['bonus'])}"
    nothing = f"here is nothing to do{'' if verdict.kind in (SPENT, STEADY, RISES) else ' yet'}."
    if not lines:
        return f"T{nothing}"
    is_setting = lines[0].setting.startswith(SETTING)
    return f"About entropy t{nothing} {'To change because of what stands out: ' * is_setting}{_setting(lines[0])}"


def _against_the_loss(run: Run, by_name: Mapping[str, Line], set_up: SetUp) -> str:
    for name in FIRST:
        if name in by_name:
            return f"To change first: {_setting(by_name[name])}"
    effects = effects_of(run)
    chosen = halving(effects) or keeping(effects)
    if chosen:
        return f"To change: {_as_setting(chosen[0], set_up)}, the cheapest measured intervention that keeps entropy."
    if effects:
        return "No measured intervention keeps entropy significantly: measure more steps, or others."
    return f"To measure what would keep it: {set_up.probe('interventions')}."


def as_a_change(line: Line) -> str:
    """Return a line's advice, as "To change: …" if it is a setting."""
    return f"To change: {_setting(line)}" if line.setting.startswith(SETTING) else line.setting


def _setting(line: Line) -> str:
    return line.setting.removeprefix(SETTING)


def _as_setting(effect: Effect, set_up: SetUp) -> str:
    """Return the setting that trains with an intervention, at the strength that halves the fall or else as measured."""
    name, _, typed_strength = effect.name.partition(":")
    strength = f"{effect.halves_at.value:.2g}" if effect.halves_at.value == effect.halves_at.value else typed_strength
    if set_up.kind == JOB:
        return f"intervention={name}{f':{strength}' * bool(strength)}"
    rate = set_up.number("learning_rate")
    if name == "lr" and strength and rate == rate:
        return set_up.line(learning_rate=float(strength) * rate)
    field, value = FIELDS.get(name, ("", ""))
    if set_up.kind == TRL and field and (value or strength):
        return (
            f"GRPOConfig({field}={value!r})"
            if value.isalpha() and value.islower()
            else f"GRPOConfig({field}={value or strength})"
        )
    return f"{name}{f':{strength}' * bool(strength)}"
