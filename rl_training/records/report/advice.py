"""The one thing to change, for the first lines of a report. docs/how_to/entropy_is_falling.md gives the same advice.

Thresholds were chosen by hand. What was tested of the advice is in docs/explanation/how_often_right.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rl_training.records.folder import checkpoints_of, step_of
from rl_training.records.pages.writing import format_estimate, percent, share_left
from rl_training.records.report.predictions import predictions_fail, why_no_predictions
from rl_training.records.report.proposals import Advice, Task
from rl_training.records.report.set_up import PSR, SetUp
from rl_training.records.report.standing_out import first_cause, rule_of
from rl_training.records.report.standing_out.finding import LARGE_STEP, Finding
from rl_training.records.report.standing_out.rewards import HARDLY_EARNED
from rl_training.records.report.story.reward_functions import reward_functions
from rl_training.records.report.verdict import Verdict
from rl_training.records.report.verdict.holds import LARGE_LOSS
from rl_training.records.report.verdict.kinds import (
    ERUPTS,
    FALLEN,
    FLAT,
    FLAT_FALLING,
    GONE,
    HELD_OUT,
    LOST,
    PART,
    SOLVED,
    Kind,
)
from rl_training.records.report.wording import wording_of
from rl_training.records.report.wording.base import Wording
from rl_training.records.table.effects import effects_of, halving, keeping
from rl_training.records.table.measured import of_steps
from rl_training.records.table.series import Run
from rl_training.records.table.trends import RECENT
from rl_training.statistics.estimate import Estimate

MIXED_ENOUGH = 0.5  # share of prompts with unequal rewards
LARGER_BATCH = 2  # times the batch of a run whose steps are too noisy
PSR_KEPT = "In our tests it kept pass@8 up, not the mean reward."
LITTLE_ENTROPY_LEFT = 0.15  # share of the first entropy: with less left, responses to a prompt are nearly all the same


@dataclass(frozen=True)
class Situation:
    """What an action knows of a run.

    Args:
        run: The run.
        verdict: The verdict on it.
        cause: The finding that explains the verdict; None without one.
    """

    run: Run
    verdict: Verdict
    cause: Finding | None

    @property
    def wording(self) -> Wording:
        return wording_of(self.run)

    @property
    def set_up(self) -> SetUp:
        return self.wording.set_up


def advise(run: Run, verdict: Verdict, findings: Sequence[Finding]) -> Advice:
    """Return the sentence that says what to change, or that there is nothing to do.

    A finding that explains the verdict comes first, then the verdict's own action, then any other finding.

    Args:
        run: The run.
        verdict: The verdict on it.
        findings: All that stands out, with what follows from the verdict marked.
    """
    action = ACTIONS.get(verdict.kind)
    if action is not None:
        return action(Situation(run, verdict, first_cause(findings)))
    if any(finding.name == LARGE_STEP for finding in findings):
        return wording_of(run).bounded_step().followed_by(", since steps are too large").sentence()
    yet = " yet" if verdict.kind.is_undecided else ""
    unseen = _what_one_reward_hides(run, verdict)
    if findings:
        first = findings[0].proposal.sentence(to_change="To change because of what stands out")
        return Advice.of(f"About entropy there is nothing to do{yet}. {first.text}{unseen}", first)
    start = "About entropy there is nothing to do" if why_no_predictions(run) else "There is nothing to do"
    return Advice.of(f"{start}{yet}: {verdict.nothing_to_do}.{unseen}")


def _what_one_reward_hides(run: Run, verdict: Verdict) -> str:
    """Return what cannot be known of a rewarded run with little entropy left, if it has one reward function."""
    reward = verdict.story.reward
    entropy = verdict.story.entropy
    if reward is None or entropy is None or entropy.left > LITTLE_ENTROPY_LEFT or len(reward_functions(run)) > 1:
        return ""
    if not (verdict.kind.is_learned or reward.has_risen):
        return ""
    return (
        f" Read a few responses too: {share_left(entropy.left)} of the entropy is left, and a hack of the only reward "
        "function would look the same."
    )


def is_a_symptom(finding: Finding, verdict: Verdict) -> bool:
    """Return whether a finding only follows from the verdict: equal rewards, long after reward or entropy was lost.

    Where all responses fail, are right, or are alike, they earn the same.
    """
    return rule_of(finding).is_symptom and finding.since >= verdict.kind.equal_rewards_from(verdict.story)


def _go_back(situation: Situation) -> Advice:
    """Advise to return to a checkpoint before the fall, with the setting of what caused it.

    Without a cause: with a bounded step if reward fell, with PSR if entropy is gone. The test of PSR, and of how far to
    go back, is in docs/explanation/how_often_right.md. If the steps raised the reward that fell, what earns it has
    changed, so that is to be found first.
    """
    verdict = situation.verdict
    cause = situation.cause
    if cause is not None and isinstance(cause.proposal, Task):
        return _do_first(cause)
    if cause is None and not verdict.kind.is_gone:
        since_then = verdict.story.effect_since(verdict.since)
        if since_then.bounds()[0] > 0:
            return Advice.of(
                f"To do first: find what has changed from about step {verdict.since} on: the data, the reward function "
                "or its service. The steps since then were measured to raise reward, by "
                f"{format_estimate(since_then)}."
            )
    since = min(verdict.since, cause.since if cause else verdict.since)
    entropy = verdict.story.entropy
    if verdict.kind.is_gone and entropy is not None:  # shortly before that, hardly more of it was left
        since = min(since, entropy.since_below(LARGE_LOSS))
    before = _checkpoint_before(situation, since)
    start = f"To change: go back to {before.text}, and train on"
    if cause is None and verdict.kind.is_gone and PSR not in situation.set_up.interventions:
        psr = situation.wording.positive_only()
        return Advice.of(f"{start} positive advantages only (PSR): {psr.text}. {PSR_KEPT}", before, psr)
    change = situation.wording.bounded_step() if cause is None else cause.proposal
    return Advice.of(f"{start} with {change.text}.", before, change)


def _checkpoint_before(situation: Situation, step: int) -> Advice:
    """Return the last checkpoint before a step, with the setting that goes back to it if there is one."""
    kept = checkpoints_of(situation.run.folder)
    saved = [path for path in kept if step_of(path) < step]
    if step <= situation.run.steps[0]:
        return Advice("the start")
    if kept and not saved:
        return Advice(f"the start (no checkpoint before step {step} was kept)")
    if not saved:
        return Advice(f"a checkpoint before step {step}")
    branch = situation.wording.branch_from(saved[-1])
    return Advice(f"{saved[-1].name} ({branch})", (branch,)) if branch else Advice(saved[-1].name)


def _stop_the_hack(situation: Situation) -> Advice:
    """Advise on a reward function that falls while another is earned."""
    verdict = situation.verdict
    risen = [part.name for part in verdict.story.parts if part.has_risen]
    earned = f"earn {' and '.join(risen)}" if risen else "earn the most"
    before = _checkpoint_before(situation, verdict.since)
    weights = situation.wording.reward_weights()
    return Advice.of(
        f"To change: read responses after step {verdict.since} that {earned}, and correct what pays for them or its "
        f"weight ({weights.text}); go back to {before.text}.",
        weights,
        before,
    )


def _stop_overfitting(situation: Situation) -> Advice:
    """Advise on training reward that held-out prompts do not earn."""
    before = _checkpoint_before(situation, situation.verdict.since)
    return Advice.of(
        f"To change: use {before.text}; train on more prompts, and read training responses after step "
        f"{situation.verdict.since}: do they earn their reward?",
        before,
    )


def _keep_entropy(situation: Situation) -> Advice:
    """Advise on lost entropy: what caused it, or a branch with PSR, and then the cheapest intervention.

    docs/explanation/how_often_right.md has the test behind this order.
    """
    if situation.cause:
        return _do_first(situation.cause)
    effects = effects_of(situation.run)
    measured = [situation.wording.intervention(effect) for effect in halving(effects) or keeping(effects)]
    if PSR in situation.set_up.interventions:
        change = measured[0] if measured else situation.wording.bounded_step()
        return change.followed_by(", beside PSR").sentence()
    psr = _psr_in_a_branch(situation)
    start = f"To change: in a branch, train on positive advantages only (PSR): {psr.text}. {PSR_KEPT}"
    if measured:
        why = "the cheapest measured intervention, which in our tests was hardly better than no change"
        return Advice.of(f"{start} Second try: {measured[0].text}, {why}.", psr, measured[0])
    if not effects and not predictions_fail(situation.run):
        probes = situation.wording.probes("interventions")
        return Advice.of(f"{start} To measure others: {probes.text}.", psr, probes)
    return Advice.of(start, psr)


def _psr_in_a_branch(situation: Situation) -> Advice:
    """Return what trains with PSR, after the setting that branches off from the last checkpoint if there is one."""
    psr = situation.wording.positive_only()
    saved = checkpoints_of(situation.run.folder)
    branch = situation.wording.branch_from(saved[-1]) if saved else ""
    return Advice(f"{branch} {psr.text}", (branch, *psr.settings)) if branch else psr


def _stop_the_rise(situation: Situation) -> Advice:
    """Advise on entropy that has risen while reward has not: what caused it, or smaller steps."""
    change = situation.cause.proposal if situation.cause else situation.wording.smaller_steps()
    return change.sentence()


def _give_harder_prompts(situation: Situation) -> Advice:
    """Advise on a task that was solved from the first step, or on a reward that anything earns."""
    return Advice.of(
        "To do: read responses. If they are right, the task is too easy: give prompts nearer to a reward of one half. "
        "If not, correct the reward function, which pays for them all the same."
    )


def _let_it_learn(situation: Situation) -> Advice:
    """Advise on a reward that has hardly risen: the first thing that the records show to be in the way of it."""
    if situation.cause:
        return _do_first(situation.cause)
    story = situation.verdict.story
    mixed = 1 - situation.run.logged("frac_reward_zero_std").tail(RECENT).mean()
    reward = story.reward
    effect = story.whole_effect
    assert reward is not None
    if reward.now < HARDLY_EARNED * reward.top:
        return Advice.of(
            "To look at first: hardly any response earns a reward. Give easier prompts, or a reward for a part of it."
        )
    if mixed < MIXED_ENOUGH:
        return Advice.of(
            f"To look at first: only {percent(mixed)} of the prompts have responses with unequal rewards, and the "
            "others teach nothing. Give prompts nearer to a reward of one half."
        )
    if effect is None:
        probes = situation.wording.probes("measured")
        start = "To look at first: what a step does to reward. To measure it"
        return Advice.of(f"{start}: {probes.text}.", probes)
    return _mend_steps(situation.wording, effect)


def _mend_steps(wording: Wording, effect: Estimate) -> Advice:
    """Advise larger steps if all of them together were measured to raise reward, or else less noisy ones."""
    measured = (
        f"the measured effects {of_steps(effect, 'of all steps')} add up to {format_estimate(effect, signed=True)}"
    )
    if effect.bounds()[0] > 0:
        what = "size"
        change = wording.larger_steps()
    else:
        what = "noise"
        change = wording.larger_batch(LARGER_BATCH)
    return Advice.of(f"To look at first: the {what} of the steps; {measured}. To change: {change.text}.", change)


def _do_first(cause: Finding) -> Advice:
    """Return what to do about a finding, before anything else."""
    return cause.proposal.sentence(to_change="To change first", to_do="To do first")


# Of each kind of verdict that calls for something.
ACTIONS: Mapping[Kind, Callable[[Situation], Advice]] = {
    FALLEN: _go_back,
    GONE: _go_back,
    HELD_OUT: _stop_overfitting,
    PART: _stop_the_hack,
    LOST: _keep_entropy,
    ERUPTS: _stop_the_rise,
    SOLVED: _give_harder_prompts,
    FLAT: _let_it_learn,
    FLAT_FALLING: _let_it_learn,
}
