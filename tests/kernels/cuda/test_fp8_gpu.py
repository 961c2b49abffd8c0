"""FP8 products of experts on Hopper's tensor cores, by the kernels of this project and by torch's."""

from types import SimpleNamespace

import fp8_cases
import pytest
import torch
from fp8_cases import FP8

from nybble.kernels import hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or hopper.can_run("cuda") is not None,
        reason="needs Hopper's FP8 products",
    ),
]
SIZES = (0, 1, 7, 33, 128, 1000, 0)
TORCH = SimpleNamespace(product_of_rows=hopper.torch_rows, product_of_groups=hopper.torch_groups)


@pytest.mark.parametrize(("N", "C"), [(16, 16), (48, 1008), (144, 80), (448, 512), (512, 896), (992, 336)])
def test_exact_sums_equal_the_plain_product(N, C):
    from nybble.kernels.cuda import launch_fp8

    both = (torch.float32, torch.bfloat16)
    fp8_cases.check(launch_fp8, torch.device("cuda"), SIZES, N, C, both)


def test_more_groups_than_are_sorted_by_length():
    from nybble.kernels.cuda import launch_fp8

    sizes = [i % 5 * 9 for i in range(launch_fp8.SORT_LIMIT + 6)]
    fp8_cases.check(launch_fp8, torch.device("cuda"), sizes, 64, 96, (torch.float32,))


def test_torch_multiplies_alike():
    """But for FP32 results, which it rounds to BF16 first."""
    fp8_cases.check(TORCH, torch.device("cuda"), SIZES, 448, 512, (torch.bfloat16,))


def long_sums():
    """Positive codes, 8192 of them a sum: what the tensor cores lose, they lose on one side."""
    gen = torch.Generator().manual_seed(0)
    a, b = ((torch.rand(128, 8192, generator=gen) + 0.5).to(FP8) for _ in range(2))
    wanted = a.double() @ b.double().T
    one = torch.ones(1, 128, device="cuda")
    ends = torch.tensor([8192], dtype=torch.int32, device="cuda")
    case = {"a_codes": a.cuda(), "a_scales": one, "b_codes": b.cuda(), "b_scales": one, "ends": ends}
    return case, wanted


def error(got, wanted):
    return ((got.double().cpu() - wanted).abs() / wanted).max().item()


def test_long_sums_keep_more_bits_than_the_tensor_cores():
    from nybble.kernels.cuda import launch_fp8

    case, wanted = long_sums()
    (got,) = launch_fp8.product_of_groups(**case, dtype=torch.float32)
    (fast,) = torch._scaled_grouped_mm(
        case["a_codes"],
        case["b_codes"].t(),
        case["a_scales"].reshape(-1),
        case["b_scales"].reshape(-1),
        offs=case["ends"],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    kept, lost = error(got, wanted), error(fast, wanted)
    assert kept < 2**-8 < lost, (kept, lost)  # the latter has half of that from BF16's rounding alone


def test_two_hundred_repeats_beside_other_work():
    from nybble.kernels.cuda import launch_fp8

    gen = torch.Generator().manual_seed(0)
    rows = fp8_cases.gathered(fp8_cases.rows_case(SIZES, 448, 512))
    groups = fp8_cases.columns_case(SIZES, 448, 512)
    for case, names in ((rows, ("codes", "w_codes")), (groups, ("a_codes", "b_codes"))):
        for name in names:  # sums that are rounded
            case[name] = (torch.randn(case[name].shape, generator=gen) * case[name].float()).to(FP8)
    rows, groups = fp8_cases.moved(rows, "cuda"), fp8_cases.moved(groups, "cuda")
    last = int(rows["offs"][-1])
    busy, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    wanted = None
    for _ in range(200):
        with torch.cuda.stream(beside):
            busy = (busy @ busy).clamp(-1, 1)
        got = (
            launch_fp8.product_of_rows(**rows)[:last],
            launch_fp8.product_of_groups(**groups, dtype=torch.float32),
        )
        wanted = wanted or got
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    torch.cuda.synchronize()


def test_a_captured_graph_follows_its_groups():
    """Grids depend on shapes alone, and tiles on what the ends say when the graph runs."""
    case = fp8_cases.moved(fp8_cases.rows_case(SIZES, 64, 96), "cuda")
    case["codes"] = fp8_cases.integers(*case["codes"].shape, seed=1).cuda()
    hopper_args = [case[n] for n in ("codes", "scales", "w_codes", "w_scales", "offs")]
    run = hopper._multiply_rows
    run(*hopper_args, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*hopper_args, None)
    other = torch.tensor([500, 500, 501, 900, 1000, 1001, 1100], dtype=torch.int32, device="cuda")
    for offs in (case["offs"].clone(), other):
        case["offs"].copy_(offs)
        graph.replay()
        wanted = fp8_cases.rows_wanted({n: t.cpu() for n, t in case.items()})
        assert torch.equal(out[: len(wanted)].cpu(), wanted)
