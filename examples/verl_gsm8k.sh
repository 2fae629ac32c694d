#!/bin/sh
# GSM8K with Qwen2.5-1.5B on eight GPUs in verl, with probes. The data: verl's examples/data_preprocess/gsm8k.py.
python -m rl_training.hosts.verl probe=all \
  algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
  data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.loss_scale_factor=1024 \
  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15 trainer.save_freq=20 trainer.test_freq=5 \
  trainer.project_name=gsm8k trainer.experiment_name=qwen1.5b trainer.logger='[console,wandb]'
