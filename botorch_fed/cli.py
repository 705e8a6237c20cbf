r"""The command line: `botorch-fed`, or ``python -m botorch_fed.cli``.

::

    demo         what sites that join later gain from those that are done, and what privacy costs
    run          run a study file: any objective, any protocol
    protocols    list the protocols of study files, or the settings of one
    advise       what settings buy, in numbers, before a run
    account      the privacy cost of noisy releases, or the noise for a given cost
    audit        run a mechanism in two worlds and try to distinguish them
    report       an HTML report from the folder of a run or a site
    watch        a local page that follows a run, a site or the hub's side of a run
    export       the trials of a run or a site for Optuna, Ax or a spreadsheet
    hub          the hub of a study across machines
    site         a site of a study across machines
    ledger       a ledger on disk, from which studies pay
    completion   completion for bash, zsh or fish

Exit codes::

    0    success
    1    a run or an audit failed
    2    wrong usage, or an invalid study file
    3    the privacy budget is exhausted
    130  interrupted

Results go to stdout, other output to stderr. With ``--json`` stdout is one JSON document,
``{"error": …, "exit_code": …}`` without a result. Each command imports its expensive modules.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from botorch_fed.errors import BudgetExceeded, FederatedError
from botorch_fed.federation.registry import PROTOCOLS
from botorch_fed.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from botorch_fed.deploy import Hub, SiteFolder
    from botorch_fed.privacy import Guarantee, SharedLedger
    from botorch_fed.privacy.audit import AuditReport
    from botorch_fed.run import RunResult
    from botorch_fed.study import Plan, StudyFile

PROGRAM = "botorch-fed"
FINE, FAILED, USAGE, EXHAUSTED, INTERRUPTED = 0, 1, 2, 3, 130
EPILOG = """exit codes:
  0 success, 1 a run or an audit failed, 2 wrong usage or study file,
  3 privacy budget exhausted, 130 interrupted"""
RUN_EPILOG = """a complete study file (botorch_fed/study.py describes all keys):
  objective = "tuning:score"   # tuning.py beside it: score(agent: str, **parameters) -> float
  agents = ["north", "south"]
  budget = 12                  # evaluations of each agent, the initial ones included
  seed = 0
  [space]
  C = { type = "real", lower = 1e-3, upper = 1e3, log = true }
  depth = { type = "integer", lower = 1, upper = 8 }
  [outcome]                    # public guesses of the mean and the standard deviation
  centre = 0.9
  scale = 0.1                  # or [outcomes], several by name: latency = { upper = 20.0 }
  [protocol]
  name = "dp-fts-de"
  [privacy]
  epsilon = 2.0
  delta = 1e-5"""
ADJACENCIES = ("zero-out", "replace-one")
MECHANISMS = ("gaussian-sum", "weighted", "correlated")
SHELLS = ("bash", "zsh", "fish")
EXPORTS = {"csv": "trials.csv", "optuna": "optuna.db", "ax": "ax"}  # and what they write
KEYS_HELP = 'for channel = "ckks": this party\'s folder, made by site keys; needed once'
DEMO_OUT = "botorch-fed-demo"


class UsageError(FederatedError):
    """The arguments do not fit together; the message says what to write."""


@dataclass(frozen=True)
class _Done:
    """The result of a command.

    Attributes:
        document: For ``--json``.
        code: The exit code.
    """

    document: Any
    code: int = FINE


# ------------------------------------------------------------------ entry point


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The arguments; default those of the process.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        return int(stop.code or FINE)
    as_json = bool(getattr(arguments, "json", False))
    try:
        with _notes(), _umask(getattr(arguments, "private", False)):
            done: _Done = arguments.command(arguments)
    except KeyboardInterrupt:
        resumes = arguments.command in (_run, _hub_run)
        more = "; a run with a folder continues with --resume" if resumes else ""
        _complain(f"interrupted{more}", as_json, INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        code = _code_of(error)
        if code is None or arguments.debug:
            raise
        _complain(_message_of(error), as_json, code)
        return code
    if as_json:
        _write(json.dumps(_plain(done.document), indent=1, allow_nan=False))
    return done.code


def _code_of(error: Exception) -> int | None:
    """The exit code of an error of the package; None for other errors, shown with a traceback."""
    if isinstance(error, BudgetExceeded):
        return EXHAUSTED
    usage = _is_a(error, "botorch_fed.study", "StudyError") or _is_a(
        error, "botorch_fed.watch", "FolderError"
    )
    if usage or isinstance(error, UsageError):
        return USAGE
    if isinstance(error, FederatedError):
        return FAILED
    if _is_a(error, "botorch.exceptions.errors", "BotorchError"):
        return USAGE
    return FAILED if isinstance(error, OSError) else None


def _is_a(error: Exception, module: str, name: str) -> bool:
    """Whether an error is of a class whose module may not be imported."""
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], name))


def _message_of(error: Exception) -> str:
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # of a worker process: its last line
        last = text.splitlines()[-1]
        return last.removeprefix("botorch_fed.errors.ObjectiveError: ")
    return text


def _complain(message: str, as_json: bool, code: int) -> None:
    sys.stderr.write(f"{PROGRAM}: {message}\n")
    if as_json:
        _write(json.dumps({"error": message, "exit_code": code}))


@contextmanager
def _notes() -> Iterator[None]:
    """Warnings as short notes on stderr, each once."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            sys.stderr.write(f"note: {message}\n")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _umask(private: bool) -> Iterator[None]:
    """Files of hubs and sites are not readable by other users of the machine."""
    before = os.umask(0o077) if private else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def _expect_notes() -> None:
    """Show the package's warnings of weak signals, and hide BoTorch's of input scales."""
    from botorch.exceptions.warnings import InputDataWarning

    from botorch_fed.privacy import SignalWarning

    warnings.simplefilter("default", SignalWarning)
    warnings.simplefilter("ignore", InputDataWarning)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _say(arguments: argparse.Namespace, text: str) -> None:
    """Print a line on stdout, or on stderr beside a JSON document."""
    (sys.stderr if arguments.json else sys.stdout).write(text + "\n")


def _show(arguments: argparse.Namespace, table: Table) -> None:
    from rich.console import Console

    file = sys.stderr if arguments.json else sys.stdout
    plain: dict[str, Any] = {"file": file, "markup": False, "emoji": False}  # names are untrusted
    console = Console(**plain)
    if not console.is_terminal:
        console = Console(width=110, **plain)
    console.print(table)


def _table(*head: Any, **options: Any) -> Table:
    from rich.table import Table

    return Table(*head, **options)


def _plain(value: Any) -> Any:
    """A value for JSON; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


# ------------------------------------------------------------------ arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Federated and private Bayesian optimisation on BoTorch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_protocols(commands)
    _add_advise(commands)
    _add_account(commands)
    _add_audit(commands)
    _add_report(commands)
    _add_watch(commands)
    _add_export(commands)
    _add_hub(commands)
    _add_site(commands)
    _add_ledger(commands)
    _add_completion(commands)
    return parser


def _command(
    commands: Any, name: str, command: Callable[[argparse.Namespace], _Done], words: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words,
        description=f"{words[0].upper()}{words[1:]}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if name != "completion":
        parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON document on stdout, other output on stderr",
        )
    return parser


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text}")
        return value

    count.__name__ = "int"  # the word that argparse shows
    return count


def _renamed(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"--rounds is now --budget, evaluations of each site: write --budget {text}"
    )


def _option(
    parser: argparse.ArgumentParser,
    name: str,
    kind: Callable[[str], Any],
    default: Any,
    metavar: str,
    words: str = "",
) -> None:
    """An option with a default, which its help names."""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    shown = "no limit" if default == math.inf else shown
    parser.add_argument(
        name,
        type=kind,
        default=default,
        metavar=metavar,
        help=f"{words}; default {shown}" if words else f"default {shown}",
    )


def _choice(
    parser: argparse.ArgumentParser, name: str, choices: Sequence[str], words: str = ""
) -> None:
    """An option whose default is the first of its values."""
    start = f"{words}; " if words else ""
    parser.add_argument(
        name, choices=choices, default=choices[0], help=f"{start}default {choices[0]}"
    )


def _add_demo(commands: Any) -> None:
    words = "what sites that join later gain from those that are done, and what privacy costs"
    parser = _command(commands, "demo", _demo, words)
    _choice(parser, "--protocol", [*PROTOCOLS], "whose story")
    budget = "evaluations of each newcomer, or rounds of bandits; default 5, or 128"
    parser.add_argument("--budget", type=_count(3), metavar="N", help=budget)
    parser.add_argument("--rounds", type=_renamed, help=argparse.SUPPRESS)
    _option(parser, "--seed", _count(0), 0, "S", "the first seed")
    repeats = "number of seeds S, S+1, …, each with other shares of the data; default 6 to 16"
    parser.add_argument("--repeats", type=_count(1), metavar="K", help=repeats)
    _option(parser, "--workers", _count(1), 2, "W", "number of processes")
    _option(parser, "--out", Path, Path(DEMO_OUT), "DIR", "folder of the results")
    parser.add_argument("--no-report", action="store_true", help="write no HTML report")


def _add_run(commands: Any) -> None:
    parser = _command(commands, "run", _run, "run a study file: any objective, any protocol")
    parser.epilog = f"{RUN_EPILOG}\n\n{EPILOG}"
    parser.add_argument("study", type=Path, metavar="STUDY.toml", help="the study file")
    _add_out(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, evaluate nothing")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run in its folder")
    out = "folder of the run, instead of out in the study file"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)


_FACTS: tuple[tuple[str, str, Callable[[str], Any], str, str], ...] = (
    ("--agents", "agents", int, "N", "number of agents"),
    ("--dim", "dim", int, "D", "number of inputs"),
    ("--budget", "budget", int, "T", "evaluations of each agent"),
    ("--features", "num_features", int, "M", "numbers of a message"),
    ("--regions", "num_regions", int, "P", "number of regions"),
    ("--sampling-rate", "sampling_rate", float, "Q", "share of agents in a release"),
    ("--releases", "releases", int, "R", "number of releases"),
    ("--delta", "delta", float, "D", "delta of the guarantee"),
    ("--lengthscale", "lengthscale", float, "L", "length scale of the shared kernel, in the cube"),
    ("--noise-var", "noise_var", float, "V", "variance of an outcome on the public scale"),
)


def _add_advise(commands: Any) -> None:
    parser = _command(commands, "advise", _advise, "what settings buy, in numbers, before a run")
    study = "a study file, from which the facts are taken that are not given"
    parser.add_argument("study", type=Path, nargs="?", metavar="STUDY.toml", help=study)
    for option, name, kind, metavar, words in _FACTS:
        parser.add_argument(option, dest=name, type=kind, metavar=metavar, help=words)
    given = parser.add_mutually_exclusive_group()
    multiplier = "noise divided by the norm of one contribution"
    given.add_argument("--noise-multiplier", type=float, metavar="Z", help=multiplier)
    given.add_argument("--epsilon", type=float, metavar="E", help="epsilon of the whole run")
    section = "a section, may be repeated; default those of the study, or all"
    parser.add_argument("--section", action="append", metavar="NAME", help=section)


def _add_account(commands: Any) -> None:
    words = "the privacy cost of noisy releases, or the noise for a given cost"
    parser = _command(commands, "account", _account, words)
    _option(parser, "--sampling-rate", float, 1.0, "Q", "share of units in a release")
    given = parser.add_mutually_exclusive_group(required=True)
    multiplier = "noise divided by the norm of one contribution"
    given.add_argument("--noise-multiplier", type=float, metavar="Z", help=multiplier)
    epsilon = "total epsilon, from which the noise multiplier is computed"
    given.add_argument("--epsilon", type=float, metavar="E", help=epsilon)
    parser.add_argument(
        "--releases", type=_count(1), required=True, metavar="T", help="number of releases"
    )
    delta = "delta of the guarantee, far below 1 / (number of units)"
    parser.add_argument("--delta", type=float, required=True, metavar="D", help=delta)
    units = "number of protected units; a delta of 1/N or more is refused"
    parser.add_argument("--units", type=_count(1), metavar="N", help=units)
    _choice(parser, "--adjacency", ADJACENCIES, "neighbouring data sets")
    _choice(parser, "--unit", ("agent", "record"), "protected unit")


def _add_audit(commands: Any) -> None:
    words = "run a mechanism in two worlds and try to distinguish them"
    parser = _command(commands, "audit", _audit, words)
    _choice(parser, "--mechanism", MECHANISMS, "mechanism to audit")
    _option(parser, "--agents", _count(1), 5, "N", "number of agents")
    _option(parser, "--dim", _count(1), 4, "M", "numbers of a contribution")
    _option(parser, "--clip-norm", float, 1.0, "C", "largest norm of a contribution")
    multiplier = "noise divided by the norm of one contribution"
    _option(parser, "--noise-multiplier", float, 1.0, "Z", multiplier)
    _option(parser, "--sampling-rate", float, 1.0, "Q", "share of agents in a release")
    regions = "number of regions; gaussian-sum has none"
    _option(parser, "--regions", _count(1), 2, "P", regions)
    contrast = "log ratio of an agent's weight in its region to its weight elsewhere"
    _option(parser, "--contrast", float, 1.0, "K", contrast)
    _choice(parser, "--adjacency", ADJACENCIES, "neighbouring data sets")
    _option(parser, "--rounds", _count(1), 2, "T", "releases of a transcript")
    _option(parser, "--runs", _count(10), 1000, "N", "runs of each world")
    _option(parser, "--delta", float, 1e-3, "D", "delta of the guarantee")
    _option(parser, "--seed", _count(0), 0, "S", "seed of the runs")
    os_noise = "use noise of the operating system instead of seeded noise"
    parser.add_argument("--os-noise", action="store_true", help=os_noise)


def _add_report(commands: Any) -> None:
    words = "an HTML report from the folder of a run or a site"
    parser = _command(commands, "report", _report, words)
    folder = "folder of a run, of the hub's side of a run, or of a site; the run may go on"
    parser.add_argument("run", type=Path, metavar="RUN", help=folder)
    compare = "another run and its folder, such as alone=DIR; may be repeated"
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        type=_named_folder,
        metavar="LABEL=DIR",
        help=compare,
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of the report; default RUN/report.html"
    )


def _add_watch(commands: Any) -> None:
    words = "a local page that follows a run, a site or the hub's side of a run"
    parser = _command(commands, "watch", _watch, words)
    folder = "folder of a run, of the hub's side of a run, or of a site"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
    port = "port on 127.0.0.1; default a free one"
    parser.add_argument("--port", type=_count(0), default=0, metavar="N", help=port)


def _add_export(commands: Any) -> None:
    words = "the trials of a run or a site for Optuna, Ax or a spreadsheet"
    parser = _command(commands, "export", _export, words)
    parser.set_defaults(private=True)
    folder = "folder of a run or of a site; the run may go on"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
    to = "csv: one table; optuna: a study for each site; ax: a client for each site, as JSON"
    parser.add_argument("--to", required=True, choices=[*EXPORTS], help=to)
    defaults = ", ".join(f"FOLDER/{name}" for name in EXPORTS.values())
    out = "file of the table, storage of Optuna (a URL or a SQLite file), or folder of Ax's files"
    parser.add_argument("--out", metavar="PLACE", help=f"{out}; default {defaults}")
    site = "a site, may be repeated; default all"
    parser.add_argument("--site", action="append", default=[], metavar="NAME", help=site)


def _named_folder(text: str) -> tuple[str, Path]:
    label, separator, folder = text.partition("=")
    if not (label and separator and folder):
        raise argparse.ArgumentTypeError(f"expected LABEL=DIR, got {text!r}")
    return label, Path(folder)


def _add_completion(commands: Any) -> None:
    parser = _command(commands, "completion", _completion, "completion for bash, zsh or fish")
    parser.add_argument("shell", choices=SHELLS, help="the shell")


# ------------------------------------------------------------------ demo


def _demo(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.demo import introduction, play, scene_of

    _expect_notes()
    protocol = arguments.protocol
    scene = scene_of(protocol, repeats=arguments.repeats, budget=arguments.budget)
    words = introduction(protocol, scene)
    _say(arguments, f"{protocol}, {scene.repeats} seed(s). {words}")
    story = play(
        protocol,
        scene,
        arguments.out,
        seed=arguments.seed,
        workers=arguments.workers,
        progress=_seeds_shown,
    )
    _say(arguments, "\nVerdict")
    for line in story.verdict:
        _say(arguments, f"- {line}")
    for table in story.tables:
        _show(arguments, table)
    for line in (*story.facts, *_privacy_words(story.first)):
        _say(arguments, line)
    report = None
    if not arguments.no_report:
        try:
            path = arguments.out / "report.html"
            title = f"The demo of {protocol}, seed {story.seeds[0]}"
            report = _write_report(story.first, path, story.others, title, story.verdict)
            _say(arguments, f"Report: {report}")
        except FederatedError as error:  # the results are printed without a report
            _note(f"note: no report: {error}")
    document = {
        "command": "demo",
        "protocol": protocol,
        "scene": asdict(scene),
        **story.document,
        "folder": arguments.out,
        "report": report,
    }
    return _Done(document)


def _seeds_shown(ended: Iterable[Any], total: int) -> Iterable[Any]:
    """A progress bar on a terminal, or a line per seed."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(ended, "seeds", total=total, console=console, transient=True)
        return
    for count, one in enumerate(ended, start=1):
        _note(f"{count} of {total} seeds")
        yield one


def _privacy_words(result: RunResult) -> list[str]:
    privacy = result.privacy or {}
    trust = "" if result.sees is None else result.sees.trust
    if "epsilon" not in privacy:
        return [f"Privacy: no guarantee. {trust}".rstrip()]
    noisy = "" if privacy["private"] else " NOT PRIVATE: the noise comes from a seed."
    return [
        f"Privacy: epsilon <= {privacy['epsilon']:.4g} at delta = {privacy['delta']:.3g} per "
        f"{privacy['unit']}, {privacy['adjacency']}, {privacy['releases']} release(s), by "
        f"{privacy['accountant']}, of each run.{noisy}",
        *([trust] if trust else []),
    ]


def _write_report(
    result: RunResult,
    path: Path,
    others: Mapping[str, RunResult],
    title: str | None = None,
    findings: Sequence[str] = (),
) -> Path:
    try:
        from botorch_fed.report import write_report

        written: Path = write_report(result, path, others=others, title=title, findings=findings)
    except ImportError as error:
        raise _without_plotly(error) from error
    return written


def _without_plotly(error: ImportError) -> FederatedError:
    return FederatedError(f"A report needs plotly ({error}): pip install 'botorch_fed[plot]'.")


# ------------------------------------------------------------------ run


def _run(arguments: argparse.Namespace) -> _Done:
    _expect_notes()
    from botorch_fed.study import plan, read_study, run_study

    study = read_study(arguments.study)
    out = arguments.out if arguments.out is not None else study.out
    if arguments.dry_run:
        study.find()  # reports a missing objective; nothing is imported
        outline = plan(study)
        _show_plan(arguments, study, outline, out)
        return _Done({"command": "run", "dry_run": True, "out": out, **asdict(outline)})
    _check_folder(out, arguments.resume)
    result = run_study(study, out=out, resume=arguments.resume)
    if result.records and all(row["y"] is None for row in result.records):
        why = result.records[0]["reason"].rstrip(".")
        raise FederatedError(
            f"Every evaluation failed, the first with {why}. Correct the objective."
        )
    _show(arguments, _result_table(result))
    _show(arguments, _contribution_table(result))
    for row in result.failures():
        where = row["where"] or next(iter(row["reasons"]))
        count = f"{row['failed']} of {row['evaluations']} evaluations failed"
        _say(arguments, f"{row['site']}: {count}: {where}")
    for line in _privacy_words(result):
        _say(arguments, line)
    if out is not None:
        _say(arguments, f"Saved in {out}: {PROGRAM} report {out}")
    for line in _silent(result):
        sys.stderr.write(f"note: {line}\n")
    if not result.records:
        raise FederatedError("No agent replied, so that nothing was evaluated: see the notes.")
    exhausted = bool((result.privacy or {}).get("exhausted"))
    if exhausted:
        sys.stderr.write(
            f"{PROGRAM}: the privacy budget is exhausted: some releases were not made, and agents "
            "continued alone. Plan fewer releases or more noise, or raise the ledger's budget.\n"
        )
    return _Done(_result_document(result, out), EXHAUSTED if exhausted else FINE)


def _check_folder(out: Path | None, resume: bool) -> None:
    if resume and out is None:
        raise UsageError(
            '--resume needs the folder of the run: write out = "…" in the file, or --out.'
        )
    if out is not None and (out / "run.json").exists() and not resume:
        raise UsageError(
            f"There is a run in {out} already: continue it with --resume, or choose another folder "
            "with --out."
        )


def _show_plan(
    arguments: argparse.Namespace, study: StudyFile, outline: Plan, out: Path | None
) -> None:
    agents = f"{outline.agents} agents"
    table = _table(show_header=False, title=f"Plan of {study.path.name}: nothing was evaluated")
    table.add_row("protocol", outline.protocol)
    table.add_row("space", f"{', '.join(study.space.names)} ({outline.columns} columns)")
    if outline.constraints:
        table.add_row("constraints", "\n".join(outline.constraints))
    if outline.outcomes:
        table.add_row("outcomes", "\n".join(outline.outcomes))
    table.add_row(
        "budget",
        f"{outline.budget} evaluations of each of {agents}, initial ones included, "
        f"{outline.total:,} in all",
    )
    table.add_row("rounds", f"{outline.rounds}")
    table.add_row("bytes per round", _bytes_words(outline))
    table.add_row("privacy", "no guarantee" if outline.price is None else str(outline.price))
    if outline.signal:
        table.add_row("signal", outline.signal)
    if outline.roster:
        table.add_row("roster", outline.roster)
    table.add_row("who sees what", str(outline.sees))
    table.add_row("folder", "none: an interrupted run is lost" if out is None else str(out))
    _show(arguments, table)


def _bytes_words(outline: Plan) -> str:
    if outline.bytes_per_round is None:
        return outline.bytes_note
    counts = ", ".join(f"{count:,}" for count in outline.bytes_per_round)
    return f"{counts}\n({outline.bytes_note})"


def _silent(result: RunResult) -> list[str]:
    """The agents without replies: number of exchanges and the last reason."""
    missed: dict[str, list[str]] = {}
    for row in result.rounds:
        if not row["replied"]:
            missed.setdefault(row["agent"], []).append(row["failure"] or "unknown")
    return [
        f"{agent} did not reply in {len(why)} exchange(s), last reason: {why[-1]}."
        for agent, why in missed.items()
    ]


def _best(result: RunResult, agent: str) -> tuple[int, float | None, dict[str, Any]]:
    """An agent's number of evaluations, its best value and the parameters of that value."""
    count = len(result.history(agent)[1])
    rows = [row for row in (*result.given, *result.records) if row["agent"] == agent]
    if not any(row["y"] is not None and result.counts(row) for row in rows):
        return count, None, {}  # none that counts: not at the target, or outside of constraints
    return count, *result.best_observed(agent)


def _point_words(point: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{k} = {v:.4g}" if isinstance(v, float) else f"{k} = {v}" for k, v in point.items()
    )


def _outcomes_table(result: RunResult) -> Table:
    """The best trials of each agent where there are several outcomes: one, or a front."""
    several = len(result.space.objectives) > 1
    head = "front" if several else "best"
    table = _table("agent", "evaluations", f"{head}: values", "at", title=result.protocol)
    for agent in result.names:
        front = result.pareto(agent)
        count = str(len(result.history(agent)[1]))
        if not front:
            table.add_row(agent, count, "nothing meets all constraints", "")
        for k, row in enumerate(front):
            first = (agent, count) if k == 0 else ("", "")
            table.add_row(*first, _point_words(row["values"]), _point_words(row["parameters"]))
    return table


def _result_table(result: RunResult) -> Table:
    if result.space.outcomes:
        return _outcomes_table(result)
    better = "smallest" if result.space.outcome.minimize else "largest"
    fidelity = result.space.fidelity
    if fidelity is not None:
        better += f" at {fidelity.name} = {result.space.fidelity_value(1.0):g}"
    table = _table("agent", "evaluations", f"best ({better})", "at", title=f"{result.protocol}")
    for agent in result.names:
        if not any(row["agent"] == agent and row["y"] is not None for row in result.records):
            table.add_row(agent, "0", "", "")
            continue
        count, value, point = _best(result, agent)
        words = "none" if value is None else f"{value:.6g}"
        table.add_row(agent, str(count), words, _point_words(point))
    return table


def _contribution_table(result: RunResult) -> Table:
    head = ("agent", "joined", "sent", "received", "bytes up", "bytes down", "last reply")
    table = _table(*head, title="Messages")
    for row in result.contributions():
        sent, received, last = (
            "unknown" if row[key] is None else str(row[key])
            for key in ("messages_sent", "messages_received", "last_replied")
        )
        joined = "never" if row["joined"] is None else f"exchange {row['joined']}"
        last = "none" if row["last_replied"] is None else f"exchange {last}"
        sizes = (f"{row[key]:,}" for key in ("bytes_up", "bytes_down"))
        table.add_row(row["site"], joined, sent, received, *sizes, last)
    return table


def _result_document(result: RunResult, out: Path | None) -> dict[str, Any]:
    evaluated = {row["agent"] for row in result.records if row["y"] is not None}
    best: dict[str, Any] = {
        agent: {"evaluations": len(result.history(agent)[1]), "front": result.pareto(agent)}
        if result.space.outcomes
        else dict(zip(("evaluations", "value", "point"), _best(result, agent), strict=True))
        for agent in result.names
        if agent in evaluated
    }
    return {
        "command": "run",
        "protocol": result.protocol,
        "seed": result.seed,
        "agents": list(result.names),
        "best": best,
        "budget": result.budget,
        "contributions": result.contributions(),
        "failures": result.failures(),
        "bytes_per_round": result.bytes_per_round(),
        "privacy": result.privacy,
        "out": out,
    }


# ------------------------------------------------------------------ protocols


def _add_protocols(commands: Any) -> None:
    words = "list the protocols of study files, or the settings of one"
    parser = _command(commands, "protocols", _protocols, words)
    name = "a protocol, or module:Name of a study class, whose settings are listed"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)


def _protocols(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.federation.registry import study_class
    from botorch_fed.study import settings

    if arguments.name is None:
        names = {name: _first_line(study_class(name)) for name in PROTOCOLS}
        table = _table("name", "description")
        for name, words in names.items():
            table.add_row(name, words)
        _show(arguments, table)
        return _Done({"command": "protocols", "protocols": names})
    sys.path.insert(0, str(Path.cwd()))  # the usual folder of a study file
    try:
        rows = settings(study_class(arguments.name))
    except FederatedError as error:
        raise UsageError(str(error)) from error
    title = f"{arguments.name}: settings of the table [protocol]"
    table = _table("setting", "expected", "default", "meaning", title=title)
    for row in rows:
        table.add_row(row.name, row.expected, row.default, row.doc)
    _show(arguments, table)
    document = {"command": "protocols", "name": arguments.name}
    return _Done({**document, "settings": [asdict(row) for row in rows]})


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").strip().split("\n")[0]


# ------------------------------------------------------------------ advise


def _advise(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.advice import advise, said
    from botorch_fed.study import read_study

    names = [name for _, name, *_ in _FACTS] + ["noise_multiplier", "epsilon"]
    facts = {name: getattr(arguments, name) for name in names}
    facts = {name: value for name, value in facts.items() if value is not None}
    if arguments.study is None:
        advice = advise(sections=arguments.section, **facts)
    else:
        file = read_study(arguments.study)
        facts = {"agents": len(file.agents) or 1, **facts}
        advice = advise(file.study(), space=file.space, sections=arguments.section, **facts)
    for section in advice.sections:
        table = _table(*section.columns, title=section.title)
        for row in section.rows:
            table.add_row(*map(said, row))
        _show(arguments, table)
        for sentence in section.says:
            _say(arguments, sentence)
    return _Done({"command": "advise", **asdict(advice)})


# ------------------------------------------------------------------ account


def _account(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.privacy import Accountant, check_promised_delta, noise_multiplier_for

    check_promised_delta(arguments.delta, arguments.units, arguments.unit)
    settings = {
        "sampling_rate": arguments.sampling_rate,
        "delta": arguments.delta,
        "adjacency": arguments.adjacency,
    }
    multiplier = arguments.noise_multiplier
    if multiplier is None:
        multiplier = noise_multiplier_for(
            epsilon=arguments.epsilon, num_releases=arguments.releases, **settings
        )
    rows = [_accounted(arguments, multiplier, name) for name in get_args(Accountant)]
    title = (
        f"{arguments.releases} releases, q = {arguments.sampling_rate:g}, z = {multiplier:.6g}: "
        f"epsilon at delta = {arguments.delta:g} per {arguments.unit}, {arguments.adjacency}"
    )
    table = _table("accountant", "epsilon at most", "at least", "", title=title)
    for row in rows:
        shown, least = (
            "" if row[key] is None else f"{row[key]:.6g}" for key in ("epsilon", "at_least")
        )
        table.add_row(row["accountant"], shown, least, row["note"])
    _show(arguments, table)
    document = {
        "command": "account",
        **settings,
        "unit": arguments.unit,
        "releases": arguments.releases,
        "noise_multiplier": multiplier,
        "accountants": rows,
    }
    if arguments.epsilon is not None:
        document["wanted_epsilon"] = arguments.epsilon
        _say(
            arguments, f"epsilon = {arguments.epsilon:g} needs noise_multiplier = {multiplier:.6g}"
        )
    return _Done(document)


def _accounted(arguments: argparse.Namespace, multiplier: float, name: Any) -> dict[str, Any]:
    from botorch.exceptions.errors import UnsupportedError

    from botorch_fed.privacy import Entry, Event, epsilon, optimistic_epsilon

    least = None
    try:
        guarantee: Guarantee = epsilon(
            sampling_rate=arguments.sampling_rate,
            noise_multiplier=multiplier,
            num_releases=arguments.releases,
            delta=arguments.delta,
            accountant=name,
            adjacency=arguments.adjacency,
            unit=arguments.unit,
        )
    except UnsupportedError as error:
        return {"accountant": name, "epsilon": None, "at_least": None, "note": str(error)}
    if name == "pld":
        event = Event(multiplier, arguments.sampling_rate)
        least = optimistic_epsilon(
            [Entry(event, arguments.releases, "")],
            delta=arguments.delta,
            adjacency=arguments.adjacency,
        )
    return {
        "accountant": name,
        "epsilon": guarantee.epsilon,
        "at_least": least,
        "note": "the default" if name == "pld" else "",
    }


# ------------------------------------------------------------------ audit


def _audit(arguments: argparse.Namespace) -> _Done:
    _expect_notes()
    from botorch_fed.privacy import OSNoise
    from botorch_fed.privacy.audit import audit

    report = audit(
        _mechanism(arguments),
        rounds=arguments.rounds,
        runs=arguments.runs,
        delta=arguments.delta,
        seed=arguments.seed,
        noise=OSNoise() if arguments.os_noise else None,
    )
    _say(arguments, str(report))
    if report.passed:
        _say(arguments, "A passed audit is no proof of privacy; a failed audit shows a defect.")
    return _Done(_audit_document(report), FINE if report.passed else FAILED)


def _mechanism(arguments: argparse.Namespace) -> Any:
    from botorch_fed.privacy import (
        CorrelatedGaussianSum,
        GaussianSum,
        PoissonSampling,
        WeightedGaussianSum,
    )

    common: dict[str, Any] = {
        "num_agents": arguments.agents,
        "dim": arguments.dim,
        "clip_norm": arguments.clip_norm,
        "noise_multiplier": arguments.noise_multiplier,
        "sampling": PoissonSampling(arguments.sampling_rate),
        "adjacency": arguments.adjacency,
    }
    if arguments.mechanism == "gaussian-sum":
        return GaussianSum(**common)
    regions = tuple(n % arguments.regions for n in range(arguments.agents))
    correlated = CorrelatedGaussianSum(
        regions=regions, num_regions=arguments.regions, contrast=arguments.contrast, **common
    )
    if arguments.mechanism == "correlated":
        return correlated
    return WeightedGaussianSum(weights=correlated.weights, **common)


def _audit_document(report: AuditReport) -> dict[str, Any]:
    return {
        "command": "audit",
        "passed": report.passed,
        "verdict": report.verdict,
        "mechanism": report.subject,
        "claimed": asdict(report.guarantee),
        "epsilon_lower_bound": report.epsilon_lower_bound,
        "mu_lower_bound": report.mu_lower_bound,
        "confidence": report.confidence,
        "runs": report.runs,
        "rounds": report.rounds,
        "private": report.private,
        "checks": [{**asdict(check), "passed": check.passed} for check in report.checks],
    }


# ------------------------------------------------------------------ report


def _report(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.watch import look

    result = look(arguments.run)
    others = {label: look(folder) for label, folder in arguments.compare}
    out = arguments.run / "report.html" if arguments.out is None else arguments.out
    path = _write_report(result, out, others)
    _say(arguments, f"Report: {path}")
    return _Done({"command": "report", "report": path, "protocol": result.protocol})


def _watch(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.watch import Watch

    try:
        server = Watch(arguments.folder, arguments.port)
    except ImportError as error:
        raise _without_plotly(error) from error
    with server, suppress(KeyboardInterrupt):
        _say(arguments, f"{server.url}\nfollows {arguments.folder}. Ctrl-C ends it.")
        sys.stdout.flush()
        server.serve_forever()
    return _Done({"command": "watch", "folder": arguments.folder, "ended": server.ended})


def _export(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.interchange import save_trials
    from botorch_fed.watch import look

    out = arguments.out or str(arguments.folder / EXPORTS[arguments.to])
    with _other_programs():
        written = save_trials(look(arguments.folder), arguments.to, out, arguments.site)
    for site, count in written.items():
        _say(arguments, f"{site}: {count} trials")
    _say(arguments, f"Saved in {out}")
    return _Done({"command": "export", "to": arguments.to, "out": out, "trials": written})


@contextmanager
def _other_programs() -> Iterator[None]:
    """Other programs tell of nothing but trouble; one that is not installed names its extra."""
    import logging

    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Ax uses what pandas will drop
            yield
    except ImportError as error:
        raise FederatedError(f"{str(error)[0].upper()}{str(error)[1:]}.") from error
    finally:
        logging.disable(logging.NOTSET)


# ------------------------------------------------------------------ hub and site


def _group(commands: Any, name: str, words: str) -> Any:
    """A group of verbs, whose files are private to this user."""
    group = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
    group.set_defaults(private=True)
    return group.add_subparsers(title="commands", metavar="VERB", required=True)


def _add_hub(commands: Any) -> None:
    verbs = _group(commands, "hub", "the hub of a study across machines")

    def verb(
        name: str, command: Callable[[argparse.Namespace], _Done], words: str
    ) -> argparse.ArgumentParser:
        parser = _command(verbs, name, command, words)
        parser.add_argument("folder", type=Path, metavar="HUB", help="the hub's folder")
        return parser

    init = verb("init", _hub_init, "create the hub's folder with certificates and settings")
    address = "host name or address of this machine, as sites reach it"
    init.add_argument("--address", required=True, metavar="NAME", help=address)
    _option(init, "--port", _count(1), 8000, "N", "port on which sites connect")
    start = verb("start", _hub_start, "run the hub's process until it is stopped")
    host = "local address on which the hub accepts sites, 0.0.0.0 for all"
    _option(start, "--host", str, "127.0.0.1", "IP", host)
    admit = verb("admit", _hub_admit, "admit a site's node under a name")
    admit.add_argument("name", metavar="NAME", help="one of the study's agents")
    admit.add_argument("key", type=Path, metavar="NODE.pub", help="public key of the site's node")
    dismiss = verb("dismiss", _hub_dismiss, "remove a site and its key")
    dismiss.add_argument("name", metavar="NAME", help="name of the site")
    verb("sites", _hub_sites, "list the sites and the status of their nodes")
    run = verb("run", _hub_run, "run a study over the sites")
    run.add_argument("study", type=Path, metavar="STUDY.toml", help="the study file")
    _add_out(run)
    seconds = partial(_option, run, kind=float, metavar="SECONDS")
    seconds("--deadline", default=600.0, words="longest wait of a round for its agents")
    absence = "longest wait of a round for absent agents that were present in the round before"
    seconds("--absence", default=60.0, words=absence)
    idle = "longest wait of a round for the first finished evaluation"
    seconds("--idle", default=math.inf, words=idle)
    _option(run, "--quorum", _count(0), 1, "N", "least number of replies of a complete round")
    retries = "number of repetitions of a round below the quorum, before the run stops"
    _option(run, "--retries", _count(0), 0, "N", retries)
    run.add_argument("--keys", type=Path, metavar="DIR", help=KEYS_HELP)


def _hub(arguments: argparse.Namespace) -> Hub:
    from botorch_fed.deploy import Hub

    return Hub(arguments.folder.resolve())


def _hub_init(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.deploy import Hub

    folder = Hub.create(arguments.folder, arguments.address, arguments.port).folder
    _say(arguments, f"Made {folder}. Start it: {PROGRAM} hub start {folder}")
    _say(arguments, f"Give the sites {folder / 'ca.crt'} and the study file.")
    return _Done({"command": "hub init", "folder": folder})


def _hub_start(arguments: argparse.Namespace) -> NoReturn:
    _hub(arguments).start(arguments.host)


def _hub_admit(arguments: argparse.Namespace) -> _Done:
    if not arguments.key.exists():
        raise UsageError(f"There is no file {arguments.key}: expected the site's node.pub.")
    node = _hub(arguments).admit(arguments.name, arguments.key)
    _say(arguments, f"Site {arguments.name!r} may take part.")
    return _Done({"command": "hub admit", "site": arguments.name, "node": str(node)})


def _hub_dismiss(arguments: argparse.Namespace) -> _Done:
    _hub(arguments).dismiss(arguments.name)
    _say(arguments, f"Site {arguments.name!r} is removed.")
    return _Done({"command": "hub dismiss", "site": arguments.name})


def _hub_sites(arguments: argparse.Namespace) -> _Done:
    sites = _hub(arguments).sites()
    table = _table("site", "node")
    for name, status in sites.items():
        table.add_row(name, status)
    _show(arguments, table)
    return _Done({"command": "hub sites", "sites": sites})


def _hub_run(arguments: argparse.Namespace) -> _Done:
    _expect_notes()
    from botorch_fed.study import read_study

    study = read_study(arguments.study)
    out = arguments.out if arguments.out is not None else study.out
    if out is None:
        raise UsageError('A run needs a folder: write out = "…" in the file, or --out.')
    _check_folder(out, arguments.resume)
    result = _hub(arguments).run(
        arguments.study,
        out,
        resume=arguments.resume,
        deadline=arguments.deadline,
        absence=arguments.absence,
        idle=arguments.idle,
        quorum=arguments.quorum,
        retries=arguments.retries,
        keys=arguments.keys,
        watch=lambda done: _note(f"{done} of {study.budget} evaluations of each site"),
    )
    _show(arguments, _contribution_table(result))
    contributions = result.contributions()
    for line in [*_privacy_words(result), f"Saved in {out}. Each site has its own observations."]:
        _say(arguments, line)
    if all(row["last_replied"] is None for row in contributions):
        raise FederatedError("No site has replied in any round: check the sites with hub sites.")
    exhausted = bool((result.privacy or {}).get("exhausted"))
    document = {
        "command": "hub run",
        "out": out,
        "contributions": contributions,
        "privacy": result.privacy,
    }
    return _Done(document, EXHAUSTED if exhausted else FINE)


def _add_ledger(commands: Any) -> None:
    verbs = _group(commands, "ledger", "a ledger on disk, from which studies pay")
    show = _command(verbs, "show", _ledger_show, "show the payments and the budget of a ledger")
    limit = _command(verbs, "limit", _ledger_limit, "set the budget of a ledger")
    for parser in (show, limit):
        parser.add_argument("path", type=Path, metavar="PATH", help="path of [ledger] in a study")
    limit.add_argument("--epsilon", type=float, required=True, help="total epsilon of the budget")
    limit.add_argument("--delta", type=float, required=True, help="delta of the budget")
    limit.add_argument(
        "--raise", dest="more", action="store_true", help="allow a budget above the present one"
    )


def _ledger_show(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.privacy import SharedLedger

    with SharedLedger.at(arguments.path) as ledger:
        return _shown_ledger(arguments, ledger, "ledger show")


def _ledger_limit(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.privacy import Budget, SharedLedger

    budget = Budget(arguments.epsilon, arguments.delta)
    with SharedLedger.at(arguments.path) as ledger:
        old = ledger.budget
        more = old is not None and (budget.epsilon > old.epsilon or budget.delta > old.delta)
        if more and not arguments.more:
            raise FederatedError(
                f"The limit is ({old.epsilon:g}, {old.delta:g}), "  # type: ignore[union-attr]
                f"({budget.epsilon:g}, {budget.delta:g}) is more: pass --raise to raise the limit."
            )
        return _shown_ledger(arguments, ledger.limit(budget), "ledger limit")


def _shown_ledger(arguments: argparse.Namespace, ledger: SharedLedger, command: str) -> _Done:
    budget, payments = ledger.budget, ledger.ledger
    table = _table("for", "releases", "noise multiplier", title=str(ledger.path))
    for entry in payments.entries:
        event = entry.event
        table.add_row(entry.note, str(entry.count), f"{event.noise_multiplier:.4g}")
    spent = None if budget is None else payments.guarantee().epsilon
    _show(arguments, table)
    summary = f"{ledger.releases} releases, no limit"
    if budget is not None:
        summary = f"epsilon {spent:.4g} of {budget.epsilon:g} at delta = {budget.delta:g}"
    head = f"{len(ledger)} events, head {ledger.head[:16]}"
    _say(arguments, f"per {ledger.unit}, {ledger.adjacency}: {summary}; {head}")
    return _Done(
        {
            "command": command,
            "path": str(ledger.path),
            "unit": ledger.unit,
            "adjacency": ledger.adjacency,
            "budget": None if budget is None else [budget.epsilon, budget.delta],
            "spent": spent,
            "releases": ledger.releases,
            "events": len(ledger),
            "head": ledger.head,
        }
    )


def _add_site(commands: Any) -> None:
    verbs = _group(commands, "site", "a site of a study across machines")

    def verb(
        name: str,
        words: str,
        command: Callable[[argparse.Namespace], _Done] | None = None,
        *,
        study: bool = False,
    ) -> argparse.ArgumentParser:
        parser = _command(verbs, name, command or partial(_site_verb, name), words)
        parser.add_argument("folder", type=Path, metavar="SITE", help="the site's folder")
        if study:
            parser.add_argument("study", type=Path, metavar="STUDY.toml", help="the study file")
            name_help = "name of this site, one of the study's agents"
            parser.add_argument("--name", required=True, help=name_help)
        return parser

    verb("init", "create the site's folder with the key of its node", _site_init)
    verb("identity", "print the site's public key, for [identities] of a study", _site_identity)
    start = verb("start", "answer the hub's requests until it is stopped", _site_start, study=True)
    start.add_argument("--hub", required=True, metavar="NAME:PORT", help="the hub's address")
    start.add_argument("--ca", required=True, type=Path, metavar="FILE", help="the hub's ca.crt")
    patience = "longest wait of a request for the objective, before the site answers busy"
    _option(start, "--patience", float, 20.0, "SECONDS", patience)
    start.add_argument("--keys", type=Path, metavar="DIR", help=KEYS_HELP)
    # The trial service, for sites with objective = "ask", and for existing results.
    ask = verb("ask", "print new trials to evaluate")
    _option(ask, "-n", int, 1, "N", "number of trials")
    tell = verb("tell", "record the value of an open trial")
    fail = verb("fail", "mark an open trial as failed")
    for parser in (tell, fail):
        parser.add_argument("id", type=int, metavar="TRIAL", help="number of the trial")
    measured = "the outcome as measured; of several outcomes NAME=VALUE for each; none with --curve"
    tell.add_argument("value", nargs="*", type=_number_or_named, metavar="VALUE", help=measured)
    ended = "fidelity at which the evaluation ended; default that of the trial"
    tell.add_argument("--fidelity", type=float, help=ended)
    on_the_way = "outcomes at fidelities, of a trial that may have been stopped at the last one"
    tell.add_argument(
        "--curve", nargs="+", metavar="FIDELITY=VALUE", type=_point_of_curve, help=on_the_way
    )
    fail.add_argument("--reason", default="", help="reason of the failure; stays at the site")
    attach = verb("attach", "add an existing result")
    parameters = "every parameter of the search space, in its units"
    attach.add_argument(
        "parameters", nargs="+", metavar="NAME=VALUE", type=_named_value, help=parameters
    )
    repeated = f"{measured}, by one --value each"
    attach.add_argument(
        "--value", required=True, action="append", type=_number_or_named, help=repeated
    )
    history = verb("import", "attach all results of an Optuna study or an Ax experiment", _import)
    source = "storage of Optuna (a URL or a SQLite file), or JSON file of an Ax client"
    history.add_argument("source", metavar="SOURCE", help=source)
    history.add_argument("--from", required=True, dest="kind", choices=("optuna", "ax"))
    history.add_argument("--study", metavar="NAME", help="name of Optuna's study, of several")
    label = "name of the result; a second result of the same name is not added"
    attach.add_argument("--label", default="", help=label)
    for parser in (tell, attach):
        sem = "the standard error of the value; of several outcomes --sem NAME=VALUE for each"
        parser.add_argument("--sem", action="append", type=_number_or_named, help=sem)
    verb("status", "print all trials and the best value")
    keys = _command(verbs, "keys", _site_keys, "make the single ckks key, at a trusted place")
    keys.add_argument("study", type=Path, metavar="STUDY.toml", help="the study file")
    keys.add_argument("folder", type=Path, metavar="DIR", help="new folder for the keys")
    shown = verb("show", "print the site's observations in a study", _site_show, study=True)
    out = f"folder in which to save the observations for {PROGRAM} report"
    shown.add_argument("--out", type=Path, metavar="DIR", help=out)


def _named_value(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _point_of_curve(text: str) -> tuple[float, float]:
    at, _, value = text.partition("=")
    try:
        return float(at), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected FIDELITY=VALUE, got {text!r}") from None


def _site(arguments: argparse.Namespace) -> SiteFolder:
    from botorch_fed.deploy import SiteFolder

    return SiteFolder(arguments.folder.resolve())


def _number_or_named(text: str) -> float | tuple[str, float]:
    name, separator, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected VALUE or NAME=VALUE, got {text!r}") from None
    if not separator:
        return value
    if not name:
        raise argparse.ArgumentTypeError(f"expected VALUE or NAME=VALUE, got {text!r}")
    return name, value


def _outcomes(given: list[float | tuple[str, float]] | None) -> float | dict[str, float] | None:
    """One number, or numbers by name; None for none."""
    if not given:
        return None
    named = [one for one in given if isinstance(one, tuple)]
    if len(named) == len(given):
        if len(dict(named)) < len(named):
            raise UsageError(f"An outcome has two values: {[name for name, _ in named]}.")
        return dict(named)
    if len(given) == 1 and not isinstance(given[0], tuple):
        return given[0]
    raise UsageError("Expected one VALUE, or NAME=VALUE for each of several outcomes.")


def _site_verb(verb: str, arguments: argparse.Namespace) -> _Done:
    keys = ("n", "id", "value", "sem", "fidelity", "curve", "reason", "label", "parameters")
    given = {key: getattr(arguments, key) for key in keys if hasattr(arguments, key)}
    if "parameters" in given:
        given["parameters"] = dict(given["parameters"])
    given |= {key: _outcomes(given[key]) for key in ("value", "sem") if key in given}
    answer = _site(arguments).perform(verb, given)
    trials = answer["trials"]
    if trials:
        names = list(trials[0]["parameters"])
        table = _table("trial", *names, "status", "value", "note")
        for trial in trials:
            values = [_short(trial["parameters"][name]) for name in names]
            value = _value_words(trial)
            note = trial["reason"] or trial["label"]
            table.add_row(str(trial["id"]), *values, trial["status"], value, note)
        _show(arguments, table)
    if "note" in answer:
        _say(arguments, f"No new trial: {answer['note']}.")
    if answer.get("best"):
        best = answer["best"]
        _say(arguments, f"Best: trial {best['id']} with {_value_words(best)}.")
    if answer.get("pareto"):
        numbers = ", ".join(str(trial["id"]) for trial in answer["pareto"])
        _say(arguments, f"No other trial beats these in all objectives: {numbers}.")
    return _Done({"command": f"site {verb}", **answer})


def _import(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.interchange import as_data, load_trials

    site = _site(arguments)
    space = site.study().space
    with _other_programs():
        trials = load_trials(arguments.source, arguments.kind, space, arguments.study)
    as_data(trials, space)  # refused before anything is attached
    there = {trial["label"] for trial in site.perform("status", {})["trials"]}
    valued = [trial for trial in trials if trial.values]
    new = [trial for trial in valued if trial.label not in there]
    for trial in new:
        values = {"value": trial.values, "sem": trial.sems or None}
        site.perform("attach", {"parameters": trial.parameters, "label": trial.label, **values})
    counts = {
        "attached": len(new),
        "there_already": len(valued) - len(new),
        "without_value": len(trials) - len(valued),
    }
    _say(
        arguments,
        "Attached: {attached}. There already: {there_already}. Trials without a value: "
        "{without_value}.".format(**counts),
    )
    return _Done({"command": "site import", **counts})


def _value_words(trial: Mapping[str, Any]) -> str:
    """The values of a trial in a table."""
    values = trial["values"]
    if len(values) == 1:
        return f"{trial['value']:.6g}"
    return ", ".join(f"{name} = {value:.6g}" for name, value in values.items())


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _site_init(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.deploy import SiteFolder

    folder = SiteFolder.create(arguments.folder).folder
    _say(arguments, f"Made {folder}. Give {folder / 'node.pub'} to the hub's operator.")
    return _Done({"command": "site init", "folder": folder, "key": folder / "node.pub"})


def _site_identity(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.deploy import DeployError, SiteFolder

    folder = SiteFolder(arguments.folder)
    if not folder.folder.is_dir():
        raise DeployError(f"There is no site in {folder.folder}: make one with site init.")
    _say(arguments, folder.identity)
    return _Done({"command": "site identity", "folder": folder.folder, "key": folder.identity})


def _site_keys(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.deploy import make_keys
    from botorch_fed.study import read_study

    make_keys(read_study(arguments.study), arguments.folder)
    _say(
        arguments,
        f"Made {arguments.folder}: give the folder hub to the hub, and its folder to each site.",
    )
    return _Done({"command": "site keys", "folder": arguments.folder})


def _site_start(arguments: argparse.Namespace) -> _Done:
    import logging

    from botorch_fed.study import read_study

    shown = logging.StreamHandler()
    logging.getLogger("botorch_fed").addHandler(shown)
    try:
        _site(arguments).start(
            read_study(arguments.study),
            arguments.name,
            hub=arguments.hub,
            certificates=arguments.ca,
            patience=arguments.patience,
            keys=arguments.keys,
        )
    finally:
        logging.getLogger("botorch_fed").removeHandler(shown)
    return _Done({"command": "site start", "site": arguments.name})


def _site_show(arguments: argparse.Namespace) -> _Done:
    from botorch_fed.study import read_study

    study = read_study(arguments.study)
    result = _site(arguments).result(study, arguments.name)
    if arguments.out is not None:
        result.save(arguments.out)
    if result.records:
        _show(arguments, _result_table(result))
    else:
        _say(arguments, "Nothing has been observed yet.")
    return _Done({"command": "site show", "observations": result.records})


# ------------------------------------------------------------------ completion


def _completion(arguments: argparse.Namespace) -> _Done:
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    _write(scripts[arguments.shell](_tree()))
    return _Done(None)


@dataclass(frozen=True)
class _Word:
    """An option or a positional argument of a command."""

    names: tuple[str, ...]
    values: tuple[str, ...]
    takes_value: bool
    words: str


def _tree() -> dict[str, tuple[str, list[_Word]]]:
    """The commands with their help and arguments, read from the parser."""
    actions = _parser()._actions
    commands = next(a for a in actions if isinstance(a, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    return {
        name: (helps.get(name, ""), [_word(action) for action in parser._actions])
        for name, parser in commands.choices.items()
    }


def _word(action: argparse.Action) -> _Word:
    values = tuple(map(str, action.choices or ()))
    return _Word(tuple(action.option_strings), values, action.nargs != 0, action.help or "")


def _bash(tree: Mapping[str, tuple[str, list[_Word]]]) -> str:
    cases = []
    values = []
    for name, (_, words) in tree.items():
        options = [option for word in words for option in word.names]
        places = [value for word in words if not word.names for value in word.values]
        cases.append(f'        {name}) words="{" ".join([*options, *places])}" ;;')
        for word in words:
            for option in word.names if word.takes_value else ():
                # An option without a list of values takes a number or a file.
                values.append(f'        {name}:{option}) values="{" ".join(word.values)}" ;;')
    return f"""# bash completion of {PROGRAM}: source <({PROGRAM} completion bash)
_botorch_fed() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local words="" values="-"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(tree)} --help --version" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}:$before" in
{chr(10).join(values)}
    esac
    if [ "$values" != "-" ]; then
        [ -n "$values" ] && COMPREPLY=($(compgen -W "$values" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _botorch_fed {PROGRAM}"""


def _zsh(tree: Mapping[str, tuple[str, list[_Word]]]) -> str:
    # zsh runs completion functions of bash.
    return f"""#compdef {PROGRAM}
# zsh completion of {PROGRAM}: source <({PROGRAM} completion zsh)
autoload -U +X compinit && compinit -i
autoload -U +X bashcompinit && bashcompinit
{_bash(tree)}"""


def _fish(tree: Mapping[str, tuple[str, list[_Word]]]) -> str:
    lines = [f"# fish completion of {PROGRAM}: {PROGRAM} completion fish | source"]
    for name, (about, words) in tree.items():
        start = f"complete -c {PROGRAM}"
        lines.append(f"{start} -n __fish_use_subcommand -a {name} -d {_quoted(about)}")
        prefix = f'{start} -n "__fish_seen_subcommand_from {name}"'
        for word in words:
            options = [f"-l {o[2:]}" if o.startswith("--") else f"-s {o[1:]}" for o in word.names]
            values = f" -a {_quoted(' '.join(word.values))}" if word.values else ""
            needs = " -x" if word.values else " -r" if word.names and word.takes_value else ""
            if options or values:
                about = f" -d {_quoted(word.words)}" if word.words else ""
                lines.append(f"{prefix} {' '.join(options)}{needs}{values}{about}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def run_and_exit() -> NoReturn:
    """For ``python -m botorch_fed.cli``."""
    sys.exit(main())


if __name__ == "__main__":
    run_and_exit()
