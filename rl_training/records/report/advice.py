"""The one thing to change, for the first lines of a report. docs/how_to/entropy_is_falling.md gives the same advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rl_training.records.folder import checkpoints_of, step_of
from rl_training.records.made_by import JOB, TRL
from rl_training.records.report import findings
from rl_training.records.report.effects import Effect, effects_of, halving, keeping
from rl_training.records.report.predictions import hindrance, predictions_fail
from rl_training.records.report.series import Run
from rl_training.records.report.set_up import PSR, SetUp
from rl_training.records.report.standing_out.line import (
    BONUS,
    CUT_OFF,
    DECAY,
    ENDLESS,
    EQUAL,
    JUMP,
    LARGE_STEP,
    NO_STEP,
    NOISE,
    REFERENCE,
    SAMPLER,
    UNMIXED,
    Line,
)
from rl_training.records.report.story.reward_functions import reward_functions
from rl_training.records.report.trends import MIN_STEPS, RECENT
from rl_training.records.report.verdict import (
    ERUPTS,
    FALLEN,
    FLAT,
    GONE,
    HELD_OUT,
    LEARNED,
    LOST,
    NOTHING_TO_DO,
    PART,
    SOLVED,
    UNKNOWN,
    Verdict,
)
from rl_training.records.report.verdict.holds import LARGE_LOSS
from rl_training.records.report.writing import format_estimate, percent, share_left

# Lines that explain a bad verdict, in this order: their settings come before a change of the loss.
CAUSES = (
    DECAY, BONUS, LARGE_STEP, JUMP, NO_STEP, EQUAL, ENDLESS, CUT_OFF, UNMIXED, SAMPLER, NOISE, REFERENCE,
)  # fmt: skip
HARDLY_EARNED = 0.05  # of the highest possible reward
HALF = 0.5  # share of prompts with unequal rewards
SYMPTOMS = (EQUAL, UNMIXED)  # causes, unless reward or entropy was lost before
PSR_KEPT = "In our tests it kept pass@8 up, not the mean reward."
LITTLE = 0.15  # share of the first entropy: with less left, responses to a prompt are nearly all the same
# By intervention: the field of GRPOConfig that does the same, and its value; "" for the intervention's strength.
FIELDS: Mapping[str, tuple[str, str]] = {
    "bonus": ("entropy_coef", ""), "max_grad_norm": ("max_grad_norm", ""), "top_entropy": ("top_entropy_quantile", ""),
    "kl": ("beta", ""), "clip_higher": ("epsilon_high", ""), "std_norm": ("scale_rewards", "group"),
    "length_norm": ("loss_type", "grpo"), "drop_truncated": ("mask_truncated_completions", "True"),
    "keep_truncated": ("mask_truncated_completions", "False"),
}  # fmt: skip


def advice(run: Run, verdict: Verdict, lines: Sequence[Line]) -> str:
    """Return the sentence that says what to change, or that there is nothing to do.

    A line that explains the verdict comes first, then the verdict's own action, then any other line.
    """
    by_name, set_up = {line.name: line for line in lines}, SetUp.of(run)
    action = ACTIONS.get(verdict.kind)
    if LARGE_STEP in by_name and action is None:
        return f"To change: {set_up.bounded_step()}, since steps are too large."
    if action is not None:
        causes = (by_name[name] for name in CAUSES if name in by_name)
        cause = next((line for line in causes if not is_a_symptom(line, verdict)), None)
        return action(run, verdict, set_up, cause)
    yet, unseen = " yet" * (verdict.kind == UNKNOWN), _what_one_reward_hides(run, verdict)
    if lines:
        change = as_a_change(lines[0], "To change because of what stands out")
        return f"About entropy there is nothing to do{yet}. {change}{unseen}"
    start = "About entropy there is nothing to do" if hindrance(run) else "There is nothing to do"
    return f"{start}{yet}: {NOTHING_TO_DO[verdict.kind]}.{unseen}"


def _what_one_reward_hides(run: Run, verdict: Verdict) -> str:
    """Return what cannot be known of a rewarded run with little entropy left, if it has one reward function."""
    reward, entropy = verdict.story.reward, verdict.story.entropy
    if reward is None or entropy is None or entropy.left > LITTLE or len(reward_functions(run)) > 1:
        return ""
    if not (verdict.kind == LEARNED or reward.has_risen):
        return ""
    return (
        f" Read a few responses too: {share_left(entropy.left)} of the entropy is left, and a hack of the only reward "
        "function would look the same."
    )


def is_a_symptom(line: Line, verdict: Verdict) -> bool:
    """Return whether a line tells only what came of the verdict: equal rewards, long after reward or entropy was lost.

    Where all responses fail, are right, or are alike, they earn the same.
    """
    entropy = verdict.story.entropy
    if line.name not in SYMPTOMS:
        return False
    if verdict.kind == SOLVED:
        return True
    if verdict.kind == FALLEN:
        return line.since > verdict.since + MIN_STEPS
    if verdict.kind not in (GONE, LOST) or entropy is None:
        return False
    return entropy.left < LARGE_LOSS and line.since >= entropy.since_below(LARGE_LOSS)


def _go_back(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    """Advise to return to a checkpoint before the fall, with the setting of what caused it.

    Without a cause: with a bounded step if reward fell, with PSR if entropy is gone. The test of the latter, and of how
    far to go back, is in docs/explanation/how_often_right.md.
    """
    if cause is not None and not cause.advice.is_setting:
        return _do_first(cause)
    since = min(verdict.since, cause.since if cause else verdict.since)
    entropy = verdict.story.entropy
    if verdict.kind == GONE and entropy is not None:  # shortly before that, hardly more of it was left
        since = min(since, entropy.since_below(LARGE_LOSS))
    start = f"To change: go back to {_checkpoint_before(run, set_up, since)}, and train on"
    if cause is None and verdict.kind == GONE and PSR not in set_up.interventions:
        return f"{start} positive advantages only (PSR): {set_up.positive_only()}. {PSR_KEPT}"
    return f"{start} with {cause.advice.text if cause else set_up.bounded_step()}."


def _checkpoint_before(run: Run, set_up: SetUp, step: int) -> str:
    """Return the last checkpoint before a step, in the words of the user's trainer."""
    kept = checkpoints_of(run.folder)
    saved = [path for path in kept if step_of(path) < step]
    if step <= run.steps[0]:
        return "the start"
    if kept and not saved:
        return f"the start (no checkpoint before step {step} was kept)"
    if saved and set_up.kind == JOB:
        return f"{saved[-1].name} (branch={saved[-1]})"
    if saved:
        return f"{saved[-1].name}"
    return f"a checkpoint before step {step}"


def _stop_the_hack(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    """Advise on a reward function that falls while another is earned."""
    risen = [part.name for part in verdict.story.parts if part.has_risen]
    earned = f"earn {' and '.join(risen)}" if risen else "earn the most"
    return (
        f"To change: read responses after step {verdict.since} that {earned}, and correct what pays for them or its "
        f"weight ({set_up.reward_weights()}); go back to {_checkpoint_before(run, set_up, verdict.since)}."
    )


def _stop_overfitting(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    """Advise on training reward that held-out prompts do not earn."""
    return (
        f"To change: use {_checkpoint_before(run, set_up, verdict.since)}; train on more prompts, and read training "
        f"responses after step {verdict.since}: do they earn their reward?"
    )


def _keep_entropy(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    """Advise on lost entropy: what caused it, or a branch with PSR, and then the cheapest intervention.

    docs/explanation/how_often_right.md has the test behind this order.
    """
    if cause:
        return _do_first(cause)
    saved = checkpoints_of(run.folder)
    start = f"branch={saved[-1]} " if saved and set_up.kind == JOB else ""
    first = (
        f"To change: in a branch, train on positive advantages only (PSR): {start}{set_up.positive_only()}. {PSR_KEPT}"
    )
    effects = effects_of(run)
    chosen = halving(effects) or keeping(effects)
    if PSR in set_up.interventions:
        return f"To change: {as_setting(chosen[0], set_up) if chosen else set_up.bounded_step()}, beside PSR."
    if chosen:
        setting = as_setting(chosen[0], set_up)
        return f"{first} Second try: {setting}, the cheapest measured intervention, there hardly better than no change."
    if not effects and not predictions_fail(run):
        return f"{first} To measure others: {set_up.probes('interventions')}."
    return first


def _bound(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    return as_a_change(cause) if cause else f"To change: {set_up.smaller_steps()}."


def _give_harder_prompts(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    """Advise on a task that was solved from the first step, or on a reward that anything earns."""
    return (
        "To do: read responses. If they are right, the task is too easy: give prompts nearer to a reward of one half. "
        "If not, correct the reward function, which pays for them all the same."
    )


def _look_for_what_to_learn(run: Run, verdict: Verdict, set_up: SetUp, cause: Line | None) -> str:
    """Advise on a reward that has hardly risen: the first thing that the records show to be in the way of it."""
    if cause:
        return _do_first(cause)
    story, mixed = verdict.story, 1 - run.logged("frac_reward_zero_std").tail(RECENT).mean()
    reward, effect = story.reward, story.whole_effect
    assert reward is not None
    if reward.now < HARDLY_EARNED * reward.top:
        return (
            "To look at first: hardly any response earns a reward. Give easier prompts, or a reward for a part of it."
        )
    if mixed < HALF:
        return (
            f"To look at first: only {percent(mixed)} of the prompts have responses with unequal rewards, and the "
            "others teach nothing. Give prompts nearer to a reward of one half."
        )
    if effect is None:
        return f"To look at first: what a step does to reward. To measure it: {set_up.probes('measured')}."
    of_steps = findings.of_steps(effect, "of all steps")
    measured = f"the measured effects {of_steps} add up to {format_estimate(effect, signed=True)}"
    if effect.bounds()[0] > 0:
        return f"To look at first: the size of the steps; {measured}. To change: {set_up.larger_steps()}."
    return f"To look at first: the noise of the steps; {measured}. To change: {set_up.larger_batch(2)}."


def _do_first(cause: Line) -> str:
    """Return what to do about a line, before anything else."""
    text = cause.advice.text
    return f"To change first: {text}." if cause.advice.is_setting else f"To do first: {text[:1].lower()}{text[1:]}"


ACTIONS: Mapping[str, Callable[[Run, Verdict, SetUp, Line | None], str]] = {
    FALLEN: _go_back, GONE: _go_back, HELD_OUT: _stop_overfitting, PART: _stop_the_hack, LOST: _keep_entropy,
    ERUPTS: _bound, SOLVED: _give_harder_prompts, FLAT: _look_for_what_to_learn,
}  # fmt: skip


def as_a_change(line: Line, start: str = "To change") -> str:
    """Return a line's advice as a sentence, which begins with `start` if it is a setting."""
    return f"{start}: {line.advice.text}." if line.advice.is_setting else line.advice.text


def as_setting(effect: Effect, set_up: SetUp) -> str:
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
