"""Write one sentence that uses three given nouns: a task for a small instruct model, checked by counting.

The task is that of CommonGen (Lin et al. 2020, arXiv:1911.03705), with automatically checked rules as in IFEval (Zhou
et al. 2023, arXiv:2311.07911). The reward measures what is counted, not what is meant, and a policy exploits the gap.
Each rule was added because a policy trained without it found a way around the earlier ones:

    without a length rule    it wrote only the three words
    with 8 to 20 words       it wrote lists: "music (garbage): lamp (chair):"

Hence the requirement of one plain sentence, see `is_sentence`. Passing it does not prove that a sentence makes sense:
46 steps of full fine-tuning at 1e-4 ended without lists, but with a single pattern, "The tree echoed like a horse that
echoed for every other lamp."

The nouns are drawn from 48, which gives 17,296 triples. A fixed eighth of them is held out.
"""

from __future__ import annotations

import random
import re
from itertools import count, pairwise
from typing import Any

from datasets import Dataset

from rl_training.tasks.task import Task, distinct_rows

_NOUNS = """
river bread dog child tree snow train music window garden bird lamp road boat horse apple rain market teacher cloud
chair letter bridge coffee mountain kitchen ball fire flower clock table street house door book shoe ship beach
farmer doctor king cat hat wall field bag cake sea
"""
_FUNCTION_WORDS = """
i you he she it we they his her its my our your their this that these those there here who which what and or but so
because while when as if than then of in on at to from with by for into onto over under near through across along
around after before behind beside between down up out off about like without is was are were be been being has had
have do does did can could will would may might must should not no all some every each one two many very still just
only also
"""
_VERBS = """
is was are were has had have can could will would may might must should did does sat sits stood stands ran runs went
goes came comes made makes took takes saw sees gave gives found finds felt feels fell falls kept keeps left leaves
brought brings bought buys ate eats drank drinks sang sings flew flies grew grows held holds heard hears lay lies
lit lost met meets read reads rode rides rose said says sold sells sent sends shone shines slept sleeps spoke swam
told tells thought thinks threw wore wears wrote writes blew blows began begins broke breaks built builds caught
chose drew drove drives hid hung hangs knew knows led leads put sets shook swept taught teaches woke plays walks
looks loves likes lives waits watches helps carries fills opens shows turns rests crosses enjoys uses needs wants
works
"""
NOUNS = _NOUNS.split()
MIN_WORDS = 8
MAX_WORDS = 20
MIN_GAP = 2  # minimum number of words between two of the given nouns
MAX_REPEATS = 2  # how often a word other than an article may occur
MAX_COMMAS = 2
ARTICLES = {"a", "an", "the"}
# Words that hold a sentence together. A list of nouns or adjectives contains few of them.
FUNCTION_WORDS = ARTICLES | set(_FUNCTION_WORDS.split())
MIN_FUNCTION_SHARE = 0.3
# Verb forms. Every word that ends in -ed counts too.
VERBS = set(_VERBS.split())
INSTRUCTION = "Write one short sentence with the words {}."
# With one worked example, a model with 135 million parameters uses a third of the nouns from the start; without, few.
WORKED_EXAMPLE = [
    {"role": "user", "content": INSTRUCTION.format("moon, glass, garage")},
    {"role": "assistant", "content": "The moon shone on a glass that she had left in the garage."},
]
_PLAIN = re.compile(r"[A-Z][a-z'’]*(?:,? [A-Za-z][a-z'’]*(?:-[a-z]+)?)*[.!?]")


def three_words(num_train: int = 2048, num_eval: int = 256, seed: int = 0) -> Task:
    """Return the task: `num_train` training and `num_eval` held-out triples of nouns, without duplicates.

    Prompts are conversations, so the model's chat template is applied.

    Raises:
        UserError: If there are fewer triples than requested.
    """
    return Task(
        train_dataset=_dataset(num_train, held_out=False, seed=seed),
        eval_dataset=_dataset(num_eval, held_out=True, seed=seed),
        reward=uses_three_words,
        reward_range=(0.0, 1.0),
    )


def uses_three_words(completions: list[Any], words: list[list[str]], **columns: Any) -> list[float]:
    """Return the share of the three nouns that each answer uses, or 0.0 if it is not one plain sentence.

    >>> uses_three_words(["The child ate fresh bread beside the river in the morning."], [["child", "bread", "river"]])
    [1.0]
    >>> uses_three_words(["child, bread, river"], [["child", "bread", "river"]])
    [0.0]
    """
    return [_share_used(_text(answer), given) for answer, given in zip(completions, words, strict=True)]


def is_sentence(text: str) -> bool:
    """Return whether a text is one plain sentence, judged by counting.

    It must begin with a capital letter, end with `.`, `!` or `?`, and otherwise consist of letters, apostrophes,
    hyphens and at most two commas. It must have 8 to 20 words, at least 30 % of them function words, and a verb. No
    word may occur twice in a row, and none except articles more than twice.
    """
    if not _PLAIN.fullmatch(text) or text.count(",") > MAX_COMMAS:
        return False
    words = _words(text)
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return False
    joining = sum(word in FUNCTION_WORDS for word in words)
    has_verb = any(word in VERBS or word.endswith("ed") for word in words)
    repeats = max(words.count(word) for word in words if word not in ARTICLES) if set(words) - ARTICLES else MAX_WORDS
    doubled = any(first == second for first, second in pairwise(words))
    return joining >= MIN_FUNCTION_SHARE * len(words) and has_verb and repeats <= MAX_REPEATS and not doubled


def _share_used(text: str, nouns: list[str]) -> float:
    if not is_sentence(text):
        return 0.0
    words = _words(text)
    places = [[place for place, word in enumerate(words) if word in (noun, f"{noun}s")] for noun in nouns]
    all_places = sorted(place for noun_places in places for place in noun_places)
    if any(later - earlier <= MIN_GAP for earlier, later in pairwise(all_places)):
        return 0.0  # too close together they form a list
    return sum(map(bool, places)) / len(nouns)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z'’]+(?:-[a-z]+)?", text.lower())


def _text(completion: Any) -> str:
    return (completion if isinstance(completion, str) else completion[-1]["content"]).strip()


def _dataset(num_rows: int, *, held_out: bool, seed: int) -> Dataset:
    rng = random.Random(f"{seed}, held out: {held_out}")
    triples = (rng.sample(NOUNS, 3) for _ in count())
    rows = distinct_rows(((" ".join(sorted(words)), words) for words in triples), num_rows, held_out=held_out)
    return Dataset.from_list([{"prompt": _prompt(words), "words": words} for words in rows.values()])


def _prompt(words: list[str]) -> list[dict[str, str]]:
    return [*WORKED_EXAMPLE, {"role": "user", "content": INSTRUCTION.format(", ".join(words))}]
