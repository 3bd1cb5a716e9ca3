"""Models by name, what is set in them before training, and how they are told apart.

`build_model` builds a model of torchvision, of timm or of the user's own. Importing this package imports neither torch
nor torchvision, so that names can be checked at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridpar.registry import lazy_names

if TYPE_CHECKING:
    from hybridpar.models.build import article as article
    from hybridpar.models.build import build_model as build_model
    from hybridpar.models.build import check_model_name as check_model_name
    from hybridpar.models.build import model_fingerprint as model_fingerprint
    from hybridpar.models.build import model_names as model_names
    from hybridpar.models.build import parameter_count as parameter_count
    from hybridpar.models.build import parse_arguments as parse_arguments
    from hybridpar.models.build import require_trained as require_trained
    from hybridpar.models.layers import freeze as freeze
    from hybridpar.models.layers import learning_rate_scales as learning_rate_scales
    from hybridpar.models.outputs import autocast as autocast
    from hybridpar.models.weights import load_weights as load_weights

_MODULES = {
    "build": "article build_model check_model_name model_fingerprint model_names parameter_count parse_arguments "
    "require_trained",
    "layers": "freeze learning_rate_scales",
    "outputs": "autocast",
    "weights": "load_weights",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
