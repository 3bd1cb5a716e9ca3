"""Models by name, what is set in them before training, and how they are told apart.

`build_model` builds a model of torchvision, of timm or of the user's own. Importing this package imports neither torch
nor torchvision, so that names can be checked at once.
"""

from hybridpar.models.build import (
    article,
    build_model,
    check_model_name,
    model_fingerprint,
    model_names,
    parameter_count,
    parse_arguments,
    require_trained,
)
from hybridpar.models.layers import freeze, learning_rate_scales
from hybridpar.models.outputs import autocast
from hybridpar.models.weights import load_weights

__all__ = [
    "article",
    "autocast",
    "build_model",
    "check_model_name",
    "freeze",
    "learning_rate_scales",
    "load_weights",
    "model_fingerprint",
    "model_names",
    "parameter_count",
    "parse_arguments",
    "require_trained",
]
