"""Orthogonality, Lipschitz bounds and certificates for any PyTorch Transformer.

Seven verbs on one noun, the role of a weight: find (`find_roles`), penalize
(`OrthogonalityPenalty`), constrain (`constrain_`), measure (`measure`), initialize (`t_fixup_`),
certify (`certify`) and attack (`lipschitz_lower_bound`). Models of PyTorch and Hugging Face are
measured and penalised unchanged. Certificates are for models built from this package's layers,
linear layers, activations and norms; any other module is named, and has no bound.

The public names are imported on first use, so that ``wellposed --help`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.lazy import import_on_first_use
from wellposed.version import __version__ as __version__

if TYPE_CHECKING:
    from wellposed import attack as attack
    from wellposed import certification as certification
    from wellposed import constrain as constrain
    from wellposed import errors as errors
    from wellposed import functional as functional
    from wellposed import initialize as initialize
    from wellposed import integrations as integrations
    from wellposed import linalg as linalg
    from wellposed import measurement as measurement
    from wellposed import models as models
    from wellposed import nn as nn
    from wellposed import optim as optim
    from wellposed import penalize as penalize
    from wellposed import presets as presets
    from wellposed import roles as roles
    from wellposed import words as words
    from wellposed.attack import lipschitz_lower_bound as lipschitz_lower_bound
    from wellposed.certification import Certificate as Certificate
    from wellposed.certification import certify as certify
    from wellposed.certification import register_rule as register_rule
    from wellposed.constrain import constrain_ as constrain_
    from wellposed.constrain import parameter_groups as parameter_groups
    from wellposed.errors import CheckpointError as CheckpointError
    from wellposed.errors import ConfigError as ConfigError
    from wellposed.errors import ConvergenceError as ConvergenceError
    from wellposed.errors import DataError as DataError
    from wellposed.errors import NotContractiveError as NotContractiveError
    from wellposed.errors import NotLipschitzError as NotLipschitzError
    from wellposed.errors import RoleNotFoundError as RoleNotFoundError
    from wellposed.errors import ShapeError as ShapeError
    from wellposed.errors import WellposedError as WellposedError
    from wellposed.initialize import dt_fixup_ as dt_fixup_
    from wellposed.initialize import remove_norms_ as remove_norms_
    from wellposed.initialize import t_fixup_ as t_fixup_
    from wellposed.measurement import Measurement as Measurement
    from wellposed.measurement import Monitor as Monitor
    from wellposed.measurement import measure as measure
    from wellposed.penalize import OrthogonalityPenalty as OrthogonalityPenalty
    from wellposed.roles import Roles as Roles
    from wellposed.roles import find_roles as find_roles
else:
    __getattr__, __dir__ = import_on_first_use(
        __name__,
        {
            "": (
                "attack certification constrain errors functional initialize integrations "
                "linalg measurement models nn optim penalize presets roles words"
            ),
            "attack": "lipschitz_lower_bound",
            "certification": "Certificate certify register_rule",
            "constrain": "constrain_ parameter_groups",
            "errors": (
                "CheckpointError ConfigError ConvergenceError DataError "
                "NotContractiveError NotLipschitzError RoleNotFoundError ShapeError "
                "WellposedError"
            ),
            "initialize": "dt_fixup_ remove_norms_ t_fixup_",
            "measurement": "Measurement Monitor measure",
            "penalize": "OrthogonalityPenalty",
            "roles": "Roles find_roles",
        },
        gone={
            "orthogonal": "use constrain_(..., to='orthogonal'), or"
            " torch.nn.utils.parametrizations.orthogonal",
            "tie_queries_and_keys_": "give each attention one Parameter: key.weight = query.weight",
            "recipes": "import wellposed_studies",
            **{
                name: f"import wellposed_lab.{name}"
                for name in ("charts", "cli", "compare", "plugins", "report", "tasks", "training")
            },
        },
    )
