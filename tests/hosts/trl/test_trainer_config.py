"""DrGRPOConfig: what its copies and its pickle hold."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

from rl_training import DrGRPOConfig


def test_copies_of_a_config_keep_access_tokens_and_a_pickle_does_not(tmp_path: Path) -> None:
    config = DrGRPOConfig(output_dir=str(tmp_path), hub_token="hf_secret", max_steps=3)
    for copied in (copy.copy(config), copy.deepcopy(config)):
        assert copied == config
        assert copied.hub_token == "hf_secret"
    assert pickle.loads(pickle.dumps(config)).hub_token is None
