"""In which format tokens travel between ranks that share experts, leg by leg.

dispatch             x to the ranks of its experts           forward
combine              what the experts return                 forward
combine_backward     dy to the ranks of the experts          backward, rounded stochastically
dispatch_backward    dx back from them                       backward, rounded stochastically
"""

from dataclasses import asdict, dataclass

LEGS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
FORMATS = ("bf16", "fp32", "mxfp8", "nvfp4")
"""The first is the default."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Formats of the four legs."""

    dispatch: str = "bf16"
    combine: str = "bf16"
    dispatch_backward: str = "bf16"
    combine_backward: str = "bf16"

    def changed(self) -> dict[str, str]:
        """The legs that are not the default."""
        return {leg: name for leg, name in asdict(self).items() if name != FORMATS[0]}

    def text(self) -> str:
        """`dispatch bf16, combine mxfp8, ...`."""
        return ", ".join(f"{leg} {name}" for leg, name in asdict(self).items())
