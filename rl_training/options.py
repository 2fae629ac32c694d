"""Check options where they are given: an invalid value, or name, is refused in one line that says what is meant."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn, ParamSpec, TypeGuard, TypeVar

from rl_training.errors import UserError

Given = ParamSpec("Given")
Result = TypeVar("Result")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that tells a mistake in one line, in place of a page of usage and a line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def check_whole(option: str, value: object, least: int, hint: str = "") -> None:
    """Raise UserError, with the hint, unless the value is a whole number of at least `least`.

    >>> check_whole("simple: every", 0, least=1)
    Traceback (most recent call last):
    rl_training.errors.UserError: simple: every=0 must be a whole number, at least 1
    """
    if type(value) is not int or value < least:
        raise UserError(f"{option}={value!r} must be a whole number, at least {least}{hint}")


def check_num_folds(probe: str, value: object) -> None:
    """Raise UserError unless the value is a number of folds: None for the default, or a whole number."""
    if value is not None:
        check_whole(f"{probe}: num_folds", value, 1)


def check_share(option: str, value: object, interval: str, hint: str = "") -> None:
    """Raise UserError, with the hint, unless the value is a number in an interval: [0, 1), (0, 1] or (0, 1).

    >>> check_share("gns: decay", 1.0, "(0, 1)", "; .95 remembers about 40 steps")
    Traceback (most recent call last):
    rl_training.errors.UserError: gns: decay=1.0 must lie in (0, 1); .95 remembers about 40 steps
    """
    is_share = is_number(value) and 0.0 <= value <= 1.0
    if not is_share or (value == 0.0 and interval[0] == "(") or (value == 1.0 and interval[-1] == ")"):
        raise UserError(f"{option}={value!r} must lie in {interval}{hint}")


def check_positive(option: str, value: object, hint: str = "") -> None:
    """Raise UserError, with the hint, unless the value is a finite number above 0.

    >>> check_positive("kernel.memory_gb", 0)
    Traceback (most recent call last):
    rl_training.errors.UserError: kernel.memory_gb=0 must be a number above 0
    """
    if not (is_number(value) and 0.0 < value < math.inf):
        raise UserError(f"{option}={value!r} must be a number above 0{hint}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number. True and false, which Python takes for 1 and 0, are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_list(option: str, value: object) -> None:
    """Raise UserError unless the value is a list, a tuple or a range.

    >>> check_list("truth.etas", 0.5)
    Traceback (most recent call last):
    rl_training.errors.UserError: truth.etas=0.5 must be a list: [0.5]
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{option}={value!r} must be a list: [{value!r}]")


def check_flag(option: str, value: object) -> None:
    """Raise UserError unless the value is true or false."""
    if type(value) is not bool:
        raise UserError(f"{option}={value!r} must be true or false")


def check_choice(option: str, value: object, choices: Collection[object]) -> None:
    """Raise UserError unless the value is one of the choices.

    >>> check_choice("log.level", "all", ("none", "minimal"))
    Traceback (most recent call last):
    rl_training.errors.UserError: log.level=all: choose from none, minimal
    """
    if value not in choices:
        raise UserError(f"{option}={value}: choose from {', '.join(map(str, choices))}")


def half_by_measured_step(every: float) -> float:
    """Return the decay per optimizer step that makes each measured step weigh half as much as the next measured one.

    `every` is the number of optimizer steps for each measured one.

    >>> half_by_measured_step(1), half_by_measured_step(2)
    (0.5, 0.7071067811865476)
    """
    return float(0.5 ** (1.0 / every))


def did_you_mean(name: str, options: Collection[str] | Mapping[str, str]) -> str:
    """Return a "did you mean" hint for the option that ends with `.name`, else the closest one, or "" if none is close.

    Args:
        name: What the user wrote.
        options: Names of the options, or a mapping from each name to the text that the hint shows for it.
    """
    nested = [option for option in options if option.endswith(f".{name}")]
    close = nested or difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hints = options if isinstance(options, Mapping) else {}
    return f"; did you mean {hints.get(close[0], close[0])}?" if close else ""


def named_arguments(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let a function refuse keyword arguments that it does not have, with the closest one that it has."""

    @functools.wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        refuse_other_arguments(function, function.__name__, kwargs)
        return function(*args, **kwargs)

    return checked


def refuse_other_arguments(function: Callable[..., object], name: str, given: Iterable[str]) -> None:
    """Raise UserError, with the closest argument, for a keyword that a function does not take."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [argument for argument in parameters if argument != "self"]
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or f": there are {', '.join(known) or 'none'}"
            raise UserError(f"{name}({key}=...): there is no such argument{hint}")
