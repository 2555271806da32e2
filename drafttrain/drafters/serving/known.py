"""The layouts that this package knows; of equally strong signs, the first layout's decides."""

from drafttrain.drafters.serving.causal_lm_layout import CausalLMLayout
from drafttrain.drafters.serving.dflash2_layout import DFlash2Layout, DFlash2Speculators
from drafttrain.drafters.serving.dflash_layout import DFlashLayout, DFlashSpeculators
from drafttrain.drafters.serving.dspark_layout import DSparkLayout, DSparkSpeculators
from drafttrain.drafters.serving.eagle3_layouts import Eagle3Layout, Eagle3Speculators
from drafttrain.drafters.serving.eagle_layout import EagleLayout
from drafttrain.drafters.serving.layout import Layout, ServedLayout
from drafttrain.drafters.serving.medusa_layouts import FasterDecodingLayout, MedusaLayout
from drafttrain.drafters.serving.mtp_layout import MTPLayout
from drafttrain.drafters.serving.p_eagle_layout import PEagleLayout, PEagleSpeculators

LAYOUTS: tuple[Layout, ...] = (
    DFlashSpeculators(),  # first: it names the architecture of the native layout too
    Eagle3Speculators(),
    PEagleSpeculators(),
    DSparkSpeculators(),
    DFlash2Speculators(),
    DFlashLayout(),
    DFlash2Layout(),
    DSparkLayout(),
    PEagleLayout(),
    Eagle3Layout(),
    EagleLayout(),
    MTPLayout(),
    MedusaLayout(),
    FasterDecodingLayout(),
    CausalLMLayout(),
)


# vLLM's names for drafters, by their entry of conf/drafter and by the kinds of their files.
VLLM_METHODS: dict[str, str | None] = {
    **{layout.family: layout.method for layout in LAYOUTS if layout.method},
    "eagle3_1": Eagle3Layout.method,
    "ngram": "ngram",
    "small_lm": CausalLMLayout.method,
    **{layout.kind: layout.method for layout in LAYOUTS},
}
# Those of which vLLM must be told that one pass drafts all tokens.
VLLM_PARALLEL = frozenset(
    name for layout in LAYOUTS if layout.parallel for name in (layout.family, layout.kind)
)
# Those that lie in the target's checkpoint: vLLM is given no directory of the drafter's own.
VLLM_WITHIN = frozenset(
    layout.kind for layout in LAYOUTS if isinstance(layout, ServedLayout) and layout.within_target
)
