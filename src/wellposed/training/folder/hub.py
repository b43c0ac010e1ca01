"""The saved model of a run, uploaded to the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from wellposed.errors import ConfigError, DataError, WellposedError
from wellposed.training.folder import manifest

CARD = "README.md"


def check_repository(name: str) -> None:
    """Refuse a name that no repository of the hub can have, before anything is trained for it.

    Raises:
        ConfigError: such a name.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        problem = f"{name}: not the name of a repository ({error})"
        raise ConfigError(f"{problem}; expected NAME or OWNER/NAME") from error


def push_to_hub(folder: Path, repository: str, *, public: bool = False) -> str:
    """Upload every file of ``folder``, a saved model, and its model card, in which ``FOLDER``
    becomes the repository.

    Status: exact; the files are checked against their manifest first.

    Args:
        folder: ``final/`` of a run.
        repository: ``NAME`` or ``OWNER/NAME``; made where it is missing, private unless ``public``.
            One that exists stays as visible as it is.
        public: make it for everyone to see.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: a name that no repository can have.
        DataError: no such folder, or one without a model.
        CheckpointError: files that are missing, cut or altered.
        WellposedError: no token, no network, or a refusal of the hub; the folder stays as it is.

    Cost: the upload. When not to use: for data that may not leave the house; weights can hold parts
    of it.

    >>> push_to_hub(Path("absent"), "me/model")
    Traceback (most recent call last):
    ...
    wellposed.errors.DataError: absent: no saved model there; name a finished run or its final/
    """
    check_repository(repository)
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no saved model there; name a finished run or its final/")
    manifest.verify_final(folder)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=[CARD])
        if (folder / CARD).is_file():
            card = (folder / CARD).read_text(encoding="utf-8")
            card = card.replace('"FOLDER"', f'"{address.repo_id}"').encode()
            api.upload_file(path_or_fileobj=card, path_in_repo=CARD, repo_id=address.repo_id)
    except Exception as error:  # of a client library: tokens, addresses, transport, refusals
        said = str(error).strip().partition("\n")[0]
        asked = ["--public"] if public else []
        again = shlex.join(["wellposed", "push", str(folder), repository, *asked])
        raise WellposedError(
            f"{folder} is saved and was not uploaded to {repository}: {type(error).__name__}:"
            f" {said}; log in with `hf auth login` or set HF_TOKEN, then try again with: {again}"
        ) from error
    return str(address)
