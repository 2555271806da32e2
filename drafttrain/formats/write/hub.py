"""Push an export to the Hugging Face Hub with the Hub's own client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOW_TO_LOG_IN = (
    "make a token with write permission at https://huggingface.co/settings/tokens, then run "
    "`hf auth login` or set HF_TOKEN"
)
TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2")


def plan_push(folder: Path, files: Sequence[str], repo: str, private: bool) -> list[str]:
    """Return lines with what a push would upload: the dry run, which does not use the network."""
    sizes = {name: (folder / name).stat().st_size for name in files}
    kind = "private" if private else "public"
    lines = [f"dry run: would upload {len(sizes)} files from {folder} to {repo} ({kind}):"]
    lines += [f"  {name:<18} {size:>14,} bytes" for name, size in sizes.items()]
    lines.append(f"  {'in all':<18} {sum(sizes.values()):>14,} bytes; nothing was sent")
    return lines


def check_push(repo: str, private: bool) -> None:
    """Raise the errors of `push` that can be known before there is anything to upload.

    ValueError if there is no network or token, if the token's user may not write to that namespace,
    or if the repository is public but private was asked for. Creates nothing.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    with _client(repo, "; nothing was exported yet") as api:
        user = api.whoami()
        names = [user["name"], *(org["name"] for org in user.get("orgs") or [])]
        if repo.partition("/")[0] not in names:
            raise ValueError(
                f"export.push={repo} must name a repository of {' or '.join(names)}, whose token "
                f"this is; push to one of those, or {HOW_TO_LOG_IN}"
            )
        try:
            found = api.repo_info(repo)
        except RepositoryNotFoundError:
            return
        _check_private(repo, private, found.private)


def push(folder: Path, files: Sequence[str], repo: str, private: bool) -> str:
    """Upload the named files of `folder` to the Hub repository user/repo; return its address.

    The repository is created if necessary, private if asked; an existing public one is refused if
    private was asked for. The endpoint is the client's own (HF_ENDPOINT). ValueError, with what to
    do, if there is no token, no permission, no network, or no such name.
    """
    kept = (
        f"; the export is complete in {folder}: push it again with export.overwrite=true, which "
        "writes it again"
    )
    with _client(repo, kept) as api:
        url = api.create_repo(repo, private=private, exist_ok=True)
        _check_private(repo, private, not private or api.repo_info(repo).private)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="Upload drafter with drafttrain",
        )
    return str(url)


def _check_private(repo: str, wanted: bool, found: bool) -> None:
    if wanted and not found:
        raise ValueError(
            f"export.push={repo} exists and is public, but export.private=true; nothing was "
            "uploaded: set export.private=false, or choose another repository"
        )


@contextmanager
def _client(repo: str, kept: str) -> Iterator[Any]:
    """Yield the Hub's client; its errors become a ValueError that says what to do.

    kept: a clause on what is left on this machine after a failure.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api, asked = HfApi(library_name="drafttrain"), f"export.push={repo}"
    try:
        if get_token() is None:
            raise ValueError(f"{asked} needs a token, got none; {HOW_TO_LOG_IN}")
        yield api
    except OfflineModeIsEnabled as error:
        raise ValueError(
            f"{asked} needs the network, but HF_HUB_OFFLINE is set; unset it, or push from a "
            f"machine with network{kept}"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{asked} must be a valid user/repo: {error}") from error
    except HfHubHTTPError as error:
        raise ValueError(f"{asked}: {_refusal(repo, api.endpoint, error, kept)}") from error
    except RuntimeError as error:  # the client raises it for a failure between two files
        cause = error.__cause__ or error
        raise ValueError(f"{asked}: {error} ({cause}); {repo} may be incomplete{kept}") from error
    except Exception as error:
        # The base class of the client's transport errors changes with its version.
        module = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and module not in TRANSPORTS:
            raise
        raise ValueError(
            f"{asked}: {api.endpoint} cannot be reached ({error}); push from a machine with "
            f"network{kept}"
        ) from error


def _refusal(repo: str, endpoint: str, error: Exception, kept: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    says = (str(error).strip() or type(error).__name__).splitlines()[-1]
    if status == 401:
        return f"{endpoint} does not accept this token; {HOW_TO_LOG_IN}"
    if status == 403:
        return (
            f"this token may not write to {repo.partition('/')[0]!r}; push to a user or "
            f"organisation of your own, or use a token with write permission ({says})"
        )
    if status == 404:
        return f"{endpoint} has no such repository for this token ({says})"
    return f"{endpoint} answered {status or 'nothing'} ({says}){kept}"
