"""Published weights by name: of torchvision, of timm, and of any repository of the Hugging Face hub.

What was downloaded once is in the caches of torch (`TORCH_HOME`) and of the hub (`HF_HOME`), and is used from there
without a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import HybridparError, UsageError, nearest, not_installed, shortened
from hybridpar.models.timm_models import PREFIX, check_tag, create_timm_model
from hybridpar.models.torchvision_models import model_names
from hybridpar.models.weight_files import DEFAULT, HUB, clean, read_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Files of a hub's repository that hold weights, the first that is there.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin", "model.pt", "model.pth")

#: Arguments of timm's models that their weights do not depend on.
_NOT_OF_WEIGHTS = ("num_classes", "drop_rate", "drop_path_rate")


def published_weights(
    source: str, name: str | None, model: nn.Module, args: Mapping[str, object]
) -> tuple[str, dict[str, Tensor]]:
    """Weights by name."""
    if source.startswith(HUB):
        return source, _from_hub(source)
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if name is None and architecture:
        name = PREFIX + architecture
    if "_Weights." in source or (name is not None and name in model_names()):
        return _of_torchvision(source, name)
    if name is not None and name.startswith(PREFIX):
        return _of_timm(source, name, model, args)
    raise UsageError(
        f"--weights {shortened(source)}{f' with {name}' if name else ''}: there is no such file",
        "Models of torchvision and timm have weights by name; others take a file, a checkpoint, a run directory, or "
        "hf-hub:OWNER/NAME.",
        "Name a file.",
    )


def _not_to_be_had(label: str, cache: Path, url: str, reason: str) -> UsageError:
    return UsageError(
        f"the weights {label} are not in {cache}, and cannot be downloaded: {reason}",
        "Published weights are downloaded once, and then read from there.",
        f"Name a file, --weights FILE; or download {url} elsewhere, and copy it there.",
    )


def unreachable(url: str) -> str | None:
    """Why a server cannot be reached: its name is not known, it refuses connections, or there is no way to it."""
    import errno
    import socket
    import urllib.error
    import urllib.parse
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=2):
            return None
    except urllib.error.URLError as error:
        reason = error.reason
        no_way = isinstance(reason, OSError) and reason.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
        known = no_way or isinstance(reason, (socket.gaierror, ConnectionRefusedError))
        return f"{urllib.parse.urlsplit(url).hostname}: {reason}" if known else None
    except (OSError, ValueError):
        return None


def find_torchvision_weights(source: str, name: str | None) -> Any:
    """The entry of torchvision's enumeration of weights."""
    import torchvision

    if "_Weights." in source:
        try:
            return torchvision.models.get_weight(source)
        except (ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"--weights {shortened(source)}: torchvision has no such weights") from error
    assert name is not None
    weights = torchvision.models.get_model_weights(name)
    wanted = source.upper()
    if wanted not in weights.__members__:
        raise UsageError(
            f"--weights {shortened(source)}: torchvision has no such weights of {name}, and there is no such file",
            nearest(wanted, [DEFAULT, *weights.__members__]),
        )
    return weights[wanted]


def _of_torchvision(source: str, name: str | None) -> tuple[str, dict[str, Tensor]]:
    import torch

    weights = find_torchvision_weights(source, name)
    label = str(weights)
    cached = Path(torch.hub.get_dir(), "checkpoints") / os.path.basename(weights.url)
    if cached.is_file():
        return label, read_weights(cached)
    try:
        return label, clean(weights.get_state_dict(progress=False, check_hash=True, weights_only=True), label)
    except HybridparError:
        raise
    except Exception as error:
        raise _not_to_be_had(label, cached.parent, weights.url, _reason(error)) from error


def _of_timm(source: str, name: str, model: nn.Module, args: Mapping[str, object]) -> tuple[str, dict[str, Tensor]]:
    architecture, _, tag = name.removeprefix(PREFIX).partition(".")
    wanted = tag if source == DEFAULT else source
    full = f"{architecture}.{wanted}" if wanted else architecture
    if name.removeprefix(PREFIX).startswith(HUB):
        full = name.removeprefix(PREFIX)
    else:
        check_tag(full)
    given = getattr(model, "_model_args", args)  # timm keeps them
    same = {key: value for key, value in given.items() if key not in _NOT_OF_WEIGHTS}
    with _hub_or_cache() as unanswered:
        try:
            reference = create_timm_model(PREFIX + full, same, pretrained=True)
        except HybridparError:
            raise
        except Exception as error:
            if "No pretrained weights exist" in str(error):
                raise UsageError(
                    f"--weights {source}: timm has no weights of {full}", fix="Name a file of weights, or leave it out."
                ) from error
            raise hub_error(f"the weights {full} of timm", unanswered or error) from error
    config: Any = reference.pretrained_cfg
    label = ".".join(str(part) for part in (config.get("architecture") or full, config.get("tag")) if part)
    return PREFIX + label, reference.state_dict()


def _from_hub(source: str) -> dict[str, Tensor]:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise not_installed(f"--weights {shortened(source)} needs huggingface_hub", "timm") from error
    repository, _, revision = source.removeprefix(HUB).partition("@")
    problem: Exception | None = None
    with _hub_or_cache() as unanswered:
        for file in _HUB_FILES:
            try:
                return read_weights(Path(hf_hub_download(repository, file, revision=revision or None)))
            except LocalEntryNotFoundError as error:
                problem = problem or error
            except EntryNotFoundError:
                continue
            except HybridparError:
                raise
            except Exception as error:
                raise hub_error(f"the weights {source}", unanswered or error) from error
    if problem is not None:
        raise hub_error(f"the weights {source}", unanswered or problem) from problem
    raise UsageError(f"--weights {shortened(source)}: the repository has none of {', '.join(_HUB_FILES)}")


@contextmanager
def _hub_or_cache() -> Iterator[str | None]:
    """Inside, only the cache is looked at where the hub does not answer, which its client would try for a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    unanswered = None if before else unreachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = before or unanswered is not None
    try:
        yield unanswered
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_error(what: str, error: Exception | str) -> UsageError:
    """The error for what is not in the hub's cache and cannot be had from the hub."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return UsageError(
        f"{what} cannot be had from the Hugging Face hub, and are not in its cache: {_reason(error)}",
        "HF_HUB_OFFLINE is set, so only the cache is looked at." if offline else "What was downloaded once is cached.",
        ("Unset HF_HUB_OFFLINE, or d" if offline else "See that the network is up, or d")
        + "ownload them elsewhere, and name the file: --weights FILE.",
    )


def _reason(error: Exception | str) -> str:
    if isinstance(error, str):
        return error
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return shortened(f"{type(error).__name__}: {text}" if text else type(error).__name__, 300)
