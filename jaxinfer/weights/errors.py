"""What can be wrong with a checkpoint; every error of tensors lists all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message names the file and what to do."""


class CorruptFileError(CheckpointError):
    """A file is truncated or breaks its own format."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; the file is truncated or corrupt, fetch or convert it again")


class UnsupportedFormatError(CheckpointError):
    """A file is whole, but of a kind that is not read here (pickle, an unknown version or number format)."""


class MissingFilesError(CheckpointError):
    """Files that a checkpoint is made of are not there."""

    def __init__(self, wanted_by: Path, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(
            f"{wanted_by}: {len(self.names)} file(s) absent beside it: {', '.join(self.names)}; fetch them"
        )


class TensorsError(CheckpointError):
    """One fault, and every tensor that has it.

    Attributes:
      names: the tensors' names in the checkpoint, sorted.
    """

    problem: ClassVar[str]
    cure: ClassVar[str]

    def __init__(self, path: Path, faults: Iterable[tuple[str, str]]) -> None:
        """Args: the checkpoint, and for each tensor its name and what more there is to say of it ("" for nothing)."""
        lines = sorted(set(faults))
        self.names = tuple(sorted({name for name, _ in lines}))
        listing = "\n".join(f"  {name}: {detail}" if detail else f"  {name}" for name, detail in lines)
        super().__init__(f"{path}: {len(self.names)} tensor(s) {self.problem}; {self.cure}:\n{listing}")


class MissingTensorsError(TensorsError):
    """The model needs tensors that the checkpoint does not hold."""

    problem = "missing"
    cure = "the download is incomplete or the configuration is another model's"


class ExtraTensorsError(TensorsError):
    """The checkpoint holds tensors that the model has no place for."""

    problem = "that the model has no place for"
    cure = "dropping them would change what the model computes, so it is refused"


class DoubledTensorsError(TensorsError):
    """A name stands twice, so that it is unclear which tensor is meant."""

    problem = "held more than once"
    cure = "remove the copy that does not belong"


class MisshapenTensorsError(TensorsError):
    """Tensors do not have the shape that the configuration implies."""

    problem = "of the wrong shape"
    cure = "the configuration and the tensors are of different models"


class NonFiniteTensorsError(TensorsError):
    """Tensors hold NaN or infinity, or overflow the wanted number format."""

    problem = "not finite"
    cure = "the checkpoint is damaged, or a 16-bit policy is too narrow for it"


class UnsupportedTensorsError(TensorsError, UnsupportedFormatError):
    """Tensors have a number format that is not read here."""

    problem = "of a number format that is not read"
    cure = "convert the checkpoint to a format of the list in the README"
