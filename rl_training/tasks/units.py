"""Words that may follow a number without changing it: units of measurement, and nouns of the question.

A policy learns whatever is rewarded. In `18 short of`, `18 G` and `18 nope` the 18 does not count anything that was
asked for. A list of words that change a number would never be complete, so only listed words that leave it unchanged
may follow a number.
"""

from __future__ import annotations

import re

_MEASURES = {
    "dollar", "usd", "buck", "cent", "penny", "pennie", "euro", "pound", "percent", "point", "second", "sec", "s",
    "minute", "min", "hour", "hr", "h", "day", "week", "month", "year", "yr", "decade", "old", "am", "pm", "AM",
    "PM", "km", "kilometer", "kilometre", "m", "meter", "metre", "cm", "centimeter", "centimetre", "mm",
    "millimeter", "mile", "mi", "mph", "kph", "kmh", "foot", "feet", "ft", "inch", "inche", "in", "yard", "yd",
    "acre", "square", "sq", "cubic", "g", "gram", "kg", "kilogram", "kilo", "mg", "milligram", "ton", "lb", "ounce",
    "oz", "liter", "litre", "l", "L", "ml", "mL", "milliliter", "gallon", "gal", "quart", "pint", "cup",
    "tablespoon", "teaspoon", "calorie", "kcal", "kwh", "degree", "°", "°c", "°f", "GB", "MB", "TB", "gigabyte",
    "megabyte", "unit", "item", "piece", "people", "person", "time", "total", "altogether", "left", "remaining",
    "each",
}  # fmt: skip
_BEFORE_A_UNIT = {"per", "a", "an", "each", "every"}
_INNER_WORDS = _BEFORE_A_UNIT | {"of", "in", "for", "the", "on"}  # a unit cannot end with these
# Words of questions that are not nouns. Most of them qualify a number.
_NOT_NOUNS = {
    "less", "more", "fewer", "short", "than", "off", "about", "around", "almost", "nearly", "roughly", "least",
    "most", "only", "just", "down", "under", "above", "between", "beyond", "from", "with", "without", "within",
    "half", "twice", "double", "triple", "thrice", "then", "when", "who", "what", "which", "whose", "why", "how",
    "many", "much", "was", "are", "were", "been", "has", "have", "had", "does", "did", "can", "could", "will",
    "would", "should", "may", "might", "must", "she", "her", "him", "his", "they", "them", "their", "you", "your",
    "our", "its", "this", "that", "these", "those", "there", "some", "any", "all", "none", "another", "other",
    "one", "per", "the", "for", "out", "into", "onto", "until", "before", "after", "while", "because", "since",
    "extra", "too", "also", "again", "ago", "away", "both", "few", "several", "wrong", "right", "false", "true",
    "instead", "additional", "except", "need", "needs", "against", "opposite", "lower", "higher", "greater",
    "smaller", "larger", "bigger",
}  # fmt: skip
# Words that change the number before them: `18 thousand` is not 18 of some unit.
_NUMBER_CHANGING = re.compile(
    r"\b(?:M|(?i:hundreds?|thousands?|[a-z]+illions?|k|bn|mn|b|dozens?|score|gross|grand|lakhs?|crores?"
    r"|hal(?:f|ves)|thirds?|quarters?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|twentie|hundred|thousand|million)ths?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy"
    r"|eighty|ninety|[a-z]+teen|plus|minus|times|divided|multiplied|over|squared|cubed|mod|power"
    r"|and|or|nor|to|not|no|but|never|neither|[a-z]+n['’]t|negative|below|[xyznei]|pi))\b"
)


def nouns_of(question: str) -> frozenset[str]:
    """Return the words of a question that may be a unit: three or more lowercase letters, in singular and plural.

    `more`, `fewer` and `less` are included if the question asks how many more there are.

    >>> sorted(nouns_of("How many more boxes of eggs does Ann XVII buy than he?"))
    ['box', 'boxe', 'boxes', 'buy', 'egg', 'eggs', 'more']
    """
    words = set(re.findall(r"(?<![A-Za-z])[a-z]{3,}(?![A-Za-z])", question)) - _NOT_NOUNS
    asked = re.findall(r"\b[Hh]ow (?:many|much) (more|fewer|less)\b", question)
    return frozenset({form for word in words for form in _forms(word)} - _NOT_NOUNS).union(asked)


def is_unit(text: str, nouns: frozenset[str] | None) -> bool:
    """Return whether the words after a number leave it unchanged.

    Args:
        text: Everything that follows the number; may be "".
        nouns: Words that are allowed in addition to units of measurement. None allows any word that does not change a
            number.
    """
    if _NUMBER_CHANGING.search(text):
        return False
    words = [word if len(word) < 3 and "°" not in word else word.lower() for word in re.findall(r"[A-Za-z°]+", text)]
    if nouns is None or not words:
        return True
    known = [word in nouns or (word not in _NOT_NOUNS and bool(_forms(word) & (_MEASURES | nouns))) for word in words]
    begins, ends = known[0] or words[0] in _BEFORE_A_UNIT, known[-1]
    return begins and ends and all(k or word in _INNER_WORDS for k, word in zip(known, words, strict=True))


def _forms(word: str) -> set[str]:
    """Return a word and its possible singular forms, without a final "s" or "es"."""
    return {word, word.removesuffix("s"), word.removesuffix("es")} if len(word) > 2 else {word}
