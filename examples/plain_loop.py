"""Dr-GRPO in plain PyTorch on the default task, measured.

python examples/plain_loop.py 40 runs/plain
"""

import sys

import torch
from torch.nn.utils import clip_grad_norm_

from rl_training import Records, Rollout, measured_loop, print_summary, take_rows, write_report
from rl_training.models.load import load_tiny
from rl_training.tasks.arithmetic import arithmetic

PROMPTS, G, MICROBATCH, MAX_TOKENS = 32, 8, 32, 36  # of a step; responses to each; sequences of a backward; tokens


def sample(model, tokenizer, task, rows):
    """Return G responses to each prompt with Dr-GRPO's advantages: reward less the mean of its group."""
    rows = [row for row in rows for _ in range(G)]
    asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)  # on the left
    sequences = model.generate(**asked, max_new_tokens=MAX_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    completion_ids = sequences[:, asked.input_ids.shape[1] :]
    ended = (completion_ids == tokenizer.eos_token_id).long()
    mask = (ended.cumsum(dim=1) - ended == 0).long()  # up to the first end-of-sequence token, which counts
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    rewards = torch.tensor(task.reward(texts, answer=[row["answer"] for row in rows]))
    advantages = rewards - rewards.view(-1, G).mean(dim=1).repeat_interleave(G)
    return Rollout(
        prompt_ids=asked.input_ids, prompt_mask=asked.attention_mask, completion_ids=completion_ids,
        completion_mask=mask, advantages=advantages, rewards=rewards, prompt_index=torch.arange(len(rows)) // G,
    )  # fmt: skip


def score(model, part):
    """Return log-probabilities, with graph, and entropies of the completions, (B, T): a forward pass of one's own."""
    ids = torch.cat([part.prompt_ids, part.completion_ids], dim=1)
    mask = torch.cat([part.prompt_mask, part.completion_mask], dim=1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logp = logits[:, part.prompt_ids.shape[1] - 1 : -1].log_softmax(dim=-1)
    entropies = -(logp.detach().exp() * logp.detach()).sum(dim=-1)
    return logp.gather(-1, part.completion_ids.unsqueeze(-1)).squeeze(-1), entropies


if __name__ == "__main__":
    steps, folder = int(sys.argv[1]), sys.argv[2]
    (model, tokenizer), task, microbatches = load_tiny(), arithmetic(), PROMPTS * G // MICROBATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
    model.train()
    with measured_loop(
        model, optimizer, ["simple", "gns", "ess"], responses_per_prompt=G, microbatch_size=MICROBATCH,
        microbatches=microbatches, max_grad_norm=1.0, dr_grpo=True, records=Records(f"{folder}/logs"),
    ) as measured:  # fmt: skip
        for number in range(1, steps + 1):
            chosen = torch.randperm(len(task.train_dataset))[:PROMPTS].tolist()
            rollout = sample(model, tokenizer, task, [task.train_dataset[i] for i in chosen])
            with measured.step(number) as metrics:  # 1: a step begins; its responses were sampled before
                losses = []
                for rows in torch.arange(PROMPTS * G).split(MICROBATCH):
                    part = take_rows(rollout, rows)
                    logps, entropies = score(model, part)
                    measured.microbatch(part, logps, entropies)  # 2: what this microbatch learns from
                    gains = (logps - logps.detach()).exp() * part.advantages.unsqueeze(1) * part.completion_mask
                    loss = -gains.sum() / (MICROBATCH * MAX_TOKENS * microbatches)
                    loss.backward()
                    losses.append(loss.item())
                measured.gradients_ready()  # 3: all gradients are in, not clipped yet
                metrics |= {"loss": sum(losses), "grad_norm": clip_grad_norm_(model.parameters(), 1.0).item()}
                optimizer.step()
                optimizer.zero_grad()
    print(f"Report: {write_report(folder)}")
    print_summary(folder)
