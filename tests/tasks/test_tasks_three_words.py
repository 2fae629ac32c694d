"""Three words in a sentence: what is rewarded, and exploits found by a policy that are not."""

from __future__ import annotations

import pytest

from rl_training.tasks.three_words import NOUNS, WORKED_EXAMPLE, is_sentence, three_words, uses_three_words

WORDS = ["river", "bread", "dog"]
PAID = {
    "The dog carried a piece of bread down to the river.": 1.0,
    "Two dogs were waiting at the river for the old man's bread.": 1.0,
    "She bought bread and walked along the river in the rain.": 2 / 3,
    "A teacher wrote a long letter to the farmer last night.": 0.0,
    "The river echoed like bread that echoed for every other dog.": 1.0,  # counting words does not detect nonsense
}
HACKS = [
    "river bread dog",
    "River, bread, dog.",
    "music (garbage): river (chair): bread: dog of the and was in the.",
    "The river the bread the dog the river the bread the dog was.",
    "The river bread dog was in the house with the old man.",  # side by side
    "The dog was was was in the river with the bread and it.",
    "The dog ate bread by the river. The dog ate bread by the river.",
    "The dog had bread.\nThe river was near the old house.",
    "Dog, in the river, the bread, of a dog, it was in the rain.",
    "Dog stone water yellow bread stone water yellow river stone jumped.",  # nothing connects the words
    "The dog with the bread in the river of the house and the rain.",  # no verb
    "The dog and the bread and the river and the dog and the bread and the river and it was the dog.",
    "the dog carried a piece of bread down to the river.",
    "The dog carried a piece of bread down to the river",
    'The word "dog" and the words "bread" and "river" are in this one.',
    "",
]


@pytest.mark.parametrize(("answer", "reward"), PAID.items())
def test_a_plain_sentence_earns_the_share_of_words_it_uses(answer: str, reward: float) -> None:
    assert uses_three_words([answer], words=[WORDS]) == [pytest.approx(reward)]
    as_message = [{"role": "assistant", "content": answer}]
    assert uses_three_words([as_message], words=[WORDS]) == [pytest.approx(reward)]


@pytest.mark.parametrize("answer", HACKS)
def test_known_exploits_earn_nothing(answer: str) -> None:
    assert uses_three_words([answer], words=[WORDS]) == [0.0]


def test_the_worked_example_is_a_sentence_that_would_be_rewarded() -> None:
    assert is_sentence(WORKED_EXAMPLE[1]["content"])
    assert not set(NOUNS) & {"moon", "glass", "garage"}, "what is shown is never asked"


def test_triples_are_unique_within_and_across_splits() -> None:
    task = three_words(num_train=512, num_eval=64)
    train, held_out = (
        [frozenset(words) for words in data["words"]] for data in (task.train_dataset, task.eval_dataset)
    )
    assert len(set(train)) == 512
    assert len(set(held_out)) == 64
    assert not set(train) & set(held_out)
    assert three_words(num_train=512, num_eval=64).train_dataset[7] == task.train_dataset[7]
