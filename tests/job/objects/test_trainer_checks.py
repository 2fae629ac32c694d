"""Messages about a built trainer before it trains."""

from __future__ import annotations

import pytest
from datasets import Dataset

from rl_training.job.objects.trainer_checks import warn_of_plain_prompts
from rl_training.models.load import load_tiny

MESSAGES = [{"role": "user", "content": "1+1=?"}]


@pytest.mark.parametrize(
    ("prompt", "template", "is_said"), [("1+1=?", "x", True), (MESSAGES, "x", False), ("1+1=?", None, False)]
)
def test_a_chat_template_unused_by_plain_prompts_is_reported(
    make_trainer, caplog, prompt: object, template: str | None, is_said: bool
) -> None:
    tokenizer = load_tiny()[1]
    tokenizer.chat_template = template
    rows = Dataset.from_list([{"prompt": prompt, "answer": "2"}] * 8)
    trainer = make_trainer(processing_class=tokenizer, train_dataset=rows)
    with caplog.at_level("WARNING"):
        warn_of_plain_prompts(trainer)
    assert ("chat template is not applied" in caplog.text) == is_said
