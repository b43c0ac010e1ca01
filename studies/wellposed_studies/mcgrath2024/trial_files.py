"""The file of one finished training of a sweep: a JSON object that holds the SHA-256 of the rest of
it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed.training.folder.durable_files import replace_file

Record = dict[str, Any]
"""What a result file of a training holds."""
DIGEST = "sha256"
_COMMON = {"cell": str, "seed": int, "status": str}
_OF_STATUS: dict[str, dict[str, Any]] = {
    "success": {"scores": dict, "cpu_seconds": (int, float), "errors": list},
    "failed": {"error": str},
}
_OPTIONAL = {"scale_free_errors": list}  # version 0.1 wrote none
_SCORES = ("sst", "para", "sts", "overall")


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` in one step."""
    replace_file(path, to_json({**record, DIGEST: _digest(record)}, indent=1))


def read_record(path: Path) -> Record:
    """Return what `write_record` was given.

    Raises:
        CheckpointError: the file cannot be read, or is not what was written.
    """
    try:
        record = from_json(path.read_bytes())
        _refuse_damage(record)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {error}; remove it and resume the sweep, which trains it again"
        ) from error
    return record


def _refuse_damage(record: Any) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"is a {type(record).__name__}, expected the result of a training")
    given = record.pop(DIGEST, None)  # version 0.1 wrote none
    if given is not None and given != (found := _digest(record)):
        raise ValueError(f"SHA-256 is {found}, expected {given} (altered)")
    wanted = {**_COMMON, **_OF_STATUS.get(str(record.get("status")), {"status": type(None)})}
    wanted |= {name: kind for name, kind in _OPTIONAL.items() if name in record}
    wrong = [name for name, kind in wanted.items() if not isinstance(record.get(name), kind)]
    if not wrong and record["status"] == "success":
        scores = record["scores"]
        wrong = [
            f"scores.{name}" for name in _SCORES if not isinstance(scores.get(name), (int, float))
        ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} missing or of another type, so it is not the result of a training"
        )


def _digest(record: Record) -> str:
    return sha256(to_json(record)).hexdigest()
