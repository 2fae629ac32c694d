"""What a trainer's settings say of its training.

loss.py              the settings of the loss, as the engine knows them
sampling.py          whether responses are samples of the scored policy, and whether more can be drawn
rollout_shape.py     how many sequences a step and a rollout have, and how many steps a rollout lasts
whole_prompts.py     what keeps the responses to a prompt in consecutive rows
fixes.py             what to set to make more of a training measurable
spelling.py          how advice names settings, in Python and on the command line
recorded.py          the settings that are recorded
"""
