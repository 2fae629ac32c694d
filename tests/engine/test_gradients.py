"""Claims on gradients kept beside training: vectors lie in buckets, and rows are a microbatch's own mean gradient."""

import os
from datetime import timedelta
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rl_training.engine.gradient_rows import GradientRows
from rl_training.engine.loss_weights import LossWeights
from rl_training.mathematics import vectors
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import CHUNK, Layout, add, dot, num_bytes, rows_dot

VOCABULARY, WIDTH = 11, 4
NUM_RANKS = 2


class TiedModel(nn.Module):
    """A next-token model whose embedding is also its head, so that one parameter is used twice in a forward."""

    def __init__(self, dtype: torch.dtype = torch.float64, reentrant: bool | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant  # how the middle is checkpointed; None: not at all
        self.to(dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def middle(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + torch.tanh(self.mix(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the mean next-token loss of these sequences."""
        x = self.embed(tokens[:, :-1])
        logits = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def microbatches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(VOCABULARY, (count, 3, 6), generator=generator))


def own_gradient(model: TiedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Returns the gradient of the mean loss of one microbatch, which no tap has seen."""
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(model(tokens), list(parameters.values())), strict=True))


def rows_of(model: nn.Module, **options: bool) -> GradientRows:
    parameters = dict(model.named_parameters())
    return GradientRows(parameters, Layout(parameters), **options)


def kept(rows: GradientRows) -> dict[str, Tensor]:
    """Returns what is kept, (K, *shape) by parameter."""
    assert rows.rows is not None
    shapes = {name: p.shape for name, p in rows._parameters.items()}
    return {name: part.view(-1, *shapes[name]) for name, part in rows.layout.by_name(rows.rows).items()}


def train_step(model: nn.Module, rows: GradientRows, batches: list[Tensor]) -> None:
    """What a trainer does: each microbatch's loss over their number, backwards, into `.grad`."""
    rows.start_step(range(len(batches)), len(batches))
    for k, tokens in enumerate(batches):
        loss = model(tokens) / len(batches)
        rows.arm(k)
        loss.backward()
        rows.disarm()


@pytest.fixture
def model() -> TiedModel:
    return TiedModel()


@pytest.fixture
def rows(model: TiedModel) -> GradientRows:
    return rows_of(model)


# --- vectors ----------------------------------------------------------------------------------------------------------

SHAPES = {"matrix": (2, 3), "scalar": (), "vector": (4,), "cube": (2, 1, 2)}


def named(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def flat(tensors: dict[str, Tensor]) -> list[float]:
    """Returns all entries as one list."""
    return [x for values in tensors.values() for x in values.double().reshape(-1).tolist()]


@pytest.fixture(params=[1, 8, 100], ids=["each alone", "two and two", "all in one"])
def joined(request, monkeypatch) -> int:
    """How many entries a bucket of several parameters has at most."""
    monkeypatch.setattr(vectors, "JOINED", request.param)
    return request.param


def test_buckets_hold_every_parameter_once_and_in_order(joined: int) -> None:
    tensors = named(torch.float64)
    layout = Layout(tensors)
    vector = layout.vector(tensors.values())
    assert [len(bucket.names) for bucket in layout.buckets] == {1: [1, 1, 1, 1], 8: [2, 2], 100: [4]}[joined]
    assert torch.cat(vector).tolist() == flat(tensors)
    assert [bucket.start for bucket in layout.buckets] == {1: [0, 6, 7, 11], 8: [0, 7], 100: [0]}[joined]
    assert {name: part.tolist() for name, part in layout.by_name(vector).items()} == {
        name: values.reshape(-1).tolist() for name, values in tensors.items()
    }
    assert all(torch.equal(part, own) for part, own in zip(layout.split(torch.cat(vector)), vector, strict=True))


def test_writing_to_a_parameters_part_writes_to_the_vector(joined: int) -> None:
    layout = Layout(named(torch.float32))
    rows = layout.zeros(3)
    layout.by_name(rows)["vector"][1] = torch.arange(4.0)
    assert torch.cat(rows, dim=1)[1].tolist() == [0.0] * 7 + [0.0, 1.0, 2.0, 3.0] + [0.0] * 4
    assert num_bytes(rows) == 3 * 15 * 4


def test_a_large_parameter_alone_in_its_bucket_is_not_copied(monkeypatch) -> None:
    monkeypatch.setattr(vectors, "JOINED", 5)
    tensors = named(torch.float32)
    (matrix, *_) = Layout(tensors).vector(tensors.values())
    assert matrix.data_ptr() == tensors["matrix"].data_ptr()


@pytest.mark.parametrize(
    ("dtype", "kept_in"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_vectors_are_at_least_fp32(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    tensors = named(dtype)
    layout = Layout(tensors)
    assert {part.dtype for part in (*layout.vector(tensors.values()), *layout.zeros())} == {kept_in}
    assert torch.cat(layout.vector(tensors.values())).double().tolist() == flat(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dots_are_those_of_the_flat_vectors_in_float64(dtype: torch.dtype, joined: int) -> None:
    """The tolerance of an inner product is relative to Σ|x||y|: what its terms, not their sum, can be rounded to."""
    one, other = named(dtype), named(dtype, seed=1)
    layout = Layout(one)
    found = dot(layout.vector(one.values()), layout.vector(other.values()))
    terms = [a * b for a, b in zip(flat(one), flat(other), strict=True)]
    assert found.dtype == torch.float64
    tolerance = 4 * torch.finfo(dtype).eps
    assert float(found) == pytest.approx(sum(terms), abs=tolerance * sum(map(abs, terms)))
    total = layout.vector(one.values())
    total = [part.clone() for part in total]
    add(total, layout.vector(other.values()), -2.0)
    expected = [a - 2 * b for a, b in zip(flat(one), flat(other), strict=True)]
    assert torch.cat(total).double().tolist() == pytest.approx(expected, rel=1e-5)


def test_sums_over_more_entries_than_one_chunk_keep_what_fp32_would_lose() -> None:
    """4096² = 2²⁴ in the first chunk, 1000 times 2⁻²⁰ in the second: together not a number of fp32."""
    vector = torch.zeros(CHUNK + 1000)
    vector[7] = 4096.0
    vector[CHUNK:] = 2.0**-10
    square = 2.0**24 + 1000 * 2.0**-20
    assert float(dot([vector], [vector])) == square
    assert rows_dot(torch.stack([vector, 0 * vector]), vector).tolist() == [square, 0.0]


def test_a_layout_without_a_parameter_raises() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        Layout({})


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4])
def test_rows_are_the_mean_gradients_of_the_microbatches(
    model: TiedModel, rows: GradientRows, num_microbatches: int
) -> None:
    """Bit for bit where K is a power of two, since then dividing the loss by K rounds nothing."""
    batches = microbatches(num_microbatches)
    train_step(model, rows, batches)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            got = kept(rows)[name][k]
            if num_microbatches == 3:
                torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(got, gradient), name


def test_mean_of_the_rows_is_the_gradient_that_the_optimizer_gets(model: TiedModel, rows: GradientRows) -> None:
    train_step(model, rows, microbatches(3))
    for name, p in model.named_parameters():
        torch.testing.assert_close(kept(rows)[name].mean(dim=0), p.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reentrant", [True, False])
def test_rows_are_the_same_under_gradient_checkpointing(reentrant: bool) -> None:
    """The tied weight is used inside the checkpointed part and before it: its gradient may arrive in two pieces."""
    model, batches = TiedModel(reentrant=reentrant), microbatches(4)
    rows = rows_of(model)
    train_step(model, rows, batches)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            torch.testing.assert_close(kept(rows)[name][k], gradient, rtol=1e-12, atol=1e-14)


def test_rows_of_a_bf16_model_are_fp32_and_not_rounded_on_the_way() -> None:
    model, batches = TiedModel(torch.bfloat16), microbatches(4)
    rows = rows_of(model)
    train_step(model, rows, batches)
    assert {part.dtype for part in rows.rows} == {torch.float32}
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(torch.bfloat16), tokens).items():
            assert torch.equal(kept(rows)[name][k], gradient.float()), name


def test_each_step_begins_with_empty_rows_of_its_own_number(model: TiedModel, rows: GradientRows) -> None:
    for seed, count in enumerate((4, 4, 2)):
        batches = microbatches(count, seed)
        train_step(model, rows, batches)
        assert {len(part) for part in rows.rows} == {count}
        for name, gradient in own_gradient(TiedModel(), batches[-1]).items():
            assert torch.equal(kept(rows)[name][-1], gradient), name


def test_backward_of_a_probe_between_microbatches_adds_nothing(model: TiedModel, rows: GradientRows) -> None:
    batches, parameters = microbatches(2), list(model.parameters())
    rows.start_step(range(2), 2)
    for k, tokens in enumerate(batches):
        loss = model(tokens) / 2
        torch.autograd.grad(model(microbatches(1, seed=9)[0]), parameters)
        rows.arm(k)
        loss.backward()
        rows.disarm()
        torch.autograd.grad(model(microbatches(1, seed=8)[0]), parameters)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            assert torch.equal(kept(rows)[name][k], gradient), name


def test_rows_that_are_not_armed_keep_nothing(model: TiedModel, rows: GradientRows) -> None:
    tokens = microbatches(1)[0]
    model(tokens).backward()
    assert rows.rows is None
    rows.start_step(range(1), 1)
    model(tokens).backward()
    assert not any(part.any() for part in rows.rows)


def test_rows_change_no_gradient(model: TiedModel, rows: GradientRows) -> None:
    batches, untouched = microbatches(3), TiedModel()
    train_step(model, rows, batches)
    for tokens in batches:
        (untouched(tokens) / 3).backward()
    for watched, plain in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(watched.grad, plain.grad)


def test_disarmed_rows_leave_no_hook(model: TiedModel, rows: GradientRows) -> None:
    rows.start_step(range(2), 2)
    for k in range(2):
        rows.arm(k)
        assert all(p._backward_hooks for p in model.parameters())
        rows.disarm()
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    rows.disarm()
    model(microbatches(1)[0]).backward()
    assert not any(part.any() for part in rows.rows)


def test_microbatches_of_unlike_sizes_have_rows_and_norms_of_their_own_mean(model: TiedModel) -> None:
    """Of 1, 2 and 3 sequences, the first two in one row: the loss of all six is a mean over them."""
    rows, sizes = rows_of(model, keep_sq_norms=True), [1, 2, 3]
    batches = torch.cat(microbatches(2)).split(sizes)
    rows.start_step([0, 0, 1], 2, sizes=sizes)
    for k, tokens in enumerate(batches):
        rows.arm(k)
        (model(tokens) * len(tokens) / sum(sizes)).backward()
        rows.disarm()
    both = own_gradient(TiedModel(), torch.cat(batches[:2])), own_gradient(TiedModel(), batches[2])
    norms = [own_gradient(TiedModel(), tokens) for tokens in batches]
    assert rows.sq_norms is not None
    for number, name in enumerate(both[0]):
        torch.testing.assert_close(kept(rows)[name], torch.stack([own[name] for own in both]))
        torch.testing.assert_close(
            rows.sq_norms[:, number, 0], torch.stack([own[name].square().sum() for own in norms])
        )


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_rows_are_the_rows_in_host_memory(model: TiedModel, offload: bool) -> None:
    """Two microbatches to a row: it is collected beside the parameters, and copied once it is complete."""
    rows, batches = rows_of(model, offload=offload), microbatches(4)
    rows.start_step([0, 0, 1, 1], 2)
    for k, tokens in enumerate(batches):
        rows.arm(k)
        (model(tokens) / 4).backward()
        rows.disarm()
    rows.collect()
    for row, pair in enumerate((batches[:2], batches[2:])):
        own = [own_gradient(TiedModel(), tokens) for tokens in pair]
        for name in own[0]:
            torch.testing.assert_close(kept(rows)[name][row], (own[0][name] + own[1][name]) / 2)


@pytest.mark.parametrize(("offload", "lies_on"), [(False, "cuda"), (True, "cpu")])
def test_rows_lie_in_host_memory_if_asked(offload: bool, lies_on: str, monkeypatch) -> None:
    """On fake tensors, which know a device and have none: an operation on tensors of two devices raises as on a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    with FakeTensorMode(), torch.no_grad():
        parameters = {"w": nn.Parameter(torch.zeros(2, 3, device="cuda"))}
        rows = GradientRows(parameters, Layout(parameters), offload=offload)
        rows.start_step([0, 1], 2)
        assert {part.device.type for part in rows.rows} == {lies_on}
        if offload:
            assert rows._target(0)[0].device.type == "cuda"
            rows.collect()


def test_nothing_is_held_between_release_and_the_next_step(model: TiedModel, rows: GradientRows) -> None:
    train_step(model, rows, microbatches(2))
    held = rows.num_bytes
    rows.release()
    assert held == 2 * sum(p.numel() * 8 for p in model.parameters())
    assert rows.num_bytes == 0
    assert rows.rows is None


def test_slices_of_a_microbatch_get_their_own_mean_gradients_whatever_their_sizes() -> None:
    """log p of row i is f_i · w, the loss Σ c_i log p_i: fold k has the gradient (N/n_k) Σ c_i f_i over its rows."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(16, 1, generator=generator, dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    folds = [range(0, 2), range(2, 6), range(6, 10), range(10, 16)]  # three slices of a microbatch, and a whole one
    expected = torch.stack([16 / len(rows) * (weights * features)[list(rows)].sum(dim=0) for rows in folds])
    caught = GradientRows({"w": w}, Layout({"w": w}))
    caught.start_step([0, 3], 4)
    caught.rows[0][0] = 16 / 10 * (weights * features)[:10].sum(dim=0)  # as the backward of training leaves it
    caught.rows[0][3] = expected[3]

    def score(rows: Tensor) -> Scores:
        logps = (features[rows] @ w).unsqueeze(1)
        return Scores(logps, torch.zeros_like(logps), torch.ones_like(logps))

    caught.fill_slices(folds, [range(0, 10), range(10, 16)], LossWeights(weights, None), score)
    torch.testing.assert_close(caught.rows[0], expected, rtol=1e-12, atol=0)


# --- two processes ----------------------------------------------------------------------------------------------------

DDP_MICROBATCHES = 4


def ddp_worker(rank: int, folder: str) -> None:
    """Trains one step under DDP as a trainer does and writes what the rows hold and what the optimizer would get."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    model = TiedModel()
    ddp = DistributedDataParallel(model)
    rows = rows_of(model)
    rows.start_step(range(DDP_MICROBATCHES), DDP_MICROBATCHES)
    batches = microbatches(DDP_MICROBATCHES, seed=100 + rank)
    for k, tokens in enumerate(batches):
        ddp.require_backward_grad_sync = k == DDP_MICROBATCHES - 1  # as no_sync does on all but the last
        loss = ddp(tokens) / DDP_MICROBATCHES
        torch.autograd.grad(model(batches[0]), list(model.parameters()))  # a probe's, outside the reducer
        rows.arm(k)
        loss.backward()
        rows.disarm()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    torch.save((kept(rows), gradient), f"{folder}/rank{rank}.pt")
    dist.barrier()
    os._exit(0)  # no teardown: freeing DDP's gloo group holds the GIL and waits for a thread that may want it


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(rows, .grad) by parameter name, of each rank of a DDP step."""
    folder: Path = tmp_path_factory.mktemp("ddp")
    forks.start_ranks(ddp_worker, (str(folder),), NUM_RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


def test_under_ddp_rows_are_the_ranks_own_gradients_the_last_microbatch_included(ranks) -> None:
    for rank, (rows, _) in enumerate(ranks):
        for k, tokens in enumerate(microbatches(DDP_MICROBATCHES, seed=100 + rank)):
            for name, gradient in own_gradient(TiedModel(), tokens).items():
                torch.testing.assert_close(rows[name][k], gradient, rtol=1e-12, atol=1e-14)


def test_under_ddp_the_mean_over_ranks_and_rows_is_the_gradient_that_every_optimizer_gets(ranks) -> None:
    for name in ranks[0][1]:
        mean = torch.stack([rows[name].mean(dim=0) for rows, _ in ranks]).mean(dim=0)
        for _, gradient in ranks:
            torch.testing.assert_close(mean, gradient[name], rtol=1e-12, atol=1e-14)


def test_under_ddp_differences_of_grad_would_not_be_the_last_microbatchs_gradient(ranks) -> None:
    """Why there are hooks: after the last backward `.grad` is averaged over ranks, what was in it before included."""
    rows, gradient = ranks[0]
    difference = DDP_MICROBATCHES * gradient["embed.weight"] - rows["embed.weight"][:-1].sum(dim=0)
    assert (difference - rows["embed.weight"][-1]).norm() > 0.1 * rows["embed.weight"][-1].norm()
