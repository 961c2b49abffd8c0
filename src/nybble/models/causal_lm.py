"""What all our language models do alike: ids in, loss or logits out, with documents and caches."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig

from nybble.errors import NybbleError
from nybble.models.balance import ExpertLoad
from nybble.models.cache import Cache
from nybble.models.context import Context, document_starts, same_document
from nybble.models.documents import find_documents
from nybble.models.flex import block_mask
from nybble.models.loss import IGNORE, head_loss
from nybble.models.pretrained import Pretrained


@dataclass
class CausalLMOutput:
    """Mean `loss`, `token_loss` [B, S] in nats without gradient, `logits` [B, S, vocabulary], FP32; `hidden`
    [B, S, H] before the head."""

    loss: Tensor | None = None
    token_loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None


class Stack:
    """Mixin of decoders: runs layers, some of which keep only their inputs."""

    checkpointed: frozenset[int] = frozenset()

    def run(self, index: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """The layer's result, computed again in the backward pass if it is checkpointed."""
        if index in self.checkpointed and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*inputs)


class CausalLM(ExpertLoad, Pretrained):
    """A causal language model: `model` (a `Stack`), `lm_head` and `expert_load`.

    `model(ids [B, S], context, dtype)` gives hidden states [B, S, H] and tokens per expert [layers, E],
    or None without experts.
    `compute_dtype` is the dtype of activations; None takes the parameters' dtype, but BF16 for FP32
    parameters on CUDA. `flex` says whether attention goes through FlexAttention; None: on CUDA, where the
    architecture has no fused kernel or its kernel does not serve the model (`why_not_fused`).
    `knows_batch_invariance` says whether `nybble.models.invariant` covers all operations of the forward pass.
    """

    _tied_weights_keys = None
    expert_load: Tensor
    compute_dtype: torch.dtype | None = None
    flex: bool | None = None
    knows_batch_invariance: bool = False

    @property
    def vocabulary(self) -> int:
        """Tokens that the model can predict."""
        return int(self.lm_head.weight.shape[0])

    @property
    def cap(self) -> float | None:
        """Soft cap of the logits."""
        return None

    @property
    def kernel(self) -> int:
        """Tokens that a short convolution sees."""
        raise NotImplementedError

    def windows(self) -> list[int | None]:
        """Attention window of each layer, None for full attention or none at all."""
        raise NotImplementedError

    def why_not_fused(self, device: torch.device) -> str | None:
        """Why attention on `device` does not go through a kernel of our own; None if it does."""
        del device
        return "the architecture has no attention kernel of its own"

    def status(self) -> str | None:
        """One line on how the model is computed where it is, and why, if there is a choice."""
        return None

    @classmethod
    def can_generate(cls) -> bool:
        """False: `nybble.models.generate` generates, not transformers."""
        return False

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write config, generation config and weights as transformers does."""
        super().save_pretrained(save_directory, *args, **kwargs)
        GenerationConfig.from_model_config(self.config).save_pretrained(save_directory)

    def new_cache(self) -> Cache:
        """An empty cache for generation."""
        return Cache(self.windows())

    def checkpoint_layers(self, layers: list[int] | bool) -> None:
        """Keep only the inputs of these layers (True: all) and run them again in the backward pass."""
        count = self.config.num_hidden_layers
        chosen = range(count if layers else 0) if isinstance(layers, bool) else layers
        if wrong := [i for i in chosen if not 0 <= i < count]:
            raise NybbleError(f"activation checkpointing: no layer {wrong[0]}; the model has {count} layers")
        self.model.checkpointed = frozenset(chosen)

    def activation_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Checkpoint every layer (transformers' name for it)."""
        self.checkpoint_layers(True)

    def activation_checkpointing_disable(self) -> None:
        """Checkpoint no layer."""
        self.checkpoint_layers(False)

    def check_ids(self, name: str, ids: Tensor, vocabulary: int) -> None:
        """Raise NybbleError unless all ids lie in [0, vocabulary); -100 counts as no id."""
        ids = ids[ids != IGNORE] if name == "labels" else ids
        if ids.numel() and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocabulary:
            worst = low if low < 0 else high
            raise NybbleError(
                f"{name} holds token {worst}, but the model's vocabulary has {vocabulary} tokens; "
                "use the tokeniser that the model was made with"
            )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        shift_labels: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        return_logits: bool | None = None,
        last_only: bool = False,
        return_hidden: bool = False,
    ) -> CausalLMOutput:
        """Logits, or the loss if there are labels.

        Args:
            input_ids: [B, S] int64. Checked against the vocabulary where that costs no device sync, that is
                on a CPU.
            labels: [B, S], the ids themselves, shifted by one here as in transformers; -100 is ignored.
            shift_labels: [B, S], the target of each position, in place of `labels`.
            segments: [B, S] int, documents packed in a row; tokens of different ones do not see each other.
            positions: [B, S] position within the document, worked out from `segments` by default.
            cache: from `new_cache()`, holds the tokens before these and takes these in.
            return_logits: default: only without labels.
            last_only: logits of the last position alone, [B, 1, vocabulary].
            return_hidden: the hidden states too, for a loss of the caller's own.

        Raises:
            NybbleError: ids out of the vocabulary, or more tokens than `max_position_embeddings`.
        """
        B, S = input_ids.shape
        past = 0 if cache is None else cache.length
        limit = self.config.max_position_embeddings
        if past + S > limit:
            raise NybbleError(
                f"sequence of {past + S} tokens is longer than max_position_embeddings = {limit}"
            )
        if labels is not None and shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_ids("input_ids", input_ids, self.config.vocab_size)
            if shift_labels is not None:
                self.check_ids("labels", shift_labels, self.vocabulary)
        context = self._context(input_ids, segments, positions, cache)
        hidden, counts = self.model(input_ids, context, self._dtype())
        if cache is not None:
            cache.advance(S, segments)
        if self.training and counts is not None:
            self.expert_load += counts
        output = CausalLMOutput(hidden=hidden if return_hidden else None)
        cap = self.cap
        if shift_labels is not None:
            flat = hidden.reshape(-1, hidden.shape[-1])
            output.loss, token_loss = head_loss(flat, self.lm_head.weight, shift_labels.reshape(-1), cap)
            output.token_loss = token_loss.view(B, S)
        if return_logits or (return_logits is None and shift_labels is None):
            kept = hidden[:, -1:] if last_only else hidden
            logits = (kept @ self.lm_head.weight.to(kept.dtype).T).float()
            output.logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return output

    def _dtype(self) -> torch.dtype:
        if self.compute_dtype is not None:
            return self.compute_dtype
        weight = self.get_input_embeddings().weight
        return torch.bfloat16 if weight.is_cuda and weight.dtype == torch.float32 else weight.dtype

    def _context(
        self, ids: Tensor, segments: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> Context:
        past = 0 if cache is None else cache.length
        before = None if cache is None else cache.segments
        if segments is None and before is not None:
            raise NybbleError(
                "segments are missing: the cached tokens have them, so the new ones need them too"
            )
        if segments is not None and past and before is None:
            raise NybbleError("segments are given, but the cached tokens have none: give them from the start")
        context = Context(positions, segments, past, cache, past_segments=before)
        if segments is not None:
            context.same = same_document(segments, before, self.kernel)
            context.starts = document_starts(segments, before)
        if self.flex is None and ids.numel() and self.why_not_fused(ids.device) is None:
            context.fused = True
            if segments is not None and past == 0:
                context.documents = find_documents(segments)
        elif (ids.is_cuda if self.flex is None else self.flex) and cache is None and ids.numel():
            for window in set(self.windows()):
                context.block_masks[window] = block_mask(
                    ids.shape[1], window, segments, ids.shape[0], ids.device
                )
        return context
