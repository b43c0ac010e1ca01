"""Models that load and save as in Hugging Face; importing this adds them to the Auto classes."""

from wellposed.errors import missing_extra
from wellposed.removed_names import removed_names

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra("transformers", "hf", "wellposed.models") from error


from wellposed.models._build import ARCHITECTURES as ARCHITECTURES
from wellposed.models._build import AUTO_CLASSES as AUTO_CLASSES
from wellposed.models._build import Architecture as Architecture
from wellposed.models._build import (
    AutoModelForSequencePairClassification as AutoModelForSequencePairClassification,
)
from wellposed.models._build import build_model as build_model
from wellposed.models._build import model_keywords as model_keywords
from wellposed.models._build import register_family as register_family
from wellposed.models._card import loading_lines as loading_lines
from wellposed.models._certification import embedding_radius as embedding_radius
from wellposed.models._certification import input_vectors as input_vectors
from wellposed.models._config import TransJectConfig as TransJectConfig
from wellposed.models._config import WellposedConfig as WellposedConfig
from wellposed.models._families import TransJectForCausalLM as TransJectForCausalLM
from wellposed.models._families import TransJectForMaskedLM as TransJectForMaskedLM
from wellposed.models._families import (
    TransJectForSequenceClassification as TransJectForSequenceClassification,
)
from wellposed.models._families import (
    TransJectForSequencePairClassification as TransJectForSequencePairClassification,
)
from wellposed.models._families import (
    TransJectForTokenClassification as TransJectForTokenClassification,
)
from wellposed.models._families import TransJectHeadOutput as TransJectHeadOutput
from wellposed.models._families import WellposedForCausalLM as WellposedForCausalLM
from wellposed.models._families import WellposedForMaskedLM as WellposedForMaskedLM
from wellposed.models._families import (
    WellposedForSequenceClassification as WellposedForSequenceClassification,
)
from wellposed.models._families import (
    WellposedForSequencePairClassification as WellposedForSequencePairClassification,
)
from wellposed.models._families import (
    WellposedForTokenClassification as WellposedForTokenClassification,
)
from wellposed.models._heads import PairHead as PairHead
from wellposed.models._hub import model_card as model_card
from wellposed.models._hub import push_to_hub as push_to_hub
from wellposed.models._init import INITS as INITS
from wellposed.models._init import POOLINGS as POOLINGS
from wellposed.models._init import Initializer as Initializer
from wellposed.models._init import xavier_ as xavier_
from wellposed.models._loading import auto_class as auto_class
from wellposed.models._loading import draw_model as draw_model
from wellposed.models._loading import load_pretrained as load_pretrained
from wellposed.models._loading import load_pretrained_model as load_pretrained_model
from wellposed.models._loading import load_saved_model as load_saved_model
from wellposed.models._loading import load_with_report as load_with_report
from wellposed.models._loading import quiet_transformers as quiet_transformers
from wellposed.models._loading import reads_images as reads_images
from wellposed.models._loading import refuse_computed_weights as refuse_computed_weights
from wellposed.models._loading import refuse_other_shapes as refuse_other_shapes
from wellposed.models._loading import start_config as start_config
from wellposed.models._loading import text_positions as text_positions
from wellposed.models._seq2seq import GNMTLengthPenalty as GNMTLengthPenalty
from wellposed.models._seq2seq import WellposedDecoder as WellposedDecoder
from wellposed.models._seq2seq import WellposedForSeq2SeqLM as WellposedForSeq2SeqLM
from wellposed.models._seq2seq import WellposedSeq2SeqModel as WellposedSeq2SeqModel
from wellposed.models._stored_dtypes import stored_dtypes as stored_dtypes
from wellposed.models._transject import TransJectModel as TransJectModel
from wellposed.models._transject import TransJectModelOutput as TransJectModelOutput
from wellposed.models._transject import TransJectPreTrainedModel as TransJectPreTrainedModel
from wellposed.models._wellposed import WellposedModel as WellposedModel
from wellposed.models._wellposed import WellposedPreTrainedModel as WellposedPreTrainedModel
from wellposed.models._windows import LOGIT_SCALE as LOGIT_SCALE
from wellposed.models._windows import WindowConfig as WindowConfig
from wellposed.models._windows import (
    WindowsForSequenceClassification as WindowsForSequenceClassification,
)

__getattr__ = removed_names(__name__, {"SHARPNESS": "use LOGIT_SCALE"})
