"""The model in its two roles, sampler and trainer, each in the precision of its stage of the recipe."""

from __future__ import annotations

from dataclasses import replace

from nybble import formats
from nybble.errors import ConfigError, RecipeError
from nybble.layers import Report, convert, set_step
from nybble.models import CausalLM
from nybble.recipes import Recipe, Table, resolve


class Policy:
    """One set of master weights. Where both stages have the same forward pass, one conversion serves both.

    Weights are quantised again whenever a role begins: no code or scale of older weights is used.
    """

    def __init__(
        self, model: CausalLM, sample: Recipe, train: Recipe, seed: int, invariant: bool = False
    ) -> None:
        """Raises ConfigError if `invariant` is asked of a model that the mode does not cover, and RecipeError
        if of a forward pass that mixes the tokens of a batch."""
        if invariant and not model.knows_batch_invariance:
            raise ConfigError(
                f"batch_invariant: the mode does not cover {model.config.model_type}, whose state goes by "
                "chunks in training and by tokens in sampling; use --no-batch-invariant"
            )
        self.model, self.seed, self.invariant = model, seed, invariant
        sample_table, train_table = resolve(sample, model), resolve(train, model)
        self._sample_table = sample_table
        self.differing = _differing(sample_table, train_table)
        """Modules whose forward pass differs between the two."""
        if invariant:
            for table in (sample_table, train_table):
                _check_independent(table)
        # A conversion of the sampler's own keeps codes, 4.5 bits a value.
        self._sample = replace(sample, cache="codes")
        self._train = train
        self.report: Report = convert(model, train)
        self._sampling = False

    def table(self) -> str:
        """The resolved table of the trainer, and the sampler's if its forward pass is another."""
        text = self.report.table()
        return f"{text}\nsampler: {self._sample_table.text()}" if self.differing else text

    def begin_sampling(self, update: int) -> None:
        """The weights after `update` updates are what samples now."""
        if self.differing and not self._sampling:
            convert(self.model, self._sample)
        self._sampling = True
        set_step(self.model, update, 0, seed=self.seed)

    def begin_training(self, update: int, micro: int) -> None:
        """Names the draws of micro-batch `micro` of the next update."""
        if self.differing and self._sampling:
            convert(self.model, self._train)
        self._sampling = False
        set_step(self.model, update, micro, seed=self.seed)


def _differing(sample: Table, train: Table) -> list[str]:
    return [
        a.name
        for a, b in zip(sample.rows, train.rows, strict=True)
        if a.gemms.fprop != b.gemms.fprop and not a.protected
    ]


def _check_independent(table: Table) -> None:
    for row in table.rows:
        x = row.gemms.fprop.x
        mixed = x.outer == "tensor" and formats.get(x.format).two_level
        if not row.protected and (mixed or x.subtract_mean or (x.quantised and x.rounding != "nearest")):
            raise RecipeError(
                f"{row.name}: its fprop.x depends on the other tokens of a batch (one outer scale, a mean, "
                "or stochastic rounding), so sampler and trainer cannot agree; use outer = 'row' and "
                "rounding = 'nearest', or --no-batch-invariant"
            )
