"""The ranks (processes) that train together: which entries of the parameters each keeps, and vectors of them.

ranks.py            sums and exchanges between ranks
sharding.py         `Shard`: this rank's entries of weights, gradients and states, under DDP; fsdp.py: under FSDP2
vectors.py          `Layout` and `Vector`: entries of all parameters in buckets, and their inner products
sums.py             sums of long vectors; fusion.py: the same in one compiled pass
fold_vectors.py     `FoldVectors`: one vector per fold, exact or in 8 bits; `Receiver`: takes gradients as they arrive
sharded_vector.py   a vector as a value that any number of ranks can read from a checkpoint
state_tensors.py    states as named tensors for a file, and back
"""
