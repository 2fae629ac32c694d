"""Parts of a run's page below its first screen.

figures.py               the charts of a run
ledger.py                where the entropy went: a sum that closes
tokens.py                which tokens change entropy
sampler.py               how far the policy that samples is from the one that is trained
own_probes.py            what probes of one's own measured
checkpoint_analyses.py   analyses of checkpoints; also a page of its own
appendix.py              evaluations, responses, what is missing and why, and what the probes cost
"""
