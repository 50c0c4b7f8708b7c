"""Models from the Hugging Face hub: safe files only, through huggingface_hub's own cache."""

import os
import re
import sys
from pathlib import Path

HUB_PREFIX = "hf:"
HUB_FORM = "hf:org/name[@revision]"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # of files that are never read

_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
# Data that cannot run: no pickle (.bin, .pt, .pth, .ckpt, .pkl) and no code (.py) is ever downloaded.
_SAFE_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
# Folders hold the same weights for other programs; so does Mistral's consolidated file.
_SECOND_COPIES = ("*/*", "consolidated*.safetensors")


class FetchError(RuntimeError):
    """A model that cannot be found or brought here; the message says what to do."""


def fetch_snapshot(name: str, *, cache_dir: Path | None = None) -> Path:
    """Returns the folder of a hub model's files, downloaded where they are not in the cache yet.

    HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub.

    Args:
        name: `hf:org/name` or `hf:org/name@revision` (a branch, a tag or a commit).
        cache_dir: the hub's cache folder; huggingface_hub's own by default, shared with other programs.

    Returns:
        A folder with the safetensors, configuration and tokenizer files of one commit.

    Raises:
        FetchError: for a name of another form, without the extra `hub`, or when the model is not to be had.
    """
    match = _HUB_NAME.fullmatch(name.removeprefix(HUB_PREFIX))
    if not match:
        raise FetchError(
            f"model {name!r} is not of the form {HUB_FORM}, such as hf:HuggingFaceTB/SmolLM2-135M"
        )
    folder = _download(name, match["repo"], match["revision"], cache_dir)
    if not any(folder.glob("*.safetensors")):
        raise FetchError(
            f"{name} has no safetensors files at its top: pickled weights are never read; a GGUF file can be "
            "downloaded by hand and named by its path"
        )
    return folder


def _download(name: str, repo: str, revision: str | None, cache_dir: Path | None) -> Path:
    """Returns the snapshot's folder, with the hub's errors in words that say what to do."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise FetchError(
            f"{name} needs huggingface_hub: install the extra, pip install 'jaxinfer[hub]'"
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    # Read here because huggingface_hub reads it once, when something first imports it.
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            endpoint=endpoint,
            allow_patterns=list(_SAFE_FILES),
            ignore_patterns=list(_SECOND_COPIES),
        )
    except errors.GatedRepoError as error:
        what = f"is gated: accept its terms at {endpoint}/{repo}, and set HF_TOKEN to a token of that account"
        raise FetchError(f"{name} {what}") from error
    except errors.RepositoryNotFoundError as error:
        what = f"is not at {endpoint}, or is private: check the name, or set HF_TOKEN to one that may read it"
        raise FetchError(f"{name} {what}") from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{repo} has no revision {revision!r}: see {endpoint}/{repo}/tree/main") from error
    except (errors.HFValidationError, OSError) as error:
        raise FetchError(
            f"{name} could not be fetched from {endpoint} and is not in the cache: {error}"
        ) from error
    return Path(folder)
