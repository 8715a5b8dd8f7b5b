"""Command line of the corpus tool: ``python -m tools.corpus --out DIR``."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from tools.arguments import Parser, file_path, integer, refuse
from tools.corpus.build import DEFAULT_MAX_BYTES, OnBytes, Record, build_corpus, select
from tools.corpus.table import Domain, Table, load_table

EXAMPLES = """examples:
  python -m tools.corpus --list                              the domains, their sources and licences
  python -m tools.corpus --out data/corpus                   the default domains, 4 MB each
  python -m tools.corpus --out data/corpus --offline         without network: committed public-domain text
  python -m tools.corpus --out data/corpus --domains wiki_fr biomed --max-bytes-per-domain 0
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; exit status 0, or 2 with one line on stderr for a problem of the user's to solve."""
    table = load_table()
    args = _parse(argv, table)
    if args.list:
        _print_table(table)
        return 0
    try:
        records = _build(args, table)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"out": str(args.out), "domains": records}, indent=1) + "\n", "utf-8")
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


def _parse(argv: Sequence[str] | None, table: Table) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.corpus",
        description="Write labelled text corpora (DIR/<domain>.jsonl and DIR/corpus.json) from pinned packages.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=file_path, metavar="DIR", help="folder of the corpus; finished domains are kept")
    parser.add_argument(
        "--domains", nargs="+", default=[], metavar="NAME", help=f"default: {' '.join(table.default)}; all: see --list"
    )
    parser.add_argument("--offline", action="store_true", help="use only the cache and what is committed")
    parser.add_argument(
        "--max-bytes-per-domain",
        type=integer(0, 2**62),
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="UTF-8 bytes of text, cut between documents; 0: everything (default: %(default)s)",
    )
    parser.add_argument("--cache", type=file_path, metavar="DIR", help="downloaded packages (default: OUT/.packages)")
    parser.add_argument("--list", action="store_true", help="print the domains and stop")
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the records of these domains here, too")
    args = parser.parse_args(argv)
    if args.out is None and not args.list:
        parser.error("--out DIR is needed (or --list)")
    if args.max_bytes_per_domain < 0:
        parser.error(f"--max-bytes-per-domain {args.max_bytes_per_domain}: must be 0 (everything) or more")
    return args


def _build(args: argparse.Namespace, table: Table) -> dict[str, Record]:
    console = Console(highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description:14}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def on_domain(domain: Domain) -> OnBytes:
            for finished in progress.task_ids:
                progress.remove_task(finished)
            task = progress.add_task(domain.name, total=args.max_bytes_per_domain or None)
            return lambda count: progress.advance(task, count)

        def on_done(name: str, record: Record, built: bool) -> None:
            console.print(_line(name, record, built), markup=False)

        return build_corpus(
            args.out,
            select(table, args.domains),
            offline=args.offline,
            max_bytes=args.max_bytes_per_domain or None,
            cache=args.cache,
            on_domain=on_domain,
            on_done=on_done,
        )


def _line(name: str, record: Record, built: bool) -> str:
    size = f"{record['documents']:6,} documents {record['bytes'] / 1e6:6.2f} MB"
    line = f"{name:14} {'built' if built else 'kept ':5} {size}  {record['description']} [{record['licence']}]"
    return f"{line}; FALLBACK, because {record['fallback_reason']}" if record["fallback"] else line


def _print_table(table: Table) -> None:
    for domain in table.domains.values():
        default = ", built by default" if domain.name in table.default else ""
        offline = ", also offline" if _works_offline(domain) else ""
        print(f"{domain.name:14} {domain.description}{default}{offline}")
        for package in dict.fromkeys(part.package for part in domain.parts):
            print(f"{'':14}   {package.client}: {package.pin} [{package.licence}]")


def _works_offline(domain: Domain) -> bool:
    """Whether some text of the domain is there without any package client."""
    parts = domain.fallback or domain.parts
    return all(part.package.client in {"committed", "interpreter"} for part in parts)


if __name__ == "__main__":
    sys.exit(main())
