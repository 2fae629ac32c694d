"""The reason why something cannot be measured, with a code that identifies it.

A field or function named `…_reason` holds or returns why the thing it is named after is unavailable, or None.
"""

from __future__ import annotations

from typing import Self


class Unavailable(str):
    """A reason why a number is nan or has no error bar, and what to do about it.

    As a string it is the text that logs and records show, "message: fix". Code and tests compare `code`, because texts
    may be rewritten.

    >>> mixed = Unavailable("mixed_prompts", "prompts lie in several folds", fix="whole_prompts=True")
    >>> mixed.code, str(mixed)
    ('mixed_prompts', 'prompts lie in several folds: whole_prompts=True')
    """

    code: str  # a few words in snake_case; no other reason has it, and it is stable even if the message is rewritten
    message: str
    fix: str  # what the user types or changes; "" if nothing helps or no fix is needed

    def __new__(cls, code: str, message: str, fix: str = "") -> Self:
        reason = super().__new__(cls, f"{message}: {fix}" if fix else message)
        reason.code = code
        reason.message = message
        reason.fix = fix
        return reason

    @classmethod
    def recorded(cls, code: str, text: str) -> Self:
        """Return a reason as records have it: its code, and its text, in which the first colon comes before the fix.

        >>> Unavailable.recorded("mixed_prompts", "prompts lie in several folds: whole_prompts=True").fix
        'whole_prompts=True'
        """
        message, _, fix = text.partition(": ")
        return cls(code, message, fix)

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        """Return the arguments with which copy and pickle call `__new__`."""
        return self.code, self.message, self.fix

    def formatted(self, **values: object) -> Unavailable:
        """Return this reason with the {names} in its message and fix replaced by `values`.

        >>> Unavailable("too_far", "the sampler is too far: {ess:.2f}").formatted(ess=0.26)
        'the sampler is too far: 0.26'
        """
        return Unavailable(self.code, self.message.format(**values), self.fix.format(**values))

    def with_fix(self, fix: str) -> Unavailable:
        """Return this reason with another fix."""
        return Unavailable(self.code, self.message, fix)

    def prefixed(self, prefix: str) -> Unavailable:
        """Return this reason with `prefix` and a colon before its message.

        >>> Unavailable("left_out", "the step was left out").prefixed("step 3")
        'step 3: the step was left out'
        """
        return Unavailable(self.code, f"{prefix}: {self.message}", self.fix)
