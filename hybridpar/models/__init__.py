"""Models by name, what is set in them before training, and how they are told apart.

`build_model` builds a model of torchvision, of timm or of the user's own. Importing this package imports neither torch
nor torchvision.
"""

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
