"""How the user types the options of an evaluation, for the messages that say what to type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spelling:
    """The spelling of one of the two ways to evaluate checkpoints."""

    prefix: str  # before the name of an option
    true: str
    other_folder: str  # what to do if the results cannot be written to their folder

    def option(self, name: str, value: str) -> str:
        """Return an option as it is typed.

        >>> COMMAND.option("name", "NAME"), PYTHON.option("overwrite", PYTHON.true)
        ('evaluation.name=NAME', 'overwrite=True')
        """
        return f"{self.prefix}{name}={value}"


COMMAND = Spelling("evaluation.", "true", "give another folder with output=FOLDER")
PYTHON = Spelling("", "True", "give evaluate another folder")
