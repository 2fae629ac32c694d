"""What a report proposes: to change a setting, or to do something that no setting does.

Both are part of a sentence until the place that shows them writes it, with the start that fits there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rl_training.records.pages.writing import capitalized


@dataclass(frozen=True)
class Advice:
    """A text of the report's advice, whole sentences or a part of one.

    Args:
        text: The text.
        settings: The parts of it that can be pasted. A page marks them.
    """

    text: str
    settings: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, *parts: Advice) -> Advice:
        """Return a text with the settings of the parts that it is made of."""
        return Advice(text, tuple(setting for part in parts for setting in part.settings))


@dataclass(frozen=True)
class Change(Advice):
    """What to change, such as "GRPOConfig(beta=0.1)".

    Args:
        target: What it changes, whatever the trainer calls it: a field of GRPOConfig, or a few words for what has none.
    """

    target: str = field(kw_only=True)

    def followed_by(self, words: str) -> Change:
        return replace(self, text=self.text + words)

    def sentence(self, to_change: str = "To change", to_do: str = "") -> Advice:
        """Return it as a sentence, which begins with `to_change`."""
        return Advice.of(f"{to_change}: {self.text}.", self)


@dataclass(frozen=True)
class Task(Advice):
    """What to do, from its verb on, such as "wait until step 40, where the warm-up ends".

    Args:
        target: What it is about, in a few words, however the text says it; a field of GRPOConfig if that has one.
    """

    target: str = field(kw_only=True)

    def sentence(self, to_change: str = "To change", to_do: str = "") -> Advice:
        """Return it as a sentence, which begins with `to_do` if that is given."""
        return Advice.of(f"{to_do}: {self.text}." if to_do else f"{capitalized(self.text)}.", self)


Proposal = Change | Task
