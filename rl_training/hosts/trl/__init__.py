"""The running trainer: the only room that names internals of TRL, transformers, accelerate and DeepSpeed."""
