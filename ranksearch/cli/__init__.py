"""The command line: it joins the rooms and holds no logic of its own.

Heavy packages are imported inside the commands, so that `ranksearch --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import UTC, datetime

import click

from ranksearch import __version__
from ranksearch.cli.assets import assets
from ranksearch.cli.common import open_streams, say
from ranksearch.cli.compose import compose
from ranksearch.cli.jobs import logs, stop, submit
from ranksearch.cli.knowledge import evidence, learn, recommend
from ranksearch.cli.replay import replay
from ranksearch.cli.results import export, list_studies, report, status
from ranksearch.cli.service import doctor, pull, sync, ui
from ranksearch.cli.study import check, plan, search
from ranksearch.errors import InputError, RankSearchError, without_login

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ranksearch")
def cli() -> None:
    """Find the smallest LoRA rank that is as good as the best, and know how sure that is.

    \b
    A first study:   ranksearch search search_spaces/quickstart.yaml
    Its report:      ranksearch report quickstart
    Its adapter:     ranksearch export quickstart --to peft --out my-adapter
    Completion:      eval "$(_RANKSEARCH_COMPLETE=bash_source ranksearch)"   (or zsh_source, fish_source)
    """


for _command in (
    check,
    plan,
    search,
    submit,
    logs,
    stop,
    list_studies,
    status,
    report,
    export,
    evidence,
    learn,
    recommend,
    replay,
    compose,
    assets,
    ui,
    sync,
    pull,
    doctor,
):
    cli.add_command(_command)


def main() -> None:
    """Runs the command line and ends the process: 0 done, 1 it failed, 2 the input is wrong."""
    # Nothing of ours may reach a hub's prompt, a progress bar on a pipe, or a tokenizer's fork warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    open_streams()
    try:
        code = cli.main(prog_name="ranksearch", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except RankSearchError as error:
        say(_told(error))
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        what = f"{error.filename} can't be used" if error.filename else "the machine is at fault"
        say(f"Error: {what}: {error.strerror or error}. Look at its permissions and at the disk. {_keep_traceback()}")
        sys.exit(1)
    except Exception as error:
        fault = without_login(f"{type(error).__name__}: {error}")
        say(f"Error: {fault}. This is a fault in ranksearch. {_keep_traceback()}")
        sys.exit(1)


def _told(error: RankSearchError) -> str:
    """One message, every fault on a line of its own."""
    if isinstance(error, InputError) and len(error.faults) > 1:
        return f"Error: {len(error.faults)} faults:\n" + "\n".join(f"- {fault}" for fault in error.faults)
    return f"Error: {error}"


def _keep_traceback() -> str:
    """Writes the traceback where it can be sent from, and says where."""
    from ranksearch.store import default_home, write_atomic

    path = default_home() / f"crash-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}.txt"
    try:
        write_atomic(path, without_login(traceback.format_exc()))
    except (RankSearchError, OSError):
        return "The traceback could not be written."
    return f"The traceback is in {path}."
