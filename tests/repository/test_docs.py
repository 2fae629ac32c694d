"""The documentation: tutorials run from the first to the last cell, guides' examples run, every metric has a row."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pydoc
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import forks
import pytest
from configs import QUICK
from trainers import FEW, SGD, SHAPE, every_probe, graded, trained_weights, trainer_maker
from trl import GRPOTrainer

from rl_training import DrGRPOTrainer, attach
from rl_training.engine.context import StepContext
from rl_training.hosts.trl.buffer import FilteredBuffer
from rl_training.optim.supported import NO_FORMULA
from rl_training.probes import InterventionsProbe, MeasuredStepProbe, SimpleEntropyProbe, TokenClassesProbe
from rl_training.records.report.summary import summarize
from rl_training.records.table.reading import read_run

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted(path for path in DOCS.glob("tutorials/*.md") if "{code-cell}" in path.read_text(encoding="utf-8"))


def blocks(page: Path, opening: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{opening}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code_cells(page: Path) -> list[str]:
    return [re.sub(r"^:tags:.*\n", "", cell) for cell in blocks(page, r"\{code-cell\} python")]


# Sizes in the cells, and the smaller ones used here. `make docs` runs the cells unchanged.
SMALLER = {
    "per_device_train_batch_size=32": "per_device_train_batch_size=8",
    "max_completion_length=36": "max_completion_length=12",
    "PROMPTS, RESPONSES, MICROBATCH, MAX_TOKENS = 32, 8, 32, 36": (
        "PROMPTS, RESPONSES, MICROBATCH, MAX_TOKENS = 8, 8, 8, 12"
    ),
    "max_steps=10": "max_steps=3",
    "max_steps=12": "max_steps=3",
}


def smaller(cell: str) -> str:
    for size, here in SMALLER.items():
        cell = cell.replace(size, here)
    return cell


def typed_in_a_terminal(line: str, folder: Path) -> None:
    """Run `rl-training COMMAND …` in a fork that starts at the root of the repository, with smaller trainings."""
    name, command, *arguments = shlex.split(line)
    assert name == "rl-training"
    words = [re.sub("(^|=)runs/", rf"\1{folder}/runs/", argument) for argument in arguments]
    if command == "train":
        words += QUICK
    if command == "analyze":
        words += ["evaluation.prompts=16", "update.prompts=8", "memory.microbatch_size=8"]
    done = forks.run("rl_training/__main__.py", command, *words)
    assert done.returncode == 0, done.stderr


def test_every_size_that_this_test_reduces_is_in_a_tutorial() -> None:
    cells = "".join(cell for page in TUTORIALS for cell in code_cells(page))
    assert [size for size in SMALLER if size not in cells] == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_tutorial_runs_to_its_end(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    display = ModuleType("IPython.display")  # installed for the site, not for the tests
    display.Image = lambda path, **size: Path(path).read_bytes()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(page):
        if cell.startswith("!"):
            typed_in_a_terminal(smaller(cell[1:]), tmp_path)
        else:
            exec(compile(smaller(cell), str(page), "exec"), names)
    assert list(tmp_path.glob("**/metrics.jsonl"))
    if page.stem == "first_run":
        explained = ", ".join(re.findall(r"^\| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)).split(", ")
        assert {row.label for row in summarize(read_run(tmp_path / "runs" / "first"))} <= {*explained}


def example(page: str, marker: str) -> str:
    """Return the guide's Python block that contains the marker."""
    return next(block for block in blocks(DOCS / page, "python") if marker in block)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names that a training with everything records, except those of TRL itself and of a guide's probe."""
    folder = tmp_path_factory.mktemp("everything")
    mine: dict[str, Any] = {}
    exec(example("how_to/write_a_probe.md", "class RewardSpreadProbe"), mine)
    (folder / "mine.py").write_text(example("how_to/extend.md", "def softer"), encoding="utf-8")
    interventions = InterventionsProbe(["bonus", f"{folder / 'mine.py'}:softer:0.5"], every=1)
    tokens = TokenClassesProbe(every=1)
    probes = [*every_probe(), mine["RewardSpreadProbe"](), interventions, tokens]
    trainer = trainer_maker(folder)(probes=probes, buffer=FilteredBuffer(), num_generations=4, **FEW | {"max_steps": 3})
    trainer.train()
    names = {*trainer.attachment.latest, *logged(trainer)}
    assert trainer.attachment.latest["reward_spread/all"].value > 0
    mismatched = trainer_maker(folder)(probes=[SimpleEntropyProbe()], top_p=0.9, **FEW)
    mismatched.train()
    options = {"probes": [SimpleEntropyProbe(unclipped=True), MeasuredStepProbe()], "target_kl_share": 2e-3}
    bounded = trainer_maker(folder)(**options, **FEW | {"reward": [graded, brief]})
    bounded.train()
    bare = trainer_maker(folder)(GRPOTrainer, num_generations=4, **FEW)
    bare.train()
    names |= {*mismatched.attachment.latest, *bounded.attachment.latest}
    guide = {name for name in names if name.startswith("reward_spread/")}
    return names - logged(bare) - guide


def brief(completions: list[str], **kwargs: Any) -> list[float]:
    return [-0.1 * len(text) for text in completions]


def logged(trainer: GRPOTrainer) -> set[str]:
    """Return the names in a trainer's log."""
    return {name for row in trainer.state.log_history for name in row}


def rows_of_the_page() -> dict[str, re.Pattern[str]]:
    """Return the metrics in docs/reference/metrics.md with their patterns. …, NAME and KIND match anything."""
    lines = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8").splitlines()
    names = [match[1] for line in lines if (match := re.match(r"\| `([^`]+)` \|", line))]
    return {
        name: re.compile(re.sub("…|NAME|KIND", ".+", re.escape(name)) + "(_sequence)?(_se|_low|_high)?")
        for name in names
    }


def test_the_metrics_page_has_a_row_for_every_recorded_name_and_no_other(recorded: set[str]) -> None:
    rows = rows_of_the_page()
    assert {name for name in recorded if not any(row.fullmatch(name) for row in rows.values())} == set()
    assert {name for name, row in rows.items() if not any(map(row.fullmatch, recorded))} == set()


def test_the_guides_code_for_a_plain_trainer_trains_like_the_interventions(tmp_path: Path) -> None:
    """With DrGRPOTrainer's batch order and SGD, the weights' changes agree to 1e-6, and differ from plain training."""
    mine: dict[str, Any] = {}
    for marker in ("class PositiveOnly", "class ScaleLearningRate"):
        exec(example("how_to/keep_entropy_up.md", marker), mine)
    make = trainer_maker(tmp_path)
    guided = type("Guided", (mine["PositiveOnly"], DrGRPOTrainer), {})
    changes = []
    for kind, names in ((guided, []), (DrGRPOTrainer, ["psr", "lr:0.5"]), (DrGRPOTrainer, [])):
        trainer = make(kind, interventions=names, **SHAPE | SGD)
        if kind is guided:
            trainer.add_callback(mine["ScaleLearningRate"](0.5))
        first = trained_weights(trainer)
        trainer.train()
        changes.append(trained_weights(trainer) - first)
    guide, by_loop, plain = changes
    assert float((guide - by_loop).norm() / by_loop.norm()) < 1e-6
    assert float((guide - plain).norm() / by_loop.norm()) > 1e-3


def test_the_guides_probe_equals_the_gradient_share_of_long_responses(tmp_path: Path) -> None:
    """Without clipping SGD's step is linear in the gradient, so removing long responses changes ΔH by −their share."""
    mine: dict[str, Any] = {}
    exec(example("how_to/write_a_probe.md", "class LongResponsesProbe"), mine)
    shares = []

    class WithShare(mine["LongResponsesProbe"]):  # type: ignore[misc]
        def measure(self, ctx: Any, state: Any) -> Any:
            reading = super().measure(ctx, state)
            lengths = ctx.step.batch.scores.mask.sum(dim=1, keepdim=True)
            _, parts = ctx.gradient_shares([ctx.step.batch.loss_weights.where(lengths > lengths.median())])
            shares.append(ctx.effect_of(parts[0]).estimate(0).value)
            return reading

    trainer = trainer_maker(tmp_path)(probes=[WithShare()], max_steps=1, max_grad_norm=0.0, **SHAPE | SGD)
    trainer.train()
    estimate = trainer.attachment.latest["long_responses/delta_h"]
    assert estimate.value == pytest.approx(-shares[0], rel=1e-4)
    assert estimate.value != 0.0
    assert estimate.stderr > 0.0


def module_of_docs(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def generate() -> Any:
    return module_of_docs("generate")


def test_committed_generated_texts_are_up_to_date(generate: Any) -> None:
    """The tutorial as a notebook, and the names of optimizers. If this fails, run `python docs/generate.py`."""
    kept = generate.kept()
    assert {path.name for path in kept} == {"limits.md", "attach_to_your_trainer.ipynb"}
    assert [path for path, text in kept.items() if path.read_text(encoding="utf-8") != text] == []


def test_one_page_lists_the_optimizers_and_its_list_is_that_of_the_table(generate: Any) -> None:
    page = generate.with_optimizers("with <!-- optimizers -->\nan old list<!-- end -->, and")
    assert re.fullmatch("with <!-- optimizers -->[^<]*AdamW, Adam[^<]*<!-- end -->, and", page)
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*/*.md")}
    assert {name: text.count("<!-- optimizers -->") for name, text in texts.items() if "AdamW, Adam" in text} == {
        "limits.md": 1
    }


def test_every_reason_is_listed_with_the_function_and_the_condition_that_decide_it(generate: Any) -> None:
    """Whatever the name of the constant: two modules have a NOT_FINITE, and each is given by its own functions."""
    listed = {reason.code: list(map(str, reason.places)) for reason in generate.reasons.read_reasons()}
    assert [code for code, places in listed.items() if not places] == []
    assert listed["no_formula"] == ["`formula_of` in `optim/supported.py` if `full_name not in formulas`"]
    assert {place.split("`")[3] for place in listed["not_finite"]} == {"probes/ess.py", "statistics/jackknife.py"}
    assert {place.split("`")[3] for place in listed["not_finite_evaluation"]} == {"probes/ground_truth.py"}
    found = generate.reasons.as_text(str(NO_FORMULA.formatted(optimizer="Muon", supported="torch's AdamW")))
    assert [line.split(":")[0] for line in found.splitlines() if not line.startswith(" ")] == ["no_formula"]
    assert NO_FORMULA.fix in found
    retold = generate.reasons.as_text("the optimizer's formula is not known")  # as a user says it: no reason reads so
    assert "no_formula:" in retold
    assert generate.reasons.as_text("xyzzy") == ""


def test_the_index_for_programs_has_every_page_with_a_sentence(generate: Any) -> None:
    listed = dict(re.findall(r"^- \[[^]]+\]\(([^)]+)\.html\): (.*)$", generate.llms_txt(), re.MULTILINE))
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.glob("*/*.md")}
    assert listed.keys() == pages - {"index"}
    assert {name for name, sentence in listed.items() if not 3 <= len(sentence.split()) <= 60} == set()


def test_glossary_terms_are_few_and_linked() -> None:
    """At most 25, in alphabetical order, and every link to the glossary names one of them."""
    terms = re.findall(r"^## (.*)$", (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) <= 25
    assert terms[1:] == sorted(terms[1:], key=str.lower)
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    anchors = {re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-") for term in terms}
    linked = set(re.findall(r"glossary\.md#([\w-]+)", pages))
    assert linked <= anchors
    assert len(linked) >= 8


def test_the_first_use_of_a_term_is_found_and_has_a_meaning_to_show() -> None:
    terms = module_of_docs("terms")
    meanings = terms.meanings()
    assert {*terms.USES, "Forward and backward"} <= meanings.keys()
    assert [text for text in meanings.values() if len(text) < 20 or re.search(r"[*`]|\]\(", text)] == []
    seen = {"Fold"}
    text = "Folds, PSR ± 2, `ess/noise scale`; a noise scale, samplers and the sampler's trapezoids"
    pieces = terms.split_at_terms(text, seen)
    assert "".join(piece for piece, _ in pieces) == text
    assert [(piece, term) for piece, term in pieces if term] == [
        ("PSR", "PSR, NSR"), ("±", "±"), ("noise scale", "Noise scale"), ("samplers", "Sampler and trainer"),
        ("trapezoids", "Trapezoid"),
    ]  # fmt: skip
    assert terms.split_at_terms("PSR, a sampler, a fold", seen) == [("PSR, a sampler, a fold", "")]


def test_every_setting_has_a_description(generate: Any) -> None:
    files = [path for path in generate.CONF.glob("**/*.yaml") if path.parent.name not in ("help", "experiment")]
    assert len(files) > 25
    assert {(path.stem, name) for path in files for name, _, what in generate.settings(path) if not what} == set()


def test_parameter_tables_have_full_descriptions_and_capitalized_cells(
    generate: Any,
) -> None:
    described = generate.parameters("rl_training.hosts.trl.buffer.FilteredBuffer")
    assert [*described] == ["max_attempts", "floor", "half_life", "seed"]
    assert described.keys() <= set(inspect.signature(FilteredBuffer).parameters)
    assert not any(what.endswith(".") or "\n" in what for what in described.values())
    rows = [("a", "1", "number of steps"), ("b", "", "null: the run's"), ("c", "core", "core | all"), ("d", "2", "")]
    cells = [line.split(" | ")[2].removesuffix(" |") for line in generate.table(rows).splitlines()[2:5]]
    assert cells == ["Number of steps", "null: the run's", "core \\| all"]


def test_no_sentence_in_the_api_docs_is_parsed_as_a_type() -> None:
    """Sphinx takes what stands before a colon for a type, in the first line of Returns and of a property."""
    listed = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"auto(?:class|function):: ([\w.]+)(?:.*\n +:members:(.*))?", listed)
    objects: list[Any] = [pydoc.locate(name) for name, _ in entries]
    members = [
        getattr(pydoc.locate(name), member) for name, shown in entries for member in shown.replace(",", "").split()
    ]
    members += [member for name, member in vars(StepContext).items() if not name.startswith("_")]
    assert len(objects) > 30
    assert len(members) > 20
    first_lines = []
    for shown in [*objects, *members]:
        doc = inspect.getdoc(shown) or ""
        first_lines += re.findall(r"^(?:Returns|Yields):\n +(.*)", doc, re.MULTILINE)
        first_lines += doc.splitlines()[:1] if isinstance(shown, property) else []
    assert len(first_lines) > 10
    assert [line for line in first_lines if ":" in re.sub("`[^`]*`", "", line)] == []


def test_pages_link_to_existing_files_by_relative_paths() -> None:
    """So they work in a clone. Sphinx checks only those that are pages."""
    files = {
        (page.parent / name).resolve()
        for page in DOCS.glob("**/*.md")
        for name in re.findall(r"\]\(((?:\.\./)+[^)#\s]*)", page.read_text(encoding="utf-8"))
    }
    outside = {file for file in files if not file.is_relative_to(DOCS.resolve())}
    assert len(outside) > 3
    assert {file for file in files if "_generated" not in file.parts and not file.exists()} == set()


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_between_pages_resolve_to_files_and_headings(page: str) -> None:
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    links = re.findall(r"(?:\]\(|^\[[^]]+\]: )(?!https?:)([^)#\s]*)#?([^)\s]*)", text, re.MULTILINE)
    assert links
    for name, anchor in links:
        if not anchor:
            assert (DOCS.parent / name).exists(), name
            continue
        name = name or page
        headings = re.findall(r"^#+ (.*)$", (DOCS.parent / name).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{name}#{anchor}"


def test_pages_state_the_memory_of_a_measured_step_by_the_formula() -> None:
    """4 (K + 3) P/N bytes at K = 8, or 4 (K/4 + 2) in 8 bits, to 5 %. at_size.md counts it, with working slices."""
    adapter, whole = 4 * 11 * 18_464_768 / 1e9, 4 * 4 * 7_615_616_512 / 8 / 1e9  # LoRA of Qwen2.5-1.5B; all of 7B
    said = {
        "../README.md": [(r"in memory\s+([\d.]+)\s+GB\s+for\s+LoRA", adapter)],
        "reference/costs.md": [
            (r"\| LoRA of rank 16 on 1.5B, one GPU \|.*\| ([\d.]+) GB \|", adapter),
            (r"\| all weights of 7B, 8 GPUs \|.*\| ([\d.]+) GB \|", whole),
        ],
        "explanation/at_size.md": [
            (r"\| 7B \| 8 \| `simple` \|.*?\| 25.9 \| ([\d.]+) \|", whole),
        ],
        "how_to/gpu_and_cluster.md": [(r"K = 8 folds; one GPU / each of 8 \| ([\d.]+) /", adapter)],
    }
    for page, rows in said.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        for pattern, bytes_of_formula in rows:
            assert [float(figure) for figure in re.findall(pattern, text)] == [
                pytest.approx(bytes_of_formula, rel=0.05)
            ], page


def test_contributing_names_files_and_functions_that_exist() -> None:
    """Files as they are written there, from the root or from any folder; names in a sentence's code."""
    root, text = DOCS.parent, (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = [path for path in root.iterdir() if f"{path.name}/" in text and ".venv" not in path.name]
    files = [*root.glob("*.*"), root / "Makefile", *(path for folder in folders for path in folder.rglob("*.*"))]
    paths = [f"/{path.relative_to(root).as_posix()}" for path in files]
    named = {name for name in re.findall(r"[\w./]*\w\.(?:py|yaml|txt)\b", text) if "NAME" not in name}
    assert len(named) > 80
    assert {name for name in named if not any(path.endswith(f"/{name.lstrip('/')}") for path in paths)} == set()
    read = [path for path in files if path.suffix in (".py", ".yaml", ".cfg") or path.name == "Makefile"]
    sources = "".join(path.read_text(encoding="utf-8") for path in read)
    assert {name for name in re.findall(r"`([a-z_A-Z]+)`", text) if name not in sources} == set()


def test_pages_name_the_python_versions_of_setup_cfg() -> None:
    setup = (DOCS.parent / "setup.cfg").read_text(encoding="utf-8")
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", setup)
    assert f"python_requires = >={versions[0]}" in setup
    pages = [DOCS.parent / "README.md", *(DOCS / "how_to").glob("*.md"), *(DOCS / "reference").glob("*.md")]
    said = {
        page.name: set(re.findall(r"Python [≥\d][^,;.]*(?:\.\d+[^,;.]*)*", page.read_text("utf-8"))) for page in pages
    }
    texts_by_name = {name: texts for name, texts in said.items() if texts}
    assert texts_by_name.keys() >= {"README.md", "install.md", "rent_a_gpu.md"}
    assert set().union(*texts_by_name.values()) == {f"Python {' or '.join(versions)}"}


def test_training_with_probes_is_bitwise_attach_without_probes(tmp_path: Path) -> None:
    """The README, the tutorial and attach's docstring say so. Compared with TRL alone it differs by rounding."""
    plain: dict[str, Any] = {"trainer_class": GRPOTrainer, "use_cpu": True, "bf16": False, **FEW, "max_steps": 1}
    plain |= {"gradient_accumulation_steps": 4}
    weights = {}
    for name, probes in {"alone": None, "none": [], "probes": [SimpleEntropyProbe()]}.items():
        trainer = trainer_maker(tmp_path / name)(**plain)
        with contextlib.nullcontext() if probes is None else attach(trainer, probes=probes):
            trainer.train()
        weights[name] = trained_weights(trainer)
    assert weights["probes"].equal(weights["none"])
    assert not weights["alone"].equal(weights["none"])
    assert float((weights["alone"] - weights["none"]).norm() / weights["alone"].norm()) < 1e-6


def tables_with_half_widths(page: Path) -> list[str]:
    """Return each table that has ±, with what says how to read it: the page's opening and the table's own section."""
    lines = page.read_text(encoding="utf-8").splitlines()
    headings = [number for number, line in enumerate(lines) if line.startswith("#")]
    opening = "\n".join(lines[: headings[1] if len(headings) > 1 else len(lines)])
    found, start = [], None
    for number, line in enumerate([*lines, ""]):
        if line.startswith("|") and start is None:
            start = number
        elif not line.startswith("|") and start is not None:
            table = "\n".join(lines[start:number])
            section = max((heading for heading in headings if heading < start), default=0)
            if "±" in table:
                found.append("\n".join([opening, *lines[section:start], table]))
            start = None
    return found


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md", DOCS.parent / "benchmarks" / "README.md"], ids=str
)
def test_every_table_with_half_widths_says_that_they_are_of_95_percent_intervals(page: Path) -> None:
    for table in tables_with_half_widths(page):
        assert re.search(r"(±|half)[^|]{0,40}95 %|95 % (intervals?|everywhere)|± (is\n)?95 %", table), table[-300:]
