"""Claims on gradients kept beside training: flat vectors are rows of a matrix, the tap sees a microbatch's own mean."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rl_training.engine.gradient_rows import GradientRows
from rl_training.mathematics.scores import Scores
from rl_training.mathematics.vectors import CHUNK, FlatVectors
from rl_training.engine.loss_weights import LossWeights
from rl_training.step.slices import fill_slices

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


def train_step(model: nn.Module, tap: GradientTap, batches: list[Tensor]) -> None:
    """What a trainer does: each microbatch's loss over their number, backwards, into `.grad`."""
    tap.start_step(range(len(batches)), len(batches))
    for k, tokens in enumerate(batches):
        loss = model(tokens) / len(batches)
        tap.arm(k)
        loss.backward()
        tap.disarm()


@pytest.fixture
def model() -> TiedModel:
    return TiedModel()


@pytest.fixture
def tap(model: TiedModel) -> GradientTap:
    return GradientTap(dict(model.named_parameters()))


# --- flat vectors ---------------------------------------------------------------------------------------------------

SHAPES = {"matrix": (2, 3), "scalar": (), "vector": (4,), "cube": (2, 1, 2)}


def named(dtype: torch.dtype, seed: int = 0, rows: tuple[int, ...] = ()) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((*rows, *shape), generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def filled(dtype: torch.dtype, num_rows: int = 5) -> tuple[FlatVectors, dict[str, Tensor]]:
    """Returns a buffer and what was written through its views, a row each."""
    buffer = FlatVectors(named(dtype), num_rows)
    rows = named(buffer.matrix.dtype, seed=1, rows=(num_rows,))
    for name, values in rows.items():
        buffer.view(name).copy_(values)
    return buffer, rows


def flat(vectors: dict[str, Tensor], row: int | None = None) -> list[float]:
    """Returns all entries as one list, or those of one row."""
    own = [values if row is None else values[row] for values in vectors.values()]
    return [x for values in own for x in values.double().reshape(-1).tolist()]


def test_buffer_is_zero_at_first_and_holds_nothing_else() -> None:
    buffer = FlatVectors(named(torch.float32), 3)
    assert buffer.matrix.shape == (3, 6 + 1 + 4 + 4)
    assert not buffer.matrix.any()
    assert (buffer.num_rows, buffer.num_bytes) == (3, 3 * 15 * 4)


def test_view_writes_through_and_every_entry_has_its_own_place() -> None:
    buffer, rows = filled(torch.float64)
    for row in range(buffer.num_rows):
        assert buffer.matrix[row].tolist() == flat(rows, row)
    for name, shape in SHAPES.items():
        assert buffer.view(name).shape == (5, *shape)
        assert buffer.view(name).untyped_storage().data_ptr() == buffer.matrix.untyped_storage().data_ptr()
    buffer.matrix.zero_()
    assert not any(buffer.view(name).any() for name in SHAPES)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_buffer_is_at_least_fp32(dtype: torch.dtype, kept: torch.dtype) -> None:
    assert FlatVectors(named(dtype), 1).matrix.dtype == kept


def test_flatten_is_the_row_that_the_views_would_make() -> None:
    buffer, rows = filled(torch.float32)
    third = {name: values[2] for name, values in rows.items()}
    assert torch.equal(buffer.flatten(third.values()), buffer.matrix[2])
    half = buffer.flatten(values.bfloat16() for values in third.values())
    assert half.dtype == torch.float32
    assert half.tolist() == flat({name: values.bfloat16() for name, values in third.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dots_and_square_norms_are_those_of_the_flat_vectors_in_float64(dtype: torch.dtype) -> None:
    """The tolerance of an inner product is relative to Σ|x||y|: what its terms, not their sum, can be rounded to."""
    buffer, rows = filled(dtype)
    vectors = [named(dtype, seed) for seed in (2, 3, 4)]
    products, norms = buffer.dot(torch.stack([buffer.flatten(v.values()) for v in vectors])), buffer.sq_norms()
    assert products.shape == (5, 3)
    assert products.dtype == norms.dtype == torch.float64
    tolerance = 4 * torch.finfo(buffer.matrix.dtype).eps
    for row in range(buffer.num_rows):
        assert float(norms[row]) == pytest.approx(sum(x * x for x in flat(rows, row)), rel=tolerance)
        for q, vector in enumerate(vectors):
            terms = [a * b for a, b in zip(flat(rows, row), flat(vector), strict=True)]
            assert float(products[row, q]) == pytest.approx(sum(terms), abs=tolerance * sum(map(abs, terms)))


def test_sums_over_more_columns_than_one_chunk_keep_what_fp32_would_lose() -> None:
    """4096² = 2²⁴ in the first chunk, 1000 times 2⁻²⁰ in the second: together not a number of fp32."""
    buffer = FlatVectors({"first": torch.zeros(CHUNK), "second": torch.zeros(1000)}, 2)
    buffer.view("first")[1, 7] = 4096.0
    buffer.view("second")[1] = 2.0**-10
    square = 2.0**24 + 1000 * 2.0**-20
    assert buffer.sq_norms().tolist() == [0.0, square]
    assert buffer.dot(buffer.matrix).tolist() == [[0.0, 0.0], [0.0, square]]


def test_buffer_without_a_parameter_raises() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        FlatVectors({}, 2)


# --- the tap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4])
def test_rows_are_the_mean_gradients_of_the_microbatches(
    model: TiedModel, tap: GradientTap, num_microbatches: int
) -> None:
    """Bit for bit where K is a power of two, since then dividing the loss by K rounds nothing."""
    batches = microbatches(num_microbatches)
    train_step(model, tap, batches)
    assert tap.fold_gradients is not None
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            got = tap.fold_gradients.view(name)[k]
            if num_microbatches == 3:
                torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(got, gradient), name


def test_mean_of_the_rows_is_the_gradient_that_the_optimizer_gets(model: TiedModel, tap: GradientTap) -> None:
    train_step(model, tap, microbatches(3))
    for name, p in model.named_parameters():
        torch.testing.assert_close(tap.fold_gradients.view(name).mean(dim=0), p.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reentrant", [True, False])
def test_rows_are_the_same_under_gradient_checkpointing(reentrant: bool) -> None:
    """The tied weight is used inside the checkpointed part and before it: its gradient may arrive in two pieces."""
    model, batches = TiedModel(reentrant=reentrant), microbatches(4)
    tap = GradientTap(dict(model.named_parameters()))
    train_step(model, tap, batches)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            torch.testing.assert_close(tap.fold_gradients.view(name)[k], gradient, rtol=1e-12, atol=1e-14)


def test_rows_of_a_bf16_model_are_fp32_and_not_rounded_on_the_way() -> None:
    model, batches = TiedModel(torch.bfloat16), microbatches(4)
    tap = GradientTap(dict(model.named_parameters()))
    train_step(model, tap, batches)
    assert tap.fold_gradients.matrix.dtype == torch.float32
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(torch.bfloat16), tokens).items():
            assert torch.equal(tap.fold_gradients.view(name)[k], gradient.float()), name


def test_each_step_begins_with_empty_rows_of_its_own_number(model: TiedModel, tap: GradientTap) -> None:
    for seed, count in enumerate((4, 4, 2)):
        batches = microbatches(count, seed)
        train_step(model, tap, batches)
        assert tap.fold_gradients.num_rows == count
        for name, gradient in own_gradient(TiedModel(), batches[-1]).items():
            assert torch.equal(tap.fold_gradients.view(name)[-1], gradient), name


def test_backward_of_a_probe_between_microbatches_adds_nothing(model: TiedModel, tap: GradientTap) -> None:
    batches, parameters = microbatches(2), list(model.parameters())
    tap.start_step(range(2), 2)
    for k, tokens in enumerate(batches):
        loss = model(tokens) / 2
        torch.autograd.grad(model(microbatches(1, seed=9)[0]), parameters)
        tap.arm(k)
        loss.backward()
        tap.disarm()
        torch.autograd.grad(model(microbatches(1, seed=8)[0]), parameters)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            assert torch.equal(tap.fold_gradients.view(name)[k], gradient), name


def test_tap_that_is_not_armed_keeps_nothing(model: TiedModel, tap: GradientTap) -> None:
    tokens = microbatches(1)[0]
    model(tokens).backward()
    assert tap.fold_gradients is None
    tap.start_step(range(1), 1)
    model(tokens).backward()
    assert not tap.fold_gradients.matrix.any()


def test_tap_changes_no_gradient(model: TiedModel, tap: GradientTap) -> None:
    batches, untapped = microbatches(3), TiedModel()
    train_step(model, tap, batches)
    for tokens in batches:
        (untapped(tokens) / 3).backward()
    for tapped, plain in zip(model.parameters(), untapped.parameters(), strict=True):
        assert torch.equal(tapped.grad, plain.grad)


def test_disarmed_tap_leaves_no_hook(model: TiedModel, tap: GradientTap) -> None:
    tap.start_step(range(2), 2)
    for k in range(2):
        tap.arm(k)
        assert all(p._backward_hooks for p in model.parameters())
        tap.disarm()
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    tap.disarm()
    model(microbatches(1)[0]).backward()
    assert not tap.fold_gradients.matrix.any()


@pytest.mark.parametrize(("device", "lies_on"), [(None, "cuda"), ("cpu", "cpu")])
def test_rows_lie_in_host_memory_if_asked_and_answer_where_the_parameters_are(device: str | None, lies_on: str) -> None:
    """On fake tensors, which know a device and have none: an operation on tensors of two devices raises as on a GPU."""
    with FakeTensorMode(), torch.no_grad():
        parameters = {"w": torch.zeros(2, 3, device="cuda"), "b": torch.zeros(3, device="cuda")}
        rows = FlatVectors(parameters, num_rows=4, device=device)
        vectors = torch.zeros(2, 9, device="cuda")
        assert rows.matrix.device.type == lies_on
        assert rows.flatten(parameters.values()).device.type == lies_on
        assert rows.dot(vectors).device.type == "cuda"
        assert rows.sq_norms().device.type == "cuda"


def test_slices_of_a_microbatch_get_their_own_mean_gradients_whatever_their_sizes() -> None:
    """log p of row i is f_i · w, the loss Σ c_i log p_i: fold k has the gradient (N/n_k) Σ c_i f_i over its rows."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(16, 1, generator=generator, dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    folds = [range(0, 2), range(2, 6), range(6, 10), range(10, 16)]  # three slices of a microbatch, and a whole one
    expected = torch.stack([16 / len(rows) * (weights * features)[list(rows)].sum(dim=0) for rows in folds])
    buffer = FlatVectors({"w": w}, num_rows=4)
    buffer.matrix[0] = 16 / 10 * (weights * features)[:10].sum(dim=0)  # as the backward of training leaves it
    buffer.matrix[3] = expected[3]

    def score(rows: Tensor) -> Scores:
        logps = (features[rows] @ w).unsqueeze(1)
        return Scores(logps, torch.zeros_like(logps), torch.ones_like(logps))

    fill_slices(buffer, {"w": w}, folds, [range(0, 10), range(10, 16)], LossWeights(weights, None), score)
    torch.testing.assert_close(buffer.matrix, expected, rtol=1e-12, atol=0)


# --- two processes ----------------------------------------------------------------------------------------------------

DDP_MICROBATCHES = 4


def ddp_worker(rank: int, folder: str) -> None:
    """Trains one step under DDP as a trainer does and writes what the tap saw and what the optimizer would get."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    model = TiedModel()
    ddp = DistributedDataParallel(model)
    tap = GradientTap(dict(model.named_parameters()))
    tap.start_step(range(DDP_MICROBATCHES), DDP_MICROBATCHES)
    batches = microbatches(DDP_MICROBATCHES, seed=100 + rank)
    for k, tokens in enumerate(batches):
        ddp.require_backward_grad_sync = k == DDP_MICROBATCHES - 1  # as no_sync does on all but the last
        loss = ddp(tokens) / DDP_MICROBATCHES
        torch.autograd.grad(model(batches[0]), list(model.parameters()))  # a probe's, outside the reducer
        tap.arm(k)
        loss.backward()
        tap.disarm()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    torch.save(({name: tap.fold_gradients.view(name) for name in gradient}, gradient), f"{folder}/rank{rank}.pt")
    dist.barrier()
    os._exit(0)  # no teardown: freeing DDP's gloo group holds the GIL and waits for a thread that may want it


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(rows of the tap, .grad) by parameter name, of each rank of a DDP step."""
    folder: Path = tmp_path_factory.mktemp("ddp")
    warm.start_ranks(ddp_worker, (str(folder),), NUM_RANKS)
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
    """Why the tap exists: after the last backward `.grad` is averaged over ranks, what was in it before included."""
    rows, gradient = ranks[0]
    difference = DDP_MICROBATCHES * gradient["embed.weight"] - rows["embed.weight"][:-1].sum(dim=0)
    assert (difference - rows["embed.weight"][-1]).norm() > 0.1 * rows["embed.weight"][-1].norm()
