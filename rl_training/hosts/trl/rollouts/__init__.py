"""The rollouts of a trainer, and TRL's batches of their rows.

current.py           what is known of the current rollout, from its generation to the steps that learn from it
record.py            what holds for all rows of a rollout; the batch has what differs by row
complete.py          adds to its batch what TRL leaves out
generated.py         keeps what was generated, and finds the response of a row, with its reward, by its tokens
prompt_numbers.py    numbers the prompts of a batch
kind.py              whether the batch is the rollout: generated for it or replayed, of whole groups or selected
old_logps.py         whose old log-probabilities the batch has
batches.py           reads a batch
"""
