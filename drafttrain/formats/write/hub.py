"""Pushing an export to the Hugging Face Hub with its own client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HOW_TO_LOG_IN = (
    "make a token with write permission at https://huggingface.co/settings/tokens, then run "
    "`hf auth login` or set HF_TOKEN"
)


def plan_push(folder: Path, files: Sequence[str], repo: str, private: bool) -> list[str]:
    """Return what a push would upload, as lines to print: the dry run. Touches no network."""
    sizes = {name: (folder / name).stat().st_size for name in files}
    kind = "private" if private else "public"
    lines = [f"dry run: would upload {len(sizes)} files from {folder} to {repo} ({kind}):"]
    lines += [f"  {name:<18} {size:>14,} bytes" for name, size in sizes.items()]
    lines.append(f"  {'in all':<18} {sum(sizes.values()):>14,} bytes; nothing was sent")
    return lines


def check_push(repo: str, private: bool) -> None:
    """Raise what `push` would, as far as it can be known before there is anything to upload.

    ValueError where there is no network or token, where the token's user may not write to that
    namespace, and where the repository is public though private was asked. Creates nothing.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(library_name="drafttrain")
    with _told(repo, None, api.endpoint):
        if get_token() is None:
            raise ValueError(f"export.push={repo} needs a token, got none; {HOW_TO_LOG_IN}")
        user = api.whoami()
        names = [user["name"], *(org["name"] for org in user.get("orgs") or [])]
        if repo.partition("/")[0] not in names:
            raise ValueError(
                f"export.push={repo} must name a repository of {' or '.join(names)}, whose token "
                f"this is; push to one of those, or {HOW_TO_LOG_IN}"
            )
        try:
            public = not api.repo_info(repo).private
        except RepositoryNotFoundError:
            return
        if private and public:
            raise ValueError(_public(repo))


def _public(repo: str) -> str:
    return (
        f"export.push={repo} exists and is public, but export.private=true; nothing was "
        "uploaded: set export.private=false, or choose another repository"
    )


def push(folder: Path, files: Sequence[str], repo: str, private: bool) -> str:
    """Upload the named files of `folder` to the Hub repository user/repo; return its address.

    The repository is created if need be, private if asked; one that exists and is public is refused
    where private was asked. The endpoint is the client's own (HF_ENDPOINT). ValueError, with what
    to do, where there is no token, no permission, no network, or no such name.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi(library_name="drafttrain")
    with _told(repo, folder, api.endpoint):
        if get_token() is None:
            raise ValueError(f"export.push={repo} needs a token, got none; {HOW_TO_LOG_IN}")
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise ValueError(_public(repo))
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="Upload drafter with drafttrain",
        )
    return str(url)


@contextmanager
def _told(repo: str, folder: Path | None, endpoint: str) -> Iterator[None]:
    """Turn what the client raises into a ValueError that says what to do.

    folder: of the export that is to be uploaded, None before it is written.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ValueError(
            f"export.push={repo} needs the network, but HF_HUB_OFFLINE is set; unset it, or "
            f"push from a machine with network{_kept(folder)}"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"export.push={repo} must be a valid user/repo: {error}") from error
    except HfHubHTTPError as error:
        raise ValueError(_refusal(repo, folder, endpoint, error)) from error
    except OSError as error:
        raise ValueError(_unreachable(repo, folder, endpoint, error)) from error
    except RuntimeError as error:  # what the client makes of a failure between two files
        cause = error.__cause__ or error
        raise ValueError(
            f"export.push={repo}: {error} ({cause}); {repo} may be incomplete{_kept(folder)}"
        ) from error
    except Exception as error:
        # The client's transport errors share no base class that does not change with its version.
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise ValueError(_unreachable(repo, folder, endpoint, error)) from error
        raise


def _kept(folder: Path | None) -> str:
    if folder is None:
        return "; nothing was exported yet"
    return (
        f"; the export is complete in {folder}: push it again with export.overwrite=true, which "
        "writes it anew"
    )


def _refusal(repo: str, folder: Path | None, endpoint: str, error: Exception) -> str:
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    says = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    if status == 401:
        return f"export.push={repo}: {endpoint} does not accept this token; {HOW_TO_LOG_IN}"
    if status == 403:
        return (
            f"export.push={repo}: this token may not write to {repo.partition('/')[0]!r}; push to "
            f"a user or organisation of your own, or use a token with write permission ({says})"
        )
    if status == 404:
        return f"export.push={repo}: {endpoint} knows no such repository for this token ({says})"
    return f"export.push={repo}: {endpoint} answered {status or 'nothing'} ({says}){_kept(folder)}"


def _unreachable(repo: str, folder: Path | None, endpoint: str, error: Exception) -> str:
    return (
        f"export.push={repo}: {endpoint} cannot be reached ({error}); push from a "
        f"machine with network{_kept(folder)}"
    )
