"""Claims on gradients kept during training: vectors are stored in buckets, by fold as the mean gradient of each."""

import itertools
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from example_steps import ALONE
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from rl_training.engine.fold_recorder import FoldRecorder
from rl_training.engine.gradient_check import gradient_mismatch
from rl_training.parallel import vectors
from rl_training.parallel.fold_vectors import FoldVectors, adding_to
from rl_training.parallel.sharding import Shard
from rl_training.parallel.sums import dots, sums_of_spans
from rl_training.parallel.vectors import Layout, dot, num_bytes
from rl_training.step.fold_reduction import FoldReduction
from rl_training.step.folds import FoldGroup, ranges_of

VOCABULARY, WIDTH = 11, 4


class TiedModel(nn.Module):
    """A next-token model whose embedding is also its head, so a forward uses one parameter twice."""

    def __init__(self, dtype: torch.dtype = torch.float64, reentrant: bool | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant  # how the middle is checkpointed; None means not at all
        self.to(dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def middle(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + torch.tanh(self.mix(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean next-token loss of these sequences."""
        x = self.embed(tokens[:, :-1])
        logits = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def microbatches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(VOCABULARY, (count, 3, 6), generator=generator))


def own_gradient(model: TiedModel, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradient of one microbatch's mean loss, flat by parameter, computed without hooks."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(tokens), list(parameters.values()))
    return {name: gradient.flatten() for name, gradient in zip(parameters, gradients, strict=True)}


def shard_of(model: nn.Module, kind: type[Shard] = Shard) -> Shard:
    return kind(model, torch.optim.SGD(model.parameters()), None)


def recorder_of(model: nn.Module, **options: Any) -> FoldRecorder:
    return FoldRecorder(FoldReduction(shard_of(model)), **options)


def folds_of(*sizes: list[int]) -> list[FoldGroup]:
    """Return the folds of one process, with microbatches of these sizes."""
    passes = iter(ranges_of(list(itertools.chain(*sizes))))
    return [FoldGroup(range(k, k + 1), (0,), tuple(next(passes) for _ in fold)) for k, fold in enumerate(sizes)]


def kept_by_name(recorder: FoldRecorder) -> dict[str, Tensor]:
    """Return the kept vectors by parameter, (K, n)."""
    assert recorder.by_fold is not None
    return recorder.layout.by_name(recorder.by_fold.means())


def mean_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the mean gradient that the optimizer gets."""
    return {
        name: torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
        for name, p in model.named_parameters()
    }


def catch(recorder: FoldRecorder, first_row: int, loss: Tensor) -> None:
    recorder.arm(first_row)
    loss.backward()
    recorder.reduction.finish()


def train_step(model: nn.Module, recorder: FoldRecorder, batches: list[Tensor]) -> None:
    """Run backward as a trainer does: each microbatch's loss divided by their number. Each microbatch is a fold."""
    count = len(batches)
    recorder.start_step(folds_of(*[[3]] * count))
    for k, tokens in enumerate(batches):
        catch(recorder, 3 * k, model(tokens) / count)
    recorder.complete(torch.full((count,), 3.0, dtype=torch.float64), mean_of(model), ALONE)


@pytest.fixture
def model() -> TiedModel:
    return TiedModel()


@pytest.fixture
def recorder(model: TiedModel) -> FoldRecorder:
    return recorder_of(model)


# --- vectors ----------------------------------------------------------------------------------------------------------

SHAPES = {"matrix": (2, 3), "scalar": (), "vector": (4,), "cube": (2, 1, 2)}


def named(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def flat(tensors: dict[str, Tensor]) -> list[float]:
    """Return all entries as one list."""
    return [x for values in tensors.values() for x in values.double().reshape(-1).tolist()]


@pytest.fixture(params=[1, 8, 100], ids=["each alone", "two and two", "all in one"])
def joined(request, monkeypatch) -> int:
    """Set the maximum number of entries in a bucket with several parameters."""
    monkeypatch.setattr(vectors, "CHUNK_SIZE_CPU", request.param)
    return request.param


def test_buckets_hold_every_parameter_once_and_in_order(joined: int) -> None:
    tensors = named(torch.float64)
    layout = Layout.of(tensors)
    vector = layout.vector(tensors.values())
    assert [len(bucket.names) for bucket in layout.buckets] == {1: [1, 1, 1, 1], 8: [2, 2], 100: [4]}[joined]
    assert torch.cat(vector).tolist() == flat(tensors)
    assert {name: part.tolist() for name, part in layout.by_name(vector).items()} == {
        name: values.reshape(-1).tolist() for name, values in tensors.items()
    }
    assert all(torch.equal(part, bucket) for part, bucket in zip(layout.split(torch.cat(vector)), vector, strict=True))


def test_writing_to_the_view_of_a_parameter_writes_to_the_vector(joined: int) -> None:
    layout = Layout.of(named(torch.float32))
    by_fold = layout.zeros(3)
    layout.by_name(by_fold)["vector"][1] = torch.arange(4.0)
    assert torch.cat(by_fold, dim=1)[1].tolist() == [0.0] * 7 + [0.0, 1.0, 2.0, 3.0] + [0.0] * 4
    assert num_bytes(by_fold) == 3 * 15 * 4


def test_a_large_parameter_with_its_own_bucket_is_not_copied(monkeypatch) -> None:
    monkeypatch.setattr(vectors, "CHUNK_SIZE_CPU", 5)
    tensors = named(torch.float32)
    (matrix, *_) = Layout.of(tensors).vector(tensors.values())
    assert matrix.data_ptr() == tensors["matrix"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_vectors_are_at_least_fp32(dtype: torch.dtype) -> None:
    tensors, kept_in = named(dtype), torch.promote_types(dtype, torch.float32)
    layout = Layout.of(tensors)
    assert {part.dtype for part in (*layout.vector(tensors.values()), *layout.zeros())} == {kept_in}
    assert torch.cat(layout.vector(tensors.values())).double().tolist() == flat(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dot_products_equal_those_of_the_flat_vectors_in_float64(dtype: torch.dtype, joined: int) -> None:
    """The tolerance is relative to Σ|x||y|, because rounding depends on the terms and not on their sum."""
    a_by_name, b_by_name = named(dtype), named(dtype, seed=1)
    layout = Layout.of(a_by_name)
    product = dot(layout.vector(a_by_name.values()), layout.vector(b_by_name.values()))
    terms = [a * b for a, b in zip(flat(a_by_name), flat(b_by_name), strict=True)]
    assert product.dtype == torch.float64
    tolerance = 4 * torch.finfo(dtype).eps
    assert float(product) == pytest.approx(sum(terms), abs=tolerance * sum(map(abs, terms)))


def test_sums_over_many_entries_are_more_precise_than_fp32() -> None:
    """Adding 2²⁵ ones one by one in fp32 would stop at 2²⁴."""
    ones = torch.ones(2**25)
    assert float(dot([ones], [ones])) == 2.0**25
    assert dots(ones.expand(2, -1), ones).tolist() == [2.0**25, 2.0**25]


def test_sums_of_spans_are_right_for_all_lengths() -> None:
    """Lengths with and without a common divisor, including 0 and 1."""
    for sizes in (3, 0, 2**17 + 5, 1, 2**16), (96, 0, 2**16, 32):
        values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected = [float(part.sum()) for part in values.split(sizes)]
        assert sums_of_spans(values, sizes).tolist() == pytest.approx(expected, rel=1e-12)
    assert sums_of_spans(values[:3].float(), (2, 1)).tolist() == pytest.approx(
        [float(values[:2].float().double().sum()), float(values[2].float())], rel=1e-15
    )
    assert sums_of_spans(values[:0], (0, 0)).tolist() == [0.0, 0.0]  # a process may hold nothing of some parameters


def test_a_layout_without_a_parameter_raises() -> None:
    with pytest.raises(ValueError, match="parameter"):
        Layout.of({})


def test_a_layout_of_parameters_on_several_devices_raises() -> None:
    with pytest.raises(ValueError, match=r"several devices, .*a.*b"):
        Layout.of({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})


# --- vectors by fold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "dtype"), [*((k, torch.float64) for k in (1, 3, 4)), (4, torch.bfloat16)])
def test_kept_vectors_are_the_mean_gradients_of_the_folds(count: int, dtype: torch.dtype) -> None:
    """Bitwise if K is a power of two, because dividing the loss by K is exact. Those of bf16 are kept in fp32."""
    model, batches = TiedModel(dtype), microbatches(count)
    recorder = recorder_of(model)
    train_step(model, recorder, batches)
    assert recorder.by_fold.dtype == torch.promote_types(dtype, torch.float32)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(dtype), tokens).items():
            got, tolerance = kept_by_name(recorder)[name][k], 1e-12 if count == 3 else 0.0
            torch.testing.assert_close(got, gradient.to(got), rtol=tolerance, atol=0.01 * tolerance)


def test_vectors_kept_in_bf16_are_rounded_to_eight_significant_bits() -> None:
    exact, halved = TiedModel(torch.float32), TiedModel(torch.float32)
    recorder, bf16_recorder = recorder_of(exact), recorder_of(halved, dtype=torch.bfloat16)
    train_step(exact, recorder, microbatches(3))
    train_step(halved, bf16_recorder, microbatches(3))
    assert bf16_recorder.by_fold.dtype == torch.bfloat16
    for name, exact in kept_by_name(recorder).items():
        torch.testing.assert_close(
            kept_by_name(bf16_recorder)[name].float(), exact, rtol=2.0**-7, atol=1e-9
        )  # rounded twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_vectors_in_few_bits_are_rounded_once_when_a_fold_is_complete(dtype: torch.dtype) -> None:
    """Folds of two microbatches and of one: the vectors are the whole gradients, rounded."""
    model, batches = TiedModel(torch.float32), microbatches(3)
    recorder, expected = (
        recorder_of(model, dtype=dtype),
        FoldVectors(Layout.of(dict(model.named_parameters())), 2, dtype),
    )
    recorder.start_step(folds_of([3, 3], [3]))
    for k, tokens in enumerate(batches):
        catch(recorder, 3 * k, model(tokens))
    recorder.complete(torch.tensor([6.0, 3.0], dtype=torch.float64), mean_of(model), ALONE)
    gradients = [own_gradient(model, tokens) for tokens in batches]
    for fold, parts in enumerate((gradients[:2], gradients[2:])):
        sums = [sum(entries) for entries in zip(*(part.values() for part in parts), strict=True)]
        for bucket, total in enumerate(recorder.layout.vector(sums)):
            expected.receiver(range(fold, fold + 1)).take(bucket, 0, total.unsqueeze(0))
    for got, exact in zip(recorder.by_fold.of_folds(range(2)), expected.of_folds(range(2)), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-7)


def test_the_mean_of_the_folds_is_the_gradient_of_the_optimizer(model: TiedModel, recorder: FoldRecorder) -> None:
    train_step(model, recorder, microbatches(3))
    for name, p in model.named_parameters():
        torch.testing.assert_close(kept_by_name(recorder)[name].mean(dim=0), p.grad.flatten(), rtol=1e-12, atol=1e-14)


def test_vectors_by_fold_are_the_same_under_gradient_checkpointing() -> None:
    """The tied weight is used both inside and before the checkpointed part."""
    model, batches = TiedModel(reentrant=False), microbatches(4)
    recorder = recorder_of(model)
    train_step(model, recorder, batches)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            torch.testing.assert_close(kept_by_name(recorder)[name][k], gradient, rtol=1e-12, atol=1e-14)


def test_a_gradient_delivered_in_several_parts_is_detected() -> None:
    """Reentrant checkpointing delivers the tied weight's gradient from inside the checkpointed part separately."""
    model = TiedModel(reentrant=True)
    recorder = recorder_of(model)
    train_step(model, recorder, microbatches(1))
    caught = recorder.complete(torch.full((1,), 3.0, dtype=torch.float64), mean_of(model), ALONE)
    assert gradient_mismatch(caught, is_rounded=False).code == "gradient_in_parts"


def test_each_step_starts_with_as_many_empty_vectors_as_it_has_folds(model: TiedModel, recorder: FoldRecorder) -> None:
    for seed, count in enumerate((4, 4, 2)):
        batches = microbatches(count, seed)
        train_step(model, recorder, batches)
        assert len(recorder.by_fold) == count
        assert recorder.peak_bytes == count * recorder.layout.num_bytes
        for name, gradient in own_gradient(TiedModel(), batches[-1]).items():
            assert torch.equal(kept_by_name(recorder)[name][-1], gradient), name


def test_backward_of_a_probe_between_microbatches_adds_nothing(model: TiedModel, recorder: FoldRecorder) -> None:
    batches, parameters = microbatches(2), list(model.parameters())
    recorder.start_step(folds_of([3], [3]))
    for k, tokens in enumerate(batches):
        loss = model(tokens)
        torch.autograd.grad(model(microbatches(1, seed=9)[0]), parameters)
        catch(recorder, 3 * k, loss)
        torch.autograd.grad(model(microbatches(1, seed=8)[0]), parameters)
    for k, tokens in enumerate(batches):
        for name, gradient in own_gradient(TiedModel(), tokens).items():
            assert torch.equal(kept_by_name(recorder)[name][k], gradient), name


def test_a_step_that_keeps_no_gradients_sets_no_hook(model: TiedModel, recorder: FoldRecorder) -> None:
    recorder.start_step(folds_of([3]), stores_vectors=False)
    recorder.arm(0)
    assert not any(param._backward_hooks for param in model.parameters())


def test_a_finished_step_leaves_no_hook(model: TiedModel, recorder: FoldRecorder) -> None:
    recorder.start_step(folds_of([3], [3]))
    for first_row in (0, 3):
        recorder.arm(first_row)
        assert all(p._backward_hooks for p in model.parameters())
        recorder.reduction.finish()
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    recorder.reduction.finish()
    model(microbatches(1)[0]).backward()
    recorder.complete(torch.ones(2), mean_of(model), ALONE)
    assert not any(part.any() for part in recorder.by_fold.means())


@pytest.mark.parametrize(("offload", "stores_vectors"), [(True, True), (False, False), (False, True)])
def test_folds_of_unequal_sizes_have_the_vectors_and_norms_of_their_mean_gradients(
    model: TiedModel, offload: bool, stores_vectors: bool
) -> None:
    """Microbatches of 1, 2 and 3 sequences, the first two in one fold. The loss is the mean over all six sequences."""
    recorder, sizes = recorder_of(model, offload=offload), [1, 2, 3]
    batches = torch.cat(microbatches(2)).split(sizes)
    recorder.start_step(folds_of([1, 2], [3]), stores_vectors=stores_vectors, sqrt_metric=recorder.layout.zeros())
    for first_row, tokens in zip((0, 1, 3), batches, strict=True):
        catch(recorder, first_row, model(tokens) * len(tokens) / sum(sizes))
    recorder.complete(torch.tensor([3.0, 3.0], dtype=torch.float64), mean_of(model), ALONE)
    expected = own_gradient(TiedModel(), torch.cat(batches[:2])), own_gradient(TiedModel(), batches[2])
    assert recorder.sq_norms is not None
    for number, name in enumerate(expected[0]):
        of_folds = torch.stack([gradients[name] for gradients in expected])
        of_folds_and_mean = torch.cat([of_folds, of_folds.mean(dim=0, keepdim=True)]).square().sum(dim=1)
        torch.testing.assert_close(recorder.sq_norms[:, number, 0], of_folds_and_mean)
        if stores_vectors:
            torch.testing.assert_close(kept_by_name(recorder)[name], of_folds)


@pytest.mark.parametrize(("offload", "lies_on"), [(False, "cuda"), (True, "cpu")])
def test_vectors_by_fold_are_kept_in_host_memory_on_request(offload: bool, lies_on: str) -> None:
    """With fake tensors, which have a device in name only."""
    with FakeTensorMode(), torch.no_grad():
        shard = shard_of(nn.ParameterDict({"w": torch.zeros(2, 3, device="cuda")}))
        shard.layout = Layout.of(shard.trained)
        recorder = FoldRecorder(FoldReduction(shard), offload=offload)
        recorder.start_step(folds_of([1]), sqrt_metric=shard.layout.zeros())
        assert recorder.by_fold._parts[0].device.type == lies_on
        assert recorder.sq_norms.device.type == "cuda"


# --- two processes ----------------------------------------------------------------------------------------------------

SLICE = 51  # where the 72 entries are cut, in the middle of a parameter


class Sliced(Shard):
    """A slice of the concatenated parameters, as ZeRO-1 and ZeRO-2 shard them."""

    def entry_range(self, name: str, rank: int) -> tuple[int, int]:
        sizes = {key: param.numel() for key, param in self.trained.items()}
        first = sum(size for key, size in sizes.items() if list(sizes).index(key) < list(sizes).index(name))
        bounds = [0, SLICE, sum(sizes.values())]
        return tuple(min(max(bounds[rank + part] - first, 0), sizes[name]) for part in (0, 1))


def sliced_sums(rank: int) -> dict[str, Tensor]:
    """Return the sums of two backwards by fold. On one process they do not reach every parameter."""
    model = TiedModel()
    shard = shard_of(model, Sliced)
    target, reduction = shard.layout.zeros(2), FoldReduction(shard)
    first_fold = [part[:1] for part in target]
    for target_vectors, tokens in zip((first_fold, target), microbatches(2, seed=200 + rank), strict=True):
        loss = model.embed(tokens).square().sum() if rank == 1 else model(tokens)
        reduction.arm(adding_to(target_vectors))
        loss.backward()
        reduction.finish()
    return shard.layout.by_name(target)


def rank_worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = sliced_sums(rank)
    vectors.CHUNK_SIZE_CPU = 7
    torch.save([whole, sliced_sums(rank)], folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Tensor]]]:
    """Return the sums of each rank, sent in one chunk and in many."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    forks.start_ranks(rank_worker, (folder,), 2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("chunks", [0, 1], ids=["in one chunk", "in many chunks"])
def test_sharded_vectors_are_the_plain_sums_over_the_processes_of_a_fold(ranks, chunks: int) -> None:
    """The first backward of both processes belongs to fold 0. The second belongs to fold 1 on process 1 only."""
    of_tied = [own_gradient(TiedModel(), tokens) for tokens in microbatches(2, seed=200)]
    of_embedding = []
    for tokens in microbatches(2, seed=201):
        model = TiedModel()
        model.embed(tokens).square().sum().backward()
        of_embedding.append(model.embed.weight.grad.flatten())
    parts = [sums[chunks] for sums in ranks]
    assert [part.numel() for part in parts[0].values()] != [part.numel() for part in parts[1].values()]
    for name in of_tied[0]:
        reached = name == "embed.weight"
        second = of_embedding[1] if reached else torch.zeros_like(of_tied[1][name])
        expected = torch.stack([of_tied[0][name] + of_tied[1][name] + (of_embedding[0] if reached else 0.0), second])
        vector = torch.cat([part[name] for part in parts], dim=-1)  # each rank holds some of the entries
        torch.testing.assert_close(vector, expected, rtol=1e-12, atol=1e-14)
