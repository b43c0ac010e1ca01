"""One file per model family; a new family is one file here, imported below, that registers
itself."""

from wellposed.roles.families import _bart as _bart
from wellposed.roles.families import _bert as _bert
from wellposed.roles.families import _distilbert as _distilbert
from wellposed.roles.families import _gpt2 as _gpt2
from wellposed.roles.families import _l2 as _l2
from wellposed.roles.families import _llama as _llama
from wellposed.roles.families import _phi3 as _phi3
from wellposed.roles.families import _t5 as _t5
from wellposed.roles.families import _torch as _torch
from wellposed.roles.families import _vit as _vit
from wellposed.roles.families import _wellposed as _wellposed
from wellposed.roles.families._family import FAMILIES as FAMILIES
from wellposed.roles.families._family import Family as Family
from wellposed.roles.families._family import attention_fused as attention_fused
from wellposed.roles.families._family import attention_named as attention_named
from wellposed.roles.families._family import feedforward_named as feedforward_named
