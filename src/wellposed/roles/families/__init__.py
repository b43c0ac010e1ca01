"""One file per model family; a new family is one file here, imported below, that registers itself."""

from wellposed.roles.families import _bert as _bert
from wellposed.roles.families import _llama as _llama
from wellposed.roles.families import _torch as _torch
from wellposed.roles.families import _wellposed as _wellposed
from wellposed.roles.families._family import FAMILIES as FAMILIES
from wellposed.roles.families._family import Family as Family
