"""`AutoregressiveConfig`: what a baseline drafter is, MTP or Eagle3."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .config_rules import FIXED_WHEN_AUTOREGRESSIVE, check_autoregressive_config
from .configuration_dspark import DSparkConfig, raising_our_errors


@strict
class AutoregressiveConfig(DSparkConfig):
    r"""Configuration of a baseline drafter that drafts one token after the other.

    It has the fields of [`DSparkConfig`]. Those of blocks, sequential and confidence head have one value each: such a
    drafter has none of them, and estimates no confidence.

    Args:
        drafter_type (`str`): `mtp`: the target's final hidden state and the next token, projected to one vector, then
            one decoder layer and the target's head; one draft per round (DeepSeek-V3, arXiv 2412.19437, section 2.2).
            `eagle3`: features of several target layers, fused by one matrix, then one layer whose attention reads
            embedding and hidden state side by side; it goes on from its own hidden states, and has a head of its own
            (arXiv 2503.01840).
        block_size (`int`, *optional*, defaults to 7): Drafts per round; 1 for `mtp`.
        target_layer_ids (`list[int]`): As in [`DSparkConfig`]; for `mtp` the last layer, whose output transformers
            returns behind the final norm.

    Raises:
        DSparkConfigError: a value breaks a rule, or an argument is unknown.
    """

    model_type = "dspark_autoregressive"

    drafter_type: str
    mask_token_id: int = 0  # never read: there are no masks
    num_hidden_layers: int = 1
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    _optional_on_load: ClassVar[frozenset[str]] = (
        DSparkConfig._optional_on_load
        | frozenset(FIXED_WHEN_AUTOREGRESSIVE)
        | {"layer_types", "markov_head_type", "mask_token_id"}
    )

    def _check_fields(self) -> None:
        check_autoregressive_config(self)

    @property
    def reads_final_hidden(self) -> bool:
        """True for MTP."""
        return self.drafter_type == "mtp"

    @property
    def has_own_head(self) -> bool:
        """Whether a head over the draft vocabulary is part of the drafter; else it borrows the target's."""
        return self.drafter_type == "eagle3"

    @classmethod
    def _derived_besides(cls, derived: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
        if overrides.get("drafter_type") != "mtp":
            return {}
        return {"block_size": 1, "target_layer_ids": [derived["num_target_layers"] - 1]}


AutoregressiveConfig.__init__ = raising_our_errors(AutoregressiveConfig.__init__)  # type: ignore[method-assign]
