"""The training loops that probes can be attached to.

loop.py              a loop in plain PyTorch: the shortest host, and the one to read first. loop_life.py says where it
                     stands, loop_policy.py samples for it, loop_refusals.py refuses what no measured loop may do
trl/, verl/          TRL's trainer and verl's training worker
estimate_writer.py   what any of them writes of a step; described.py: how its training is set up
equal_rewards.py     says of a step that nothing is learned from it, and what can be seen of why
"""
