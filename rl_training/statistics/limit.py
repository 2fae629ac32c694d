"""The reason why something cannot be measured, with a code that identifies it."""

from __future__ import annotations

from typing import Self


class Limit(str):
    """A reason why a number is nan or has no error bar, and what to do about it.

    As a string it is the text that logs and records show, "message: fix". Code and tests compare `code`, because texts
    may be rewritten.

    >>> mixed = Limit("mixed_prompts", "prompts lie in several folds", fix="whole_prompts=True")
    >>> mixed.code, str(mixed)
    ('mixed_prompts', 'prompts lie in several folds: whole_prompts=True')
    """

    code: str  # a few words in snake_case; stable even if the message is rewritten
    message: str
    fix: str  # what the user types or changes; "" if nothing helps or no fix is needed

    def __new__(cls, code: str, message: str, fix: str = "") -> Self:
        limit = super().__new__(cls, f"{message}: {fix}" if fix else message)
        limit.code = code
        limit.message = message
        limit.fix = fix
        return limit

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        """Return the arguments with which copy and pickle call `__new__`."""
        return self.code, self.message, self.fix

    def formatted(self, **values: object) -> Limit:
        """Return this limit with the {names} in its message and fix replaced by `values`.

        >>> Limit("too_far", "the sampler is too far: {ess:.2f}").formatted(ess=0.26)
        'the sampler is too far: 0.26'
        """
        return Limit(self.code, self.message.format(**values), self.fix.format(**values))

    def with_fix(self, fix: str) -> Limit:
        """Return this limit with another fix."""
        return Limit(self.code, self.message, fix)

    def prefixed(self, prefix: str) -> Limit:
        """Return this limit with `prefix` and a colon before its message.

        >>> Limit("left_out", "the step was left out").prefixed("step 3")
        'step 3: the step was left out'
        """
        return Limit(self.code, f"{prefix}: {self.message}", self.fix)
