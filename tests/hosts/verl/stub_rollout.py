"""A rollout server for verl's whole loop without vLLM: a transformers model in a Ray actor, on the CPU.

It is named in VERL_USE_EXTERNAL_MODULES and chosen by actor_rollout_ref.rollout.name=stub.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "stub_server_{}"


class Server:
    """Samples from the model with the weights that it received last."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.steps, self.draw = 0, torch.Generator().manual_seed(1)

    async def load(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.steps = global_steps or 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        ids, logps = torch.tensor([list(prompt_ids)]), []
        with torch.no_grad():
            for _number in range(int(sampling_params.get("max_tokens", 12))):
                logits = self.model(ids).logits[0, -1] / max(sampling_params["temperature"], 1e-6)
                token = torch.multinomial(logits.softmax(-1), 1, generator=self.draw)
                logps.append(float(logits.log_softmax(-1)[token]))
                ids = torch.cat([ids, token[None]], dim=1)
                if int(token) == self.model.config.eos_token_id:
                    break
        return TokenOutput(
            token_ids=ids[0, len(prompt_ids) :].tolist(), log_probs=logps, stop_reason="completed",
            extra_fields={"global_steps": self.steps},
        )  # fmt: skip

    async def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = release_kv_cache = nothing
    resume_kv_cache = start_profile = stop_profile = nothing


class StubReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        name = NAME.format(self.replica_rank)
        self._server_handle = ray.remote(Server).options(name=name, num_cpus=0.1).remote(self.model_config.path)
        self.servers, self._server_address = [self._server_handle], name


class ServerAdapter(BaseRollout):
    """The training worker's side: sends the weights to its server."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        state = {name: tensor.detach().cpu().clone() for name, tensor in weights}  # collective: every rank reads all
        await ray.get_actor(NAME.format(torch.distributed.get_rank())).load.remote(state, kwargs.get("global_steps"))


RolloutReplicaRegistry.register("stub", lambda: StubReplica)
base._ROLLOUT_REGISTRY["stub", "async"] = f"{__name__}.ServerAdapter"
