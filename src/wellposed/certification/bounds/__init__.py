"""Proved bounds of maps, apart from the rules that use them."""

from wellposed.certification.bounds._branch import branch_bound as branch_bound
from wellposed.certification.bounds._chain import chain_bound as chain_bound
from wellposed.certification.bounds._convolution import convolution_norm as convolution_norm
from wellposed.certification.bounds._network import Link as Link
from wellposed.certification.bounds._network import Matrix as Matrix
from wellposed.certification.bounds._network import Network as Network
from wellposed.certification.bounds._network import Slopes as Slopes
from wellposed.certification.bounds._network import SortedPairs as SortedPairs
from wellposed.certification.bounds._network import network_of as network_of
from wellposed.certification.bounds._tightest import BRANCH as BRANCH
from wellposed.certification.bounds._tightest import NO_BOUND as NO_BOUND
from wellposed.certification.bounds._tightest import Tight as Tight
from wellposed.certification.bounds._tightest import tight_slope as tight_slope
from wellposed.certification.bounds._tightest import tightest_bound as tightest_bound
