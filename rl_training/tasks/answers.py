"""Read the answer in a response, `<answer>…</answer>`: the only one, or the last one.

A task that asks for one short answer takes the only one, since listing several answers is giving none. One whose
responses think aloud takes the last one, since they may name an answer before.
"""

from __future__ import annotations

OPENING = "<answer>"
CLOSING = "</answer>"


def only_answer(completion: str) -> str | None:
    """Return the content of a completion's `<answer>…</answer>`, or None unless there is exactly one.

    >>> only_answer("9-3=6</think><answer>6</answer>"), only_answer("<answer>6</answer><answer>7</answer>")
    ('6', None)
    """
    if completion.count(OPENING) != 1 or completion.count(CLOSING) != 1:
        return None
    before, _, rest = completion.partition(OPENING)
    return None if CLOSING in before else rest.partition(CLOSING)[0]


def last_answer(completion: str) -> str | None:
    """Return the stripped content of the last complete `<answer>…</answer>`, or None if there is none.

    >>> last_answer("<answer>17</answer> no, <answer> 18 </answer>"), last_answer("<answer>18")
    ('18', None)
    """
    start = completion.rfind(OPENING, 0, max(0, completion.rfind(CLOSING)))
    if start == -1:
        return None
    start += len(OPENING)
    return completion[start : completion.index(CLOSING, start)].strip()
