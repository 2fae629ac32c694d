"""Scores answers with reasoning-gym's own scoring functions, in a guarded worker (guarded_worker.py).

Nine tasks of the package pass the answer to `eval` or to sympy's `parse_expr`, which uses `eval` too. In the worker
these are replaced by readers that cannot call functions from the text: expressions.py for arithmetic,
`ast.literal_eval` for lists. If another version of the package evaluates more, the worker refuses it, with a warning.

An answer scores 0 if the package's scoring raises an error, takes over two seconds or too much memory, or if the answer
has more than `MAX_CHARS` characters.
"""

from __future__ import annotations

import ast
import base64
import difflib
import importlib
import logging
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from rl_training.errors import UserError
from rl_training.extras import how_to_install, require_extra
from rl_training.tasks import guarded_worker
from rl_training.tasks.expressions import value_of

logger = logging.getLogger(__name__)

MAX_CHARS = 32_768  # the longest right answers have a thousand characters
DEADLINE_SECONDS = 2.0  # CPU time for one answer
BUDGET_SECONDS = 60.0  # wall-clock time for all answers of one call; other ranks wait meanwhile
_ROUNDING = 1e-9  # tolerance: spell_backward can score 1.0000000000000002
_worker = guarded_worker.GuardedWorker(__name__, how_to_install("reasoning_gym"))


def open_dataset(task: str, seed: int, settings: Mapping[str, Any], size: int) -> Any:
    """Return the package's dataset of a task.

    Args:
        task: Name of the task.
        seed: Seed of the questions.
        settings: Settings of the task.
        size: Number of questions. Most tasks ignore it and generate as many as are requested.

    Raises:
        ImportError: If the package is not installed.
        UserError: For an unknown task or setting, and for a task that gives every answer a score of 1.
    """
    with require_extra():
        from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS)
        raise UserError(f"data.task={task} is not in reasoning-gym: use {' or '.join(close or sorted(DATASETS))}")
    if task == "game_of_life_halting":  # bool("False") is true
        raise UserError(f"data.task={task}: the package scores every answer 1: use another task, such as game_of_life")
    try:
        return create_dataset(task, size=size, seed=seed, **settings)
    except (TypeError, AssertionError, AttributeError) as error:  # an unknown setting, or a value that the task refuses
        raise UserError(f"data.settings={dict(settings)} do not suit data.task={task}: {error}") from error


class AnswerScores:
    """Scores answers to the questions of one task, as the package does. The arguments are those of `open_dataset`."""

    def __init__(self, task: str, seed: int, settings: Mapping[str, Any]) -> None:
        self._task = task
        self._dataset = _pack((task, seed, dict(settings)))
        self._has_warned = False

    def scores(self, answers: Sequence[tuple[Mapping[str, Any], str | None]]) -> list[float]:
        """Return the score of each answer, from 0 to 1. Answers that cannot be scored get 0.0, with a warning.

        Args:
            answers: For each, the package's entry of the question, and the answer or None.
        """
        questions = [(self._dataset, _pack(entry), answer) for entry, answer in answers]
        asked = [question for question in questions if len(question[2] or "") <= MAX_CHARS]
        replies = _worker.ask_all(asked, DEADLINE_SECONDS, BUDGET_SECONDS)
        scored = [replies.get(question) for question in questions]
        if undecided := scored.count(None):
            logger.warning(
                f"data.task={self._task}: {undecided} of {len(scored)} answers score 0: longer than {MAX_CHARS} "
                f"characters, or not scored in time ({DEADLINE_SECONDS:g} s each, {BUDGET_SECONDS:g} s in all)."
            )
        failed = [
            (question[2], reply[1]) for question, reply in zip(questions, scored, strict=True) if reply and reply[1]
        ]
        if failed and not self._has_warned:
            self._has_warned = True
            answer, failure = failed[0]
            logger.warning(
                f"data.task={self._task}: the package's score of {answer!r:.60} failed ({failure}): such answers score "
                "0. This warning is shown once."
            )
        return [reply[0] if reply else 0.0 for reply in scored]


def _pack(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


# Everything below runs in the worker.


def _unpack(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))  # safe: the trainer itself pickled it


def load() -> Callable[[str, str, str | None], Callable[[], tuple[float, str]]]:
    """Return the `prepare` of GuardedWorker. Its check returns the score, and the reason of a failure or ""."""
    with require_extra():
        import reasoning_gym  # noqa: F401  imported fully before the guard is up, since dataclasses use exec
    _replace_evaluators()

    @cache
    def cached_dataset(dataset: str) -> Any:
        task, seed, settings = _unpack(dataset)
        return open_dataset(task, seed, settings, size=1)

    def prepare(dataset: str, entry: str, answer: str | None) -> Callable[[], tuple[float, str]]:
        task, question = cached_dataset(dataset), _unpack(entry)
        return lambda: _score(task, question, answer)

    return prepare


def _score(dataset: Any, entry: Mapping[str, Any], answer: str | None) -> tuple[float, str]:
    num_refused = len(guarded_worker.refused)
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # the package's scoring did not expect such a text
        return 0.0, f"{type(error).__name__}: {error}"[:200]
    if len(guarded_worker.refused) > num_refused:
        return 0.0, "it evaluates text as code, which is refused"
    if not -_ROUNDING <= score <= 1.0 + _ROUNDING:
        return 0.0, f"it is {score}, not between 0 and 1"
    return min(max(score, 0.0), 1.0), ""


def _replace_evaluators() -> None:
    """Replace the functions with which the package's scoring evaluates text, and one that rewards nan."""
    import numpy as np
    import sympy
    import sympy.physics.units  # simplify imports it, and it sympifies names
    from sympy.polys.monomials import MonomialOps

    for name in ("binary_matrix", "number_sorting", "spiral_matrix", "string_insertion"):
        _module(f"algorithmic.{name}").eval = ast.literal_eval
    _module("games.n_queens").eval = ast.literal_eval
    _module("arithmetic.bitwise_arithmetic").eval = _bitwise
    for name in ("countdown", "puzzle24"):
        _module(f"games.{name}").parse_expr = lambda text: value_of(text, Fraction)
    _module("algebra.complex_arithmetic").min = np.minimum  # Python's min(1, nan) is 1
    sympy.parse_expr = _algebra
    sympy.simplify = _simplified
    # sympy generates functions for polynomials by number of unknowns and caches them; do it before the guard is up.
    for num_unknowns in range(1, 17):
        operations = MonomialOps(num_unknowns)
        for name in ("mul", "pow", "mulpow", "ldiv", "div", "lcm", "gcd"):
            getattr(operations, name)()


def _module(name: str) -> Any:
    return importlib.import_module(f"reasoning_gym.{name}")


def _algebra(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Parse a sympy expression of unknowns and elementary functions. `Integral(…)`, which is no answer, is refused."""
    import sympy

    known = {"pi": sympy.pi, "E": sympy.E, **(local_dict or {})}
    functions = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt")
    return value_of(
        text,
        lambda value: sympy.Rational(value.numerator, value.denominator),
        lambda name: known[name] if name in known else sympy.Symbol(name),
        {name: getattr(sympy, name) for name in functions},
    )


def _simplified(expression: Any) -> Any:
    """Return `simplify(expression)` if that may be 0; otherwise return the expression unchanged.

    The package only tests whether the result is 0. To simplify the difference between a wrong and a right answer takes
    seconds, while its value at one point already shows that it is not 0.
    """
    from sympy.simplify import simplify

    unknowns = sorted(expression.free_symbols, key=str)
    for start in (0.3, 0.7):
        value = expression.evalf(subs={unknown: start + 0.01 * place for place, unknown in enumerate(unknowns)})
        if value.is_number and abs(value) > 1e-6:
            return expression
    return simplify(expression)


def _bitwise(question: str) -> int:
    """Return the value of a question of bitwise_arithmetic. The text is the package's own, not the model's."""
    operations = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift,
        ast.RShift: operator.rshift,
    }  # fmt: skip

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        assert isinstance(node.value, int)
        return node.value

    return value(ast.parse(question, mode="eval").body)
