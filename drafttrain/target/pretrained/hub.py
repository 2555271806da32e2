"""Download a model from the Hugging Face Hub, or say in one sentence why that is impossible."""

import functools
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from drafttrain.target.pretrained import files

HOME = Path(constants.HF_HOME)  # models are kept below it
ANSWER_S = 10.0  # how long the Hub may take to answer before it counts as unreachable
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
# Subfolders hold other formats (original/*.pth); Mistral's repositories hold the weights twice.
NEVER = ["*/*", "consolidated*"]


@functools.cache
def download(
    name: str, repo: str, revision: str | None, weights: bool, code: bool, pickle: bool
) -> Path:
    """Return the local folder of a repository at a revision, downloading what is not there yet.

    Configuration and tokenizer always; weights if asked (safetensors, else pickled if allowed);
    Python files only if `code`. If the Hub cannot be reached, a copy in the local cache is used;
    if there is none, the ValueError says what to do. The Hub is asked once per process.
    """
    patterns = SMALL_FILES + (["*.py"] if code else [])
    example = f"model.path=/models/{repo.rsplit('/', 1)[-1]}"
    instead = f"point model.path at a local directory that holds the model, for example {example}"
    snapshot = functools.partial(
        huggingface_hub.snapshot_download, repo, revision=revision, ignore_patterns=NEVER
    )
    try:
        # Asked first: this request fails at once, whereas a download retries for a long time.
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=ANSWER_S)
        names = [file.rfilename for file in info.siblings or []]
        safe = any(name.endswith(".safetensors") for name in names)
        unsafe = any(name.endswith(".bin") for name in names) and not safe
        if weights:
            patterns.append("*.bin" if unsafe and pickle else "*.safetensors")
        # By the name that the user gave, so that the cache finds it by that name without the Hub.
        folder = snapshot(allow_patterns=patterns)
    except errors.HFValidationError as error:
        raise ValueError(f"model.repo must be like owner/name, got {repo!r}") from error
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{repo}"
        raise ValueError(
            f"model={name}: {repo} is gated: accept its licence at {page}, then log in with `hf"
            f" auth login` or set HF_TOKEN; or {instead}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"model.revision must be a branch, tag or commit of {repo}, got {revision!r}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model={name}: the Hugging Face Hub has no {repo} that you may read; check model.repo,"
            f" or log in with `hf auth login` or HF_TOKEN if it is private; or {instead}"
        ) from error
    except Exception as error:  # every transport has its own errors; all mean the same here
        unsafe = False
        wanted = [*patterns, "*.safetensors"] if weights else patterns
        try:
            folder = snapshot(allow_patterns=wanted, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            raise ValueError(
                f"model={name}: cannot reach the Hugging Face Hub for {repo}; {instead} ({reason})"
            ) from error
    if unsafe and not pickle:
        raise ValueError(files.only_pickled(f"model.repo={repo}"))
    return Path(folder)


def cached_config(repo: str, revision: str | None) -> Path | None:
    """Return a repository's config.json from the local cache, or None; the Hub is not asked."""
    found = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None
