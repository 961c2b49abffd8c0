"""Whatever hypothesis thinks of."""

import torch
from cpu_cases import KEY, check, granularities
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.formats import table


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, str, dict[str, object]]:
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    seed, spread = draw(st.integers(0, 2**31)), draw(st.sampled_from([0, 4, 120]))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-spread, spread + 1, shape, generator=generator).float())
    for value in draw(st.lists(st.floats(width=32), max_size=4)):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    if draw(st.booleans()):
        x = x.to(torch.bfloat16)
    if len(shape) > 1 and draw(st.booleans()):
        x = x.transpose(-1, -2)
    format = draw(st.sampled_from(table.names()))
    how: dict[str, object] = {
        "axis": draw(st.sampled_from([-1, -2])) if len(shape) > 1 else -1,
        "outer": draw(st.sampled_from(granularities(format, len(shape)))),
    }
    if not table.get(format).passthrough and draw(st.booleans()):
        how |= {
            "rounding": "stochastic",
            "key": KEY + draw(st.integers(0, 5)),
            "layer": draw(st.integers(0, 2**24 - 1)),
        }
    return x, format, how


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_any_call(call: tuple[torch.Tensor, str, dict[str, object]]) -> None:
    x, format, how = call
    assert not list(check(x, format, x.dtype, **how))
