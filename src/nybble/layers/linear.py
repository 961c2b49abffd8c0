"""A linear layer whose three GEMMs take the operands that a recipe names.

Legend: T tokens, K input features, N output features.
    fprop  y[T,N]  = x[T,K] @ W[N,K].T      operands along K
    dgrad  dx[T,K] = dy[T,N] @ W[N,K]       operands along N
    wgrad  dW[N,K] = dy[T,N].T @ x[T,K]     operands along T
"""

import copyreg
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nybble.formats import Operand as Role
from nybble.layers import folded, gemm, kept
from nybble.layers.casting import cast, cast_both
from nybble.layers.operand import Draw, compute_dtype, one_read, outer, product
from nybble.layers.step import StepState
from nybble.layers.weight_cache import WeightCache, tag_of
from nybble.layers.weights import Spec, Weight


class Plan(NamedTuple):
    """What a pass needs besides tensors."""

    weight: Weight
    keep_x: bool
    """False for a frozen weight: nothing of x is kept."""
    x_dtype: torch.dtype
    state: StepState

    def draw(self, role: Role, key: Tensor, rows: Tensor | None) -> Draw:
        """Draws of an operand whose rows are tokens."""
        return self.weight.spec.draw(role, key)._replace(rows=rows)


class Linear(nn.Linear):
    """`nn.Linear` with the GEMMs of a recipe: same parameters, any input dtype, output in that dtype."""

    spec: Spec
    step_state: StepState
    weight_cache: WeightCache

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        key, weight_key = self.step_state.keys(x.device)
        keep_x = torch.is_grad_enabled() and self.weight.requires_grad
        tokens = x.reshape(-1, x.shape[-1])
        plan = Plan(
            planned(self.weight, self.spec, self.weight_cache, self.step_state),
            keep_x,
            x.dtype,
            self.step_state,
        )
        rows = self.step_state.rows(tokens.shape[0], x.device)
        y: Tensor = _Linear.apply(tokens, self.weight, self.bias, rows, key, weight_key, plan)
        return y.view(*x.shape[:-1], y.shape[-1])

    def rounds_to_bf16(self) -> bool:
        """Whether all its operands are plain BF16, so that whoever rounds them may do the products."""
        return self.bias is None and self.spec.rounds_to_bf16

    def __reduce__(self) -> Any:
        # The class of a converted module may be made at run time: it is found again from the model's own.
        original = nn.Linear if type(self) is Linear else type(self).__bases__[1]
        return _rebuild, (original,), self.__dict__

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {' '.join(self.spec.gemms.texts())}"


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear}


def linear_class(original: type[nn.Module]) -> type[nn.Module]:
    """`original` with the forward pass of Linear; isinstance checks against it still hold."""
    if original not in _CLASSES:
        _CLASSES[original] = type(original.__name__, (Linear, original), {"__module__": original.__module__})
    return _CLASSES[original]


def _rebuild(original: type[nn.Module]) -> Any:
    return copyreg.__newobj__(linear_class(original))  # type: ignore[attr-defined]


def planned(weight: Tensor, spec: Spec, cache: WeightCache, state: StepState, before: int = 0) -> Weight:
    """The weight, with its cache where one may be used: between calls of `set_step`. `before` matrices of the
    whole weight lie before this part of it.

    A compiled graph cannot tell whether a weight has changed: it quantises the weight whenever it runs,
    unless `refresh` vouches for the cache.
    """
    if torch.compiler.is_compiling():
        return Weight(spec, cache if state.fresh else None, None, before)
    if not state.managed or cache.mode == "none":
        return Weight(spec, None, None, before)
    return Weight(spec, cache, tag_of(weight, state.generation), before)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        key: Tensor,
        weight_key: Tensor,
        plan: Plan,
    ) -> Tensor:
        spec = plan.weight.spec
        fprop = spec.gemms.fprop
        dtype = compute_dtype(x.device, fprop.x, fprop.w)
        mean = shift = None
        if fprop.x.subtract_mean:
            # x @ W.T = (x - 1 mean) @ W.T + 1 (W mean).T, the second part in FP32 (arXiv 2603.10444).
            mean = x.sum(0, dtype=torch.float32) / max(x.shape[0], 1)
            shift = torch.mv(weight.float(), mean)
            x = x.float() - mean
        (values, amax), saved = plan.state.inputs.get(
            x, fprop.x, (spec.gemms.wgrad.x, plan.keep_x, dtype),
            lambda: kept.keep(x, spec.gemms, plan.keep_x, dtype, plan.draw(Role.FPROP_X, key, rows)),
        )  # fmt: skip
        w, w_amax = plan.weight.fprop(weight, weight_key, dtype)
        scale = product(outer(amax, fprop.x), outer(w_amax, fprop.w))
        ctx.save_for_backward(weight, rows, key, weight_key, mean, *saved)
        ctx.plan, ctx.shape, ctx.has_bias = plan, x.shape, bias is not None
        if bias is not None:
            shift = bias.float() if shift is None else shift + bias.float()
        if shift is None:
            return gemm.matmul(values, w.t(), scale, plan.x_dtype)
        return (gemm.matmul(values, w.t(), scale, torch.float32) + shift).to(plan.x_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, key, weight_key, mean, *saved = ctx.saved_tensors
        plan: Plan = ctx.plan
        spec = plan.weight.spec
        gemms = spec.gemms
        dx = dw = dbias = None
        along = across = codes = None
        if gemms.folds and ctx.needs_input_grad[1]:
            codes = folded.gradient(dy, gemms.dgrad.dy, plan.draw(Role.DGRAD_DY, key, rows))
        if dy.is_cuda and all(ctx.needs_input_grad[:2]) and one_read(gemms.dgrad.dy, gemms.wgrad.dy):
            dtypes = {
                compute_dtype(dy.device, gemms.dgrad.dy, gemms.dgrad.w),
                compute_dtype(dy.device, gemms.wgrad.dy, gemms.wgrad.x),
            }
            if dtypes == {torch.bfloat16}:
                along, across = cast_both(dy, gemms.dgrad.dy, torch.bfloat16)
        if ctx.needs_input_grad[0]:
            dtype = compute_dtype(dy.device, gemms.dgrad.dy, gemms.dgrad.w)
            if codes is not None:
                along = codes.along(gemms.dgrad.dy, dtype)
            a, a_amax = along or cast(dy, gemms.dgrad.dy, -1, dtype, plan.draw(Role.DGRAD_DY, key, rows))
            w, w_amax = plan.weight.dgrad(weight, weight_key, dtype)
            scale = product(outer(a_amax, gemms.dgrad.dy), outer(w_amax, gemms.dgrad.w))
            dx = gemm.matmul(a, w, scale, plan.x_dtype)
        if ctx.needs_input_grad[1]:
            dtype = compute_dtype(dy.device, gemms.wgrad.dy, gemms.wgrad.x)
            if codes is not None:
                a, a_amax = codes.across(gemms.wgrad.dy, dtype)
            elif dx is None or not spec.shares_dy:
                draw = plan.draw(Role.WGRAD_DY, key, rows)
                a, a_amax = across or cast(dy, gemms.wgrad.dy, -2, dtype, draw)
            draw = plan.draw(Role.WGRAD_X, key, rows)
            if codes is not None:
                b, b_amax = kept.wgrad_operand(saved, gemms, ctx.shape, dtype, draw, None, codes.factor)
            else:
                b, b_amax = plan.state.kept_inputs.get(
                    saved[0], gemms.wgrad.x, (gemms.fprop.x, ctx.shape, dtype),
                    lambda: kept.wgrad_operand(saved, gemms, ctx.shape, dtype, draw),
                )  # fmt: skip
            scale = product(outer(a_amax, gemms.wgrad.dy), outer(b_amax, gemms.wgrad.x))
            dw = gemm.matmul(a.t(), b, scale, weight.dtype if mean is None else torch.float32)
            if mean is not None:
                dw = dw.addr(dy.sum(0, dtype=torch.float32), mean).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = dy.sum(0, dtype=torch.float32).to(weight.dtype)
        return dx, dw, dbias, None, None, None, None
