"""Tables and clusters of a kernel are computed from its files, and in a browser the page shows the texts of a cell."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_training.errors import UserError
from rl_training.offline.kernel.clusters import average_linkage, participation_ratio
from rl_training.offline.kernel.command import run
from rl_training.offline.kernel.report import PAGE, write_evolution
from rl_training.offline.kernel.sketches import CountSketches
from rl_training.offline.kernel.structure import (
    CLASSES,
    KERNEL_FILE,
    SEQUENCES_FILE,
    Structure,
    cosine_table,
    distinct_texts,
    edit_distance,
    headline,
    load_kernel,
    pair_table,
    predictions,
    top_pairs,
)

NUM_E, NUM_U, SIZE, CLIP, LENGTH = 4, 6, 3000, 0.5, 10
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a kernel of invented gradients: E and U share a prompt, and a text in both has the same gradient."""
    folder, generator = tmp_path_factory.mktemp("kernel"), torch.Generator().manual_seed(0)
    w_e, w_u, x = (torch.randn(n, SIZE, generator=generator) for n in (NUM_E, NUM_U, NUM_E))
    w_u[0] = w_e[0]  # the same text
    w_u[1] = -w_e[0]  # the same prompt, and the only other answer
    advantages = torch.tensor([0.5, -0.5, 0.25, -0.25, 0.0, 0.0], dtype=torch.float64)
    sketch = CountSketches({"w": SIZE})
    tensors = {
        "kernel": (w_e @ w_u.T).double(), "entropy_kernel": (x @ w_u.T).double(), "advantages": advantages,
        "sq_norms": w_e.double().square().sum(dim=1), "update_sq_norms": w_u.double().square().sum(dim=1),
        "sketches": sketch(w_e), "update_sketches": sketch(w_u),
        "products": torch.randn(NUM_E, 3, generator=generator, dtype=torch.float64),
    }  # fmt: skip
    gradient = CLIP * float((tensors["entropy_kernel"] @ advantages).sum()) / (NUM_E * NUM_U * LENGTH)
    metadata = {
        "clip_coefficient": repr(CLIP), "max_length": str(LENGTH),
        "identity_error": "1e-7", "checkpoint": "C",
        "delta_h/part/momentum": "0.25", "delta_h/part/gradient": repr(gradient), "delta_h/part/decay": "-0.125",
    }  # fmt: skip
    save_file(tensors, folder / KERNEL_FILE, metadata)
    lines = [line("evaluation", i, "shared" if i == 0 else f"e{i}", f"a{i}", i != 3) for i in range(NUM_E)]
    lines += [
        line("update", j, "shared" if j < 2 else f"u{j // 2}", "a0" if j == 0 else f"b{j}", j % 2 == 0)
        for j in range(NUM_U)
    ]
    for row, moved in zip(lines, tensors["products"].sum(dim=1).tolist(), strict=False):
        row["logp_change"] = 0.9 * moved + 0.01
    (folder / SEQUENCES_FILE).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    return folder


def line(buffer: str, row: int, prompt: str, response: str, right: bool) -> dict[str, Any]:
    return {
        "buffer": buffer, "row": row, "prompt": f"{prompt}?", "response": f"</script>{response}", "prompt_hash": prompt,
        "hash": f"{prompt}/{response}", "tokens": 2 + row, "ids": [ord(c) for c in response], "reward": float(right),
        "advantage": None if buffer == "evaluation" else 0.5, "logp": -1.0 - row, "entropy": 0.5, "logp_change": 0.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def structure(folder: Path) -> Structure:
    return Structure.read(folder)


def by_name(structure: Structure) -> dict[str, dict[str, Any]]:
    return {row["pairs"]: row for row in pair_table(structure)}


def test_classes_of_pairs_are_disjoint_and_their_shares_add_up_to_one(structure: Structure) -> None:
    rows = by_name(structure)
    assert [rows[name]["count"] for name in CLASSES] == [1, 1, NUM_E * NUM_U - 2]
    assert sum(rows[name]["share"] for name in CLASSES) == pytest.approx(1.0)
    assert sum(row["share"] for name, row in rows.items() if " in E" in name) == pytest.approx(1.0)
    assert rows["all"]["contribution"] == pytest.approx(float(structure.kernel.metadata["delta_h/part/gradient"]))


def test_cosines_equal_those_of_the_gradients(structure: Structure) -> None:
    rows = by_name(structure)
    assert rows["same text"]["cosine_mean"] == pytest.approx(1.0)
    assert rows["same prompt, other text"]["cosine_mean"] == pytest.approx(-1.0)
    assert abs(rows["other prompt"]["cosine_mean"]) < 0.03


def test_cosines_within_a_buffer_equal_those_of_its_gradients(structure: Structure) -> None:
    """Of U's 15 pairs, the first two sequences are opposite, and two more share a prompt. E's pairs share none."""
    rows = {(row["within"], row["pairs"]): row for row in cosine_table(structure)}
    assert [rows["E", name]["count"] for name in CLASSES] == [0, 0, 6]
    assert [rows["U", name]["count"] for name in CLASSES] == [0, 3, 12]
    shared = rows["U", "same prompt, other text"]
    assert shared["cosine_5"] == pytest.approx(-0.9, abs=0.02)  # from three values: −1 and two near 0
    assert shared["cosine_stderr"] == pytest.approx(1 / 64, rel=0.5)
    assert math.isnan(rows["E", "same text"]["cosine_mean"])


def test_predicted_log_probability_changes_are_listed_beside_measured_ones(structure: Structure) -> None:
    rows = predictions(structure)
    assert [row["measured"] for row in rows] == pytest.approx([0.9 * row["predicted"] + 0.01 for row in rows])
    assert rows[2]["momentum"] == float(structure.kernel.tensors["products"][2, 0])


def test_headline_regresses_measured_on_predicted_changes(structure: Structure) -> None:
    sentence = headline(structure)
    assert sentence["kernel/logp_slope"] == pytest.approx(0.9)
    assert sentence["kernel/logp_correlation"] == pytest.approx(1.0)
    assert sentence["kernel/distinct_texts"] == NUM_E + NUM_U - 1
    assert sentence["kernel/participation_ratio"] == pytest.approx(81 / 11, abs=0.2)  # 9 texts, two of them opposite


def test_top_pairs_are_those_with_the_largest_contributions(structure: Structure) -> None:
    rows, all_of_them = top_pairs(structure, 3), structure.contributions.flatten().sort().values
    assert [row["contribution"] for row in rows[:3]] == pytest.approx(all_of_them[:3].tolist())
    assert [row["contribution"] for row in rows[3:]] == pytest.approx(all_of_them[-3:].flip(0).tolist())


@pytest.mark.parametrize(("a", "b", "distance"), [("", "ab", 2), ("abc", "ac", 1), ("kitten", "sitting", 3)])
def test_edit_distances_equal_values_by_hand(a: str, b: str, distance: int) -> None:
    assert edit_distance([ord(c) for c in a], [ord(c) for c in b]) == distance


def test_a_truncated_kernel_file_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / KERNEL_FILE).write_bytes((folder / KERNEL_FILE).read_bytes()[:-9])
    with pytest.raises(ValueError, match=str(tmp_path / KERNEL_FILE)):
        load_kernel(tmp_path)


def test_a_kernel_with_lost_or_damaged_sequences_is_named_with_the_fix(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / KERNEL_FILE, tmp_path)
    sequences = tmp_path / SEQUENCES_FILE
    for content in (None, "[]", "{}", (folder / SEQUENCES_FILE).read_text(encoding="utf-8")[:-9]):
        if content is not None:
            sequences.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=f"^{sequences} is missing or damaged .*run rl-training analyze again"):
            Structure.read(tmp_path)


def test_participation_ratio_is_not_biased_by_sketch_noise() -> None:
    """64 orthogonal vectors in sketches of 128 entries: plain squared cosines would give 64/(1 + 63/128) = 43."""
    x = torch.eye(64, 4096)
    sketches = CountSketches({"w": 4096}, buckets=16, repeats=8)(x).double()
    repeats = torch.einsum("nsm,qsm->snq", sketches, sketches)
    assert participation_ratio(repeats) == pytest.approx(64, rel=0.08)
    assert participation_ratio(torch.ones(2, 5, 5)) == pytest.approx(1.0)


def test_two_plain_groups_are_found_as_two_clusters() -> None:
    cosines: Tensor = torch.full((5, 5), -0.1)
    cosines[:2, :2] = cosines[2:, 2:] = 0.9
    cosines.fill_diagonal_(1.02)  # estimates may exceed 1
    clusters, order = average_linkage(cosines, 2)
    assert clusters[0] == clusters[1] != clusters[2]
    assert len(set(clusters[2:].tolist())) == 1
    assert sorted(order.tolist()) == list(range(5))
    assert set(order[:2].tolist()) in ({0, 1}, {2, 3}, {2, 4}, {3, 4})


def test_distinct_texts_are_listed_with_their_number(structure: Structure) -> None:
    distinct = distinct_texts(structure)
    assert {row["hash"]: row["times"] for row in distinct.rows}["shared/a0"] == 2
    assert math.isclose(float(distinct.cosines[0, 0]), 1.0)


@pytest.fixture(scope="module")
def asked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the command's output for this kernel and the folder of its evolution. Its report is next to the kernel."""
    out, said = tmp_path_factory.mktemp("evolution"), io.StringIO()
    with contextlib.redirect_stdout(said):
        run([folder], out, "png")
    return said.getvalue(), out


def test_the_command_prints_a_kernel_and_follows_kernels_over_training(asked: tuple[str, Path]) -> None:
    said, out = asked
    assert "kernel/logp_slope" in said
    with open(out / "evolution.csv", encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["cosine_correlation"]) == pytest.approx(1.0)  # with itself
    assert float(row["participation_ratio_E"]) == pytest.approx(NUM_E, rel=0.01)
    assert (out / "evolution_spectrum.png").stat().st_size > 1000
    assert (out / "evolution.html").read_text(encoding="utf-8").count('<figure class="chart"') >= 5


def test_the_evolution_starts_at_the_first_step_and_is_ordered_by_step(structure: Structure, tmp_path: Path) -> None:
    """The later kernel is given first. Its gradients within E differ, and its cosines are compared with the first's."""
    tensors = dict(structure.kernel.tensors)
    tensors["sketches"] = tensors["sketches"].flip(2)
    tensors["sketches"][0] *= -1
    later = Structure(replace(structure.kernel, tensors=tensors), structure.evaluation, structure.update)
    columns = [{"step": step, **headline(structure)} for step in (9, 5)]
    write_evolution([later, structure], columns, tmp_path)
    with open(tmp_path / "evolution.csv", encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["step"], second["step"]) == ("5", "9")
    assert float(first["cosine_correlation"]) == pytest.approx(1.0)
    assert float(second["cosine_correlation"]) < 0.9


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_pointing_at_a_cell_shows_both_texts_in_a_browser(asked: Any, folder: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    page = (folder / PAGE).read_text(encoding="utf-8")
    assert "http" not in page.replace("http-equiv", "")  # the page loads nothing from elsewhere
    point = """
      const box = map.getBoundingClientRect();
      const x = box.left + (columns.indexOf(2) + 0.5) * size, y = box.top + (rows.indexOf(3) + 0.5) * size;
      map.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y, bubbles: true}));
    """
    tried = page.replace("draw();\n</script>", f"draw();{point}</script>").replace("Content-Security-Policy", "")
    (tmp_path / "page.html").write_text(tried, encoding="utf-8")  # its content policy allows only its own scripts
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-sync", "--disable-component-update", f"--user-data-dir={tmp_path}", "--dump-dom",
         f"file://{tmp_path}/page.html"],
        capture_output=True, text=True, timeout=100,
    ).stdout  # fmt: skip
    cell = shown.split('id="cell"')[1].split("</div>")[0]
    assert "evaluation 3" in cell
    assert "e3?&lt;/script&gt;a3" in cell
    assert "update 2" in cell
    assert "u1?&lt;/script&gt;b2" in cell
    assert "other prompt" in cell
