"""Which list of names is the newest: the file of a day, or the last that came into a folder. Runs in ordinary tasks."""

from __future__ import annotations

from datetime import date

from flytekitplugins.daskpytorch import url_to_fs

ENDINGS = (".csv", ".json")


def newest_uri(data: str, day: date) -> str:
    """Say where the newest names are.

    Args:
        data: A file; a URI with `{date}` in it, which becomes the day (`{date:%Y/%m/%d}` writes it otherwise); or a
            folder or prefix, whose `.csv` or `.json` file that was written last is taken. Empty for the embedded list.
        day: The day for which names are wanted.

    Returns:
        What `load_names` takes.

    Raises:
        FileNotFoundError: The folder has no such file.
        ValueError: Something else than a date stands in braces.
    """
    try:
        uri = data.format(date=day)
    except (AttributeError, IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"data={data!r}: only {{date}}, or a form of it such as {{date:%Y/%m/%d}}, may stand in braces "
            f"({type(error).__name__}: {error})"
        ) from error
    if not uri or uri.startswith(("http://", "https://")):  # which have no folders
        return uri
    filesystem, path = url_to_fs(uri)
    filesystem.invalidate_cache()
    if not filesystem.isdir(path):
        return uri
    files = [file for file in filesystem.find(path) if file.endswith(ENDINGS)]
    if not files:
        raise FileNotFoundError(
            f"there is no file whose name ends in {' or '.join(ENDINGS)} in {uri!r}, which data={data!r} stands for on "
            f"{day}. Check the spelling, and whether the day's names have arrived."
        )
    newest = max(files, key=lambda file: (filesystem.modified(file), file))
    return str(filesystem.unstrip_protocol(newest))
