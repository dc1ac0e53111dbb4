"""`headstock cache`: what is in the cache folder, and removing it."""

from typing import Annotated, Any

import typer

from headstock.cli.command import Common, command, command_group

cache = command_group("cache", "Maintain", "List or remove downloads, token stores and other cached files.")


@command(cache)
def list_(common: Common) -> dict[str, Any]:
    """List what is in the cache, by kind, with sizes."""
    import time

    from headstock.data.remote import megabytes
    from headstock.io import cache_folder
    from headstock.maintenance.cache import KINDS, cache_entries
    from headstock.maintenance.system import anonymous

    entries = cache_entries()
    common.show(f"{anonymous(cache_folder())}: {megabytes(sum(entry.bytes for entry in entries))}")
    for name, kind in KINDS.items():
        group = [entry for entry in entries if entry.kind == name]
        if not group:
            continue
        notes = f", {sum(entry.in_use for entry in group)} in use" if any(entry.in_use for entry in group) else ""
        notes += f", {sum(not entry.is_ours for entry in group)} not ours" if not all(e.is_ours for e in group) else ""
        used = time.strftime("%F", time.localtime(max(entry.last_used for entry in group)))
        size = megabytes(sum(entry.bytes for entry in group))
        common.show(f"  {name:9s} {size:>9s}  {len(group):4d}  last used {used}{notes}  {kind.summary}")
    return {"folder": str(cache_folder()), "entries": [entry.to_dict() for entry in entries]}


@command(cache)
def clear(
    common: Common,
    kind: Annotated[str | None, typer.Argument(help="Only this kind, as `headstock cache list` names it.")] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Keep what was used in the last DAYS days.")
    ] = None,
    dry_run: Annotated[bool, "Show what would be removed."] = False,
) -> dict[str, Any]:
    """Remove what is in the cache.

    Entries that a running process uses are kept, as is anything that Headstock did not write.

    Example: headstock cache clear stores --older-than 30 --dry-run
    """
    from headstock.data.remote import megabytes
    from headstock.maintenance.cache import clear_cache
    from headstock.maintenance.system import anonymous

    result = clear_cache(kind, older_than=older_than, dry_run=dry_run)
    for entry, reason in result.kept:
        common.log(f"kept {anonymous(entry.path)}: {reason}")
    for entry in result.removed:
        common.show(f"{'would remove' if dry_run else 'removed'} {anonymous(entry.path)} ({megabytes(entry.bytes)})")
    count, size = len(result.removed), megabytes(sum(entry.bytes for entry in result.removed))
    common.show(f"{count} {'entry' if count == 1 else 'entries'}, {size}" + (" (nothing was removed)" * dry_run))
    return result.to_dict() | {"dry_run": dry_run}
