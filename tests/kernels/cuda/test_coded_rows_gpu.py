"""Products of few rows with four-bit weights on a GPU."""

from dataclasses import replace

import coded_cases
import pytest
import torch

from nybble import convert
from nybble.layers import set_step
from nybble.models import Inkling2ForCausalLM, presets
from nybble.recipes import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_rows_times_codes_is_the_product_on_their_values() -> None:
    coded_cases.check(torch.device("cuda"))


@torch.no_grad()
def test_a_model_that_keeps_codes_computes_what_one_that_keeps_values_does() -> None:
    torch.manual_seed(0)
    model = Inkling2ForCausalLM(presets.get("nano").model_config(512)).to("cuda").eval()
    model.flex = False  # nothing to compile
    ids = torch.randint(0, 512, (4, 6), device="cuda")
    logits = []
    for kept in ("values", "codes"):
        convert(model, replace(load_recipe("hopper"), cache=kept))
        set_step(model, 0)
        logits.append(model(ids).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=0.05, rtol=0.05)
