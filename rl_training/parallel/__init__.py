"""The processes that train together: which entries of the parameters each keeps, and vectors of them.

ranks.py      sums and exchanges between processes
sharding.py   `Shard`: this process's entries of weights, gradients and states, under DDP; fsdp.py: under FSDP2
vectors.py    `Layout` and `Vector`: entries of all parameters in buckets, and their inner products
sharded_vector.py, state_tensors.py   states as values, and as the tensors of a file that any number of processes reads
"""
