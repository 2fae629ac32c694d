"""The running trainer: the only package that uses internals of TRL, transformers, accelerate and DeepSpeed."""
