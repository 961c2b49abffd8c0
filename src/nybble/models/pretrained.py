"""What our classes share with transformers' machinery for folders and initial weights."""

from transformers import PreTrainedModel


class Pretrained(PreTrainedModel):
    """A class of ours that reads and writes the folders of transformers' class of the same name."""

    supports_gradient_checkpointing = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # a config that transformers' own class has touched names an implementation; here the device decides
        return True

    @classmethod
    def is_custom_code(cls) -> bool:
        # transformers' table of checkpoint names for this model type holds for this class too
        return False
