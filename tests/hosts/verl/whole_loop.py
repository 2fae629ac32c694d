"""Runs verl's whole loop on the CPU by this package's command.

    python tests/hosts/verl/whole_loop.py FOLDER PROCESSES WORDS

It uses Ray, TransferQueue, the synchronous trainer, and the tests' own rollout server instead of vLLM. WORDS are
further settings. Everything is written under FOLDER.
"""

from __future__ import annotations

import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE, L_MAX, VOCABULARY = Path(__file__).parent, 12, 64
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return the reward: the number of different letters in the response."""
    return len(set(solution_str)) / 12


def make_inputs(folder: Path) -> None:
    """Write a tiny random model, its tokenizer and a set of prompts."""
    import pandas
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    # transformers uses Qwen2's class whatever was saved, and verl needs its newline and <|im_end|>. Bytes, no merges.
    words = ["<pad>", "<bos>", "<|im_end|>", "Ċ", "Ġ", *string.ascii_letters, *string.digits][:VOCABULARY]
    special = {"unk_token": "a", "bos_token": "<bos>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    tokenizer = Qwen2Tokenizer({word: i for i, word in enumerate(words)}, [], **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {"data_source": "stub", "prompt": [{"role": "user", "content": string.ascii_letters[i % 40 : i % 40 + 4]}],
         "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i}} for i in range(64)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")


def settings(folder: Path, processes: int) -> list[str]:
    """Return verl's settings: Dr-GRPO with 8 prompts of 4 responses per step."""
    fsdp = f"{ACTOR}.fsdp_config"
    return [
        f"data.train_files={folder}/data.parquet", f"data.val_files={folder}/data.parquet", "data.train_batch_size=8",
        "data.max_prompt_length=8", f"data.max_response_length={L_MAX}", "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False",
        f"actor_rollout_ref.model.path={folder}/model", "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor={L_MAX}",
        f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.use_torch_compile=False",
        f"{fsdp}.use_torch_compile=False",
        *(f"+{fsdp}.mixed_precision.{kind}_dtype=fp32" for kind in ("param", "reduce", "buffer")),
        f"{ROLLOUT}.name=stub", f"{ROLLOUT}.n=4", f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.agent.num_workers=1", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        f"{ROLLOUT}.free_cache_engine=False", "reward.num_workers=1",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.n_gpus_per_node={processes}", "trainer.nnodes=1", "trainer.device=cpu", "trainer.logger=[console]",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "trainer.total_training_steps=4", f"trainer.default_local_dir={folder}/run",
        "ray_kwargs.ray_init.num_cpus=24", f"+ray_kwargs.ray_init.num_gpus={processes}",
        "+ray_kwargs.ray_init.include_dashboard=False", "+ray_kwargs.ray_init.object_store_memory=300000000",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "PYTHONPATH": path, "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,stub_rollout", "HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "disabled", "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0",
        "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def run(folder: Path, processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command, and return how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_inputs(folder)
    command = [sys.executable, "-m", "rl_training.hosts.verl", *settings(folder, processes), *words]
    return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True)


if __name__ == "__main__":
    finished = run(Path(sys.argv[1]).resolve(), int(sys.argv[2]), *sys.argv[3:])
    print(finished.stdout, finished.stderr)
    sys.exit(finished.returncode)
