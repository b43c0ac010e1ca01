"""Variants: functions from a base `RunConfig` to the `RunConfig` of one kind of Transformer.

A new one is a function that is registered in `VARIANTS`. ``name:value`` passes a number (or a text
if annotated ``str``): ``oc3:1e-4``. Options of the base that only apply to replaced parts are
dropped; `check_options` reports this, and refuses to drop others.
"""

from wellposed_lab.compare.variants._architectures import post_ln as post_ln
from wellposed_lab.compare.variants._check import check_options as check_options
from wellposed_lab.compare.variants._constraints import TRANSFORMER_WEIGHTS as TRANSFORMER_WEIGHTS
from wellposed_lab.compare.variants._lipschitz import (
    LIPSCHITZ_LOGIT_SCALE as LIPSCHITZ_LOGIT_SCALE,
)
from wellposed_lab.compare.variants._lipschitz import LIPSCHITZ_RATE as LIPSCHITZ_RATE
from wellposed_lab.compare.variants._lipschitz import LIPSCHITZ_WEIGHTS as LIPSCHITZ_WEIGHTS
from wellposed_lab.compare.variants._penalties import key as key
from wellposed_lab.compare.variants._registry import VARIANTS as VARIANTS
from wellposed_lab.compare.variants._registry import Variant as Variant
from wellposed_lab.compare.variants._registry import apply_variant as apply_variant
from wellposed_lab.compare.variants._registry import summary as summary
from wellposed_lab.compare.variants._registry import variant_folder as variant_folder
from wellposed_lab.compare.variants._transject import EMBEDDING as EMBEDDING
from wellposed_lab.compare.variants._transject import TRANSJECT_RATE as TRANSJECT_RATE
