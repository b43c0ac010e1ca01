"""Find which weight plays which part in a model somebody else wrote."""

from wellposed.roles._batch import own_batch as own_batch
from wellposed.roles._find import find_roles as find_roles
from wellposed.roles._find import patterns_of as patterns_of
from wellposed.roles._roles import ATTENTION as ATTENTION
from wellposed.roles._roles import FEEDFORWARD as FEEDFORWARD
from wellposed.roles._roles import ROLE_NAMES as ROLE_NAMES
from wellposed.roles._roles import AttentionRole as AttentionRole
from wellposed.roles._roles import EmbeddingRole as EmbeddingRole
from wellposed.roles._roles import FeedForwardRole as FeedForwardRole
from wellposed.roles._roles import Roles as Roles
from wellposed.roles._roles import RoleWeight as RoleWeight
from wellposed.roles._roles import distinct_paths as distinct_paths
from wellposed.roles._views import WeightView as WeightView
from wellposed.roles._views import block_of as block_of
from wellposed.roles._views import is_table as is_table
from wellposed.roles._views import is_transposed as is_transposed
from wellposed.roles._views import joined_views as joined_views
from wellposed.roles._views import sources_of as sources_of
from wellposed.roles._views import spans_of as spans_of
from wellposed.roles.adapters import is_stored as is_stored
from wellposed.roles.families import FAMILIES as FAMILIES
from wellposed.roles.families import Family as Family
